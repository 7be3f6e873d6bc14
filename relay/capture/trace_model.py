"""Tracing a whole model with each call of a repeated block as one op, and running modules on fake tensors.

The trace is made before dispatch to autograd. It holds the ops that the model calls (`dropout`, `linear`,
`scaled_dot_product_attention`), so running it under autograd does what the model does in eager PyTorch. Tensors are
fake, so no memory is used. Invariant: the modules are the same afterwards.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from relay.capture.eager_fallback import run_made_up
from relay.capture.guards.attribute_reads import reads_unrecorded
from relay.capture.guards.data_guards import GuardTracer, guarding
from relay.capture.guards.functional_call import call_with
from relay.capture.guards.inference_mode import inference_as_no_grad
from relay.capture.guards.messages import explain
from relay.capture.guards.mutated_arguments import MemoryUse, WatchedMemory, call_recorded, write_back
from relay.capture.guards.plain_tensors import PlainTensors
from relay.capture.guards.unsupported import hooks_wait, inside_layer, refusing
from relay.capture.native.kernel_strides import kernel_strides_mode
from relay.capture.traced_module import autocast
from relay.errors import CaptureError, LayerCallRefused, PartitionError, RelayError
from relay.graph.autocast_regions import note_regions
from relay.graph.pytree import TensorTree, is_taken_apart, tensor_leaves
from relay.graph.recorded_outputs import record, recorded_names

logger = logging.getLogger(__name__)

_library = torch.library.Library("relay", "DEF")
_library.define("block(int call, Tensor[] inputs) -> Tensor[]")

BLOCK = torch.ops.relay.block.default
"""The op that stands for one call of a repeated block in a trace."""

SET_GRAD_ENABLED = torch._C._set_grad_enabled
"""What a trace calls where the model turned gradients on or off; its argument is the new mode."""

AroundCall = Callable[[str, nn.Module], AbstractContextManager[None]]
"""Gives a context to run a layer in, by its name and the layer."""

_running: list[list[BlockCall]] = []


@dataclass(eq=False)
class BlockCall:
    """One call of a block in a trace.

    `forward` is the block's own, `compute` the dtype of autocast around the call, and `gradients` tells whether the
    call is outside of no_grad. `input_tree` and `output_tree` nest its arguments and its output, whose traced tensors
    are `outputs`. If the block `changes` lists, dicts or objects among its arguments, its output is (its result, its
    arguments after the call). What hooks in it `recorded`, by name, comes out beside that. A `skipped` call returns its
    first tensor. `around` is entered around the run of the block, with its name and itself. `memory` is what it does to
    the memory of its arguments.
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
    recorded: tuple[str, ...] = ()
    outputs: Sequence[torch.Tensor] = ()
    around: AroundCall | None = None
    memory: MemoryUse = field(default_factory=MemoryUse)

    def entered(self) -> AbstractContextManager[None]:
        """The context to run the block in."""
        return contextlib.nullcontext() if self.around is None else self.around(self.name, self.block)


