"""Tracing a whole model with its repeated blocks as opaque ops, and running modules on fake tensors.

The trace is made before dispatch to autograd, so that it keeps the ops a model calls (`dropout`, `linear`,
`scaled_dot_product_attention`) and running it again under autograd is what eager would have done. No memory is
taken: tensors are fake.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from relay.capture.eager_fallback import run_made_up
from relay.capture.guards.attribute_reads import reads_unrecorded
from relay.capture.guards.data_guards import GuardTracer, guarding
from relay.capture.guards.functional_call import call_with
from relay.capture.guards.inference_mode import inference_as_no_grad
from relay.capture.guards.messages import explain
from relay.capture.guards.mutated_arguments import call_observed, write_back
from relay.capture.guards.plain_tensors import PlainTensors
from relay.capture.guards.unsupported import hooks_wait, inside_layer, refusing
from relay.capture.traced_module import autocast
from relay.errors import PartitionError, RelayError
from relay.graph.pytree import TensorTree, is_taken_apart, tensor_leaves

logger = logging.getLogger(__name__)

_library = torch.library.Library("relay", "DEF")
_library.define("block(int call, Tensor[] inputs) -> Tensor[]")

BLOCK = torch.ops.relay.block.default
"""The op that stands for one call of a repeated block in a trace."""

SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""What a trace calls where the model turned gradients on or off; its argument is the new mode."""

_running: list[list[BlockCall]] = []


@dataclass(eq=False)
class BlockCall:
    """One call of a block in a trace: which block, computed in what, with `gradients` or under no_grad, how its
    arguments were nested, and its output.

    Where the block `changes` the lists or dicts it is given, its output is (what it returns, what it was given).
    """

    name: str
    block: nn.Module
    forward: Callable[..., Any]
    compute: torch.dtype
    gradients: bool
    input_tree: TensorTree
    output_tree: TensorTree | None = None
    skipped: bool = False
    changes: bool = False