def _block_on_fakes(call: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The op in a trace: runs the forward of the block on fake tensors, for the shapes of its outputs."""
    block_call = _running[-1][call]

    names = recorded_names()

    def observed(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        given = tensor_leaves((args, kwargs))[0]
        with WatchedMemory() as watched:
            found = call_recorded(block_call.forward, args, kwargs, names)
        block_call.memory = watched.use(given, tensor_leaves(found[0])[0], block_call.block)
        return found

    def take_apart(found: tuple[Any, Any]) -> list[torch.Tensor]:
        output, (block_call.changes, block_call.recorded) = found
        outputs, block_call.output_tree = tensor_leaves(output)
        return outputs

    args, kwargs = block_call.input_tree.fill(inputs)
    # Autocast is off inside of an op, but the block runs under it.
    try:
        with inside_layer(), reads_unrecorded(), hooks_wait(), autocast(block_call.compute), block_call.entered():
            outputs = take_apart(observed(*args, **kwargs))
    except Exception as failure:
        with inside_layer(), reads_unrecorded(), autocast(block_call.compute), block_call.entered():
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
    # An op must not return its inputs or views of them, as a block may.
    return [torch.empty_like(output) for output in outputs]


_TRAINED = torch.zeros((), requires_grad=True)


class _DependsOn(torch.autograd.Function):
    """Makes a tensor require a gradient, as if it depended on another. It adds no op to a trace."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        context.mark_dirty(tensor)
        return tensor


def _mark_as_trained(outputs: Sequence[torch.Tensor]) -> None:
    """Make the outputs of a block with trainable parameters require a gradient, as in eager. Models may check that."""
    for output in outputs:
        if output.is_floating_point() and not output.requires_grad:
            with inside_layer():
                _DependsOn.apply(output, _TRAINED)


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    """Whether an object holds tensors in its attributes, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return True
    if depth > 4 or isinstance(value, (type, nn.Module)):
        return False
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(item, depth + 1) for item in value)
    inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return any(_holds_tensors(item, depth + 1) for item in inside.values())


torch.library.register_fake("relay::block", _block_on_fakes, lib=_library)


@contextlib.contextmanager
def blocks_as_ops(
    blocks: Mapping[str, nn.Module],
    skipped: Container[str] = (),
    compute: torch.dtype = torch.float32,
    around: AroundCall | None = None,
) -> Iterator[list[BlockCall]]:
    """While open, each traced call of one of these modules becomes one `relay::block` op. Yields the calls, in order.

    `compute` is the dtype of the autocast around the trace. Blocks named in `skipped` return their first tensor
    unchanged; their ops stay in the trace without users. Calls raise PartitionError for a block that cannot be skipped,
    and for one that the model calls under another autocast. Each block runs within `around`.
    """
    calls: list[BlockCall] = []
    originals: list[tuple[nn.Module, Any]] = []

    def stand_in(name: str, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call_block(*args: Any, **kwargs: Any) -> Any:
            within = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
            if within != compute:
                raise LayerCallRefused(
                    f"the model calls layer {name!r} under a torch.autocast of its own, to {within}, but precision= "
                    f"asks for {compute}. Remove the autocast, or move it into the forward of the layer."
                )
            tensors, tree = tensor_leaves((args, kwargs))
            call = BlockCall(name, block, forward, compute, torch.is_grad_enabled(), tree, around=around)
            calls.append(call)
            outputs = BLOCK(len(calls) - 1, tensors)
            if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in block.parameters()):
                _mark_as_trained(outputs)
            assert call.output_tree is not None
            call.outputs = outputs
            if name in skipped:
                call.skipped = True
                if len(outputs) != 1 or outputs[0].shape != tensors[0].shape:
                    raise LayerCallRefused(
                        f"layer {name!r} cannot be left out: it returns tensors of shapes "
                        f"{[tuple(output.shape) for output in outputs]} for a first argument of shape "
                        f"{tuple(tensors[0].shape)}. A layer that is left out must return one tensor of the shape of "
                        "its first argument."
                    )
                return call.output_tree.fill(tensors[:1])
            output = call.output_tree.fill(outputs)
            if call.recorded:
                output, recorded = output
                record(recorded)
            if not call.changes:
                return output
            result, given = output
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
    """The graph of `function(*arguments)`, which returns a list of tensors.

    With a `guard_tracer` the code may read values of the batch, whose tensors are the last of the arguments. The
    metadata `unseen` of the graph explains constants that no op made. Raises CaptureError, or PartitionError for code
    that a trace would lose; `name` is used in errors.
    """

    def guarded(*given: Any) -> Any:
        if guard_tracer is None:
            return function(*given)
        with guarding(guard_tracer):
            return function(*given)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Without symbolic shapes an op whose shape depends on data raises at once. Fake arguments keep their mode.
            mode = detect_fake_mode(arguments) or kernel_strides_mode(allow_non_fake_inputs=True)
            fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, tuple(arguments))
            # "fake" would make fakes of the fakes, with each attribute that it reads passing through the modes.
            with mode, refusing() as unseen, inference_as_no_grad():
                traced = make_fx(guarded, tracing_mode="real", pre_dispatch=True)(*fakes)
            _refuse_wrapped(traced, name)
            note_regions(traced.graph)
            traced.meta["unseen"] = unseen
            return traced
    except RelayError:
        raise
    except Exception as failure:
        raise explain(failure, name) from failure


def _refuse_wrapped(traced: fx.GraphModule, name: str) -> None:
    """Raise CaptureError for code within `torch.func` transforms, whose inner tensors a trace takes for constants."""
    for node in traced.graph.find_nodes(op="get_attr"):
        constant = getattr(traced, str(node.target), None)
        if isinstance(constant, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(constant):
            raise CaptureError(
                f"layer {name!r} cannot be captured: torch.func (vmap, grad, jvp) is not traced there", layer=name
            )


def run_fake(module: nn.Module, fakes: Sequence[torch.Tensor], name: str) -> Any:
    """`module(*fakes)` on fake tensors from one call of `as_fake`. Nothing in the module changes. Raises CaptureError.

    A module that fails on fake tensors is run on made-up numbers instead. `name` is used in errors.
    """
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
    """The outputs of a module on made-up numbers, after it failed on fake tensors. Raises if it fails again."""
    if isinstance(failure, RelayError):
        raise failure
    try:
        return run_made_up(module, forward, fill, inputs)
    except RelayError:
        raise
    except Exception as second:
        logger.info("%s fails on real tensors as well: %s", name, second)
        raise explain(failure, name) from failure