def _block_on_fakes(call: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the op does in a trace: the block's own forward, on fake tensors, for the shapes of its outputs."""
    block_call = _running[-1][call]

    def observed(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return call_observed(block_call.forward, args, kwargs)

    def take_apart(found: tuple[Any, Any]) -> list[torch.Tensor]:
        result, given = found
        block_call.changes = given is not None
        outputs, block_call.output_tree = tensor_leaves(found if block_call.changes else result)
        return outputs

    args, kwargs = block_call.input_tree.fill(inputs)
    # An op runs below autocast, which is off for it; what it stands for runs under it.
    try:
        with inside_layer(), reads_unrecorded(), hooks_wait(), autocast(block_call.compute):
            outputs = take_apart(observed(*args, **kwargs))
    except Exception as failure:
        with inside_layer(), reads_unrecorded(), autocast(block_call.compute):
            fill = block_call.input_tree.fill
            found = _run_made_up(block_call.block, observed, fill, inputs, block_call.name, failure)
        outputs = take_apart(found)
        return [torch.empty(output.shape, dtype=output.dtype) for output in outputs]
    for constant in block_call.input_tree.constants:
        if not is_taken_apart(constant) and _holds_tensors(constant):
            raise PartitionError(
                f"layer {block_call.name!r} takes an object of class {type(constant).__name__} that holds tensors, and "
                "what the layer reads and changes in it cannot be seen. Pass tensors in tuples, lists or dicts, or "
                "register the class with torch.utils._pytree.register_pytree_node."
            )
    # An op may not return its inputs or views of them; a block may.
    return [torch.empty_like(output) for output in outputs]


_TRAINED = torch.zeros((), requires_grad=True)


class _DependsOn(torch.autograd.Function):
    """Has autograd take a tensor for one that depends on another. It computes nothing and leaves nothing in a trace."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        context.mark_dirty(tensor)
        return tensor


def _mark_as_trained(outputs: Sequence[torch.Tensor]) -> None:
    """Have what a block with parameters to train returns require a gradient, as it does in eager: models ask."""
    for output in outputs:
        if output.is_floating_point() and not output.requires_grad:
            with inside_layer():
                _DependsOn.apply(output, _TRAINED)


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    """Whether tensors can be reached through an object's attributes, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return True
    if depth > 4 or isinstance(value, (type, nn.Module)):
        return False
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(one, depth + 1) for one in value)
    inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return any(_holds_tensors(one, depth + 1) for one in inside.values())


torch.library.register_fake("relay::block", _block_on_fakes, lib=_library)


@contextlib.contextmanager
def blocks_as_ops(
    blocks: Mapping[str, nn.Module], skipped: Container[str] = (), compute: torch.dtype = torch.float32
) -> Iterator[list[BlockCall]]:
    """While open, a traced call of any of these modules becomes one `relay::block` op. Yields the calls, in order.

    What they return is what they return under `autocast(compute)`, the same that the trace is made under. Those
    `skipped` hand on the first tensor they are given; their ops stay in the trace, used by nobody.
    """
    calls: list[BlockCall] = []
    originals: list[tuple[nn.Module, Any]] = []

    def stand_in(name: str, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call_block(*args: Any, **kwargs: Any) -> Any:
            within = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
            if within != compute:
                raise PartitionError(
                    f"the model calls layer {name!r} under a torch.autocast of its own, which makes it compute in "
                    f"{within}, where precision= says {compute}. Take the autocast out, or put it into the layer's own "
                    "forward."
                )
            tensors, tree = tensor_leaves((args, kwargs))
            call = BlockCall(name, block, forward, compute, torch.is_grad_enabled(), tree)
            calls.append(call)
            outputs = BLOCK(len(calls) - 1, tensors)
            if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in block.parameters()):
                _mark_as_trained(outputs)
            assert call.output_tree is not None
            if name in skipped:
                call.skipped = True
                if len(outputs) != 1 or outputs[0].shape != tensors[0].shape:
                    raise PartitionError(
                        f"layer {name!r} cannot be left out: it returns {[tuple(one.shape) for one in outputs]} for a "
                        f"first argument of {tuple(tensors[0].shape)}, and only a layer that returns one tensor of "
                        "that shape can hand on what it is given."
                    )
                return call.output_tree.fill(tensors[:1])
            if not call.changes:
                return call.output_tree.fill(outputs)
            result, given = call.output_tree.fill(outputs)
            write_back((args, kwargs), given, tensors)
            return result

        return call_block

    _running.append(calls)
    try:
        for name, block in blocks.items():
            originals.append((block, block.__dict__.get("forward")))
            block.forward = stand_in(name, block, block.forward)
        yield calls
    finally:
        _running.pop()
        for block, own in originals:
            if own is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = own


def trace(
    function: Callable[..., Any], arguments: Sequence[Any], name: str, guard_tracer: GuardTracer | None = None
) -> fx.GraphModule:
    """The graph of `function(*arguments)`, whose result is a flat list of tensors. Raises CaptureError.

    `guard_tracer` answers what the code asks of the batch, which are the last of the arguments' tensors.
    """

    def guarded(*given: Any) -> Any:
        if guard_tracer is None:
            return function(*given)
        with guarding(guard_tracer):
            return function(*given)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Fake tensors of our own: a mode without symbols, in which an op that depends on data says so at once.
            # Arguments that are fake already keep theirs.
            mode = detect_fake_mode(arguments) or FakeTensorMode(allow_non_fake_inputs=True)
            fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, tuple(arguments))
            with refusing() as unseen, inference_as_no_grad():
                traced = make_fx(guarded, tracing_mode="fake", pre_dispatch=True)(*fakes)
            traced.meta["unseen"] = unseen
            return traced
    except RelayError:
        raise
    except Exception as failure:
        raise explain(failure, name) from failure


def run_fake(module: nn.Module, fakes: Sequence[torch.Tensor], name: str) -> Any:
    """`module(*fakes)` on fake tensors from one `as_fake`; nothing in the module changes. Raises CaptureError."""
    mode = next(fake.fake_mode for fake in fakes)  # type: ignore[attr-defined]
    try:
        with PlainTensors(module), mode, hooks_wait(), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            originals = [*module.parameters(), *module.buffers()]
            return call_with(module, originals, [mode.from_tensor(tensor) for tensor in originals], tuple(fakes))
    except RelayError:
        raise
    except Exception as failure:
        outputs = _run_made_up(module, module.forward, lambda tensors: (tuple(tensors), {}), fakes, name, failure)
    return tuple(mode.from_tensor(output) for output in outputs)


def _run_made_up(
    module: nn.Module,
    forward: Callable[..., Any],
    fill: Callable[[Any], Any],
    inputs: Sequence[torch.Tensor],
    name: str,
    failure: Exception,
) -> Any:
    """What a module returns that failed on fake tensors; raises that failure if it fails on real ones too."""
    if isinstance(failure, RelayError):
        raise failure
    try:
        return run_made_up(module, forward, fill, inputs)
    except RelayError:
        raise
    except Exception as second:
        logger.info("%s fails on real tensors as well: %s", name, second)
        raise explain(failure, name) from failure
