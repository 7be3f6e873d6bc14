"""From a segment, a module called with tensors, to programs: its forward, and its recompute with backward.

One route gives both programs: the joint
graph of forward and backward that `aot_export_joint_with_descriptors` makes, without decompositions, so that its
ops and their order are those of eager autograd and so are its results, to the bit. From it come

  forward    the outputs and the new values of buffers;
  backward   the gradients alone: what they do not need of the recomputed forward is dropped, new values of buffers
             included, so that state changes once. Where the forward keeps what the backward reads of it
             (`relay.capture.saved_tensors`) nothing is recomputed.

Random ops become calls of `hal.random` with a key: the same op number in both programs, hence the same mask.

It knows nothing of models as wholes (`partition`) nor of where tensors live.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from hal.errors import Unsupported
from relay.capture.captured import Captured
from relay.capture.check_dtypes import check_operands
from relay.capture.core.lowering import Lowering, attention, decompositions
from relay.capture.core.wrong_decompositions import own_kernels
from relay.capture.eager_fallback import eager_programs
from relay.capture.guards.attribute_reads import Reads, recorded_reads
from relay.capture.guards.functional_call import put_back
from relay.capture.guards.messages import HasEffect, explain_eager, in_short, operation, reason, sparse_gradient
from relay.capture.guards.plain_tensors import PlainTensors, UsedTensors, constants_of
from relay.capture.joint_graph import Extraction
from relay.capture.memory_order import Order, order_of, stored
from relay.capture.norm_dtypes import correct_statistics
from relay.capture.random_ops import draws_by_itself
from relay.capture.trace_for_device import CPU, fakes_on, missing, spell_out
from relay.capture.traced_module import Traced, autocast
from relay.errors import RelayError

logger = logging.getLogger(__name__)


def capture(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    name: str,
    ends_in_loss: bool = False,
    compute: torch.dtype = torch.float32,
    lowering: Lowering = Lowering.NATIVE,
    training: bool = True,
    save: bool = False,
    device: torch.device = CPU,
    seeds: Mapping[int, torch.Tensor] | None = None,
    gradients: Mapping[int, Order] | None = None,
    strides: bool = True,
    unreached: frozenset[int] = frozenset(),
) -> Captured:
    """Capture `module(*inputs)`, which returns a tuple of tensors, the loss first where it `ends_in_loss`.

    `requires_grad` of the inputs is respected. `inputs` are examples: shapes, dtypes and `requires_grad` count,
    values do not. With `compute` bfloat16 or float16 the module runs as under PyTorch's autocast; a parameter that is
    only ever used rounded to that dtype then comes in rounded. `lowering` is what the device wants (`NATIVE` among its
    tags, or core), and `device` where native graphs are run. With `save` the backward does not recompute the forward:
    what it reads of it is kept (a segment that runs eagerly, or ends in the loss, keeps nothing). Without `training` no
    gradient will be asked for.

    Strides of the inputs count. The gradients of outputs are taken to lie as the outputs do, but for those that `seeds`
    has examples of; those of inputs come as they are made, or in the orders that `gradients` names. Without `strides`
    everything lies as it is written, as it always does in core graphs.

    The outputs `unreached` are those that no gradient comes back to: as in plain PyTorch, what only they depend on has
    no gradient then, rather than one of zeros.

    Raises CaptureError.
    """
    if lowering is Lowering.NATIVE and any(isinstance(one, (nn.RNNBase, nn.RNNCellBase)) for one in module.modules()):
        logger.info("layer %r holds recurrent layers, and runs as PyTorch's own kernels have it", name)
        return _run_eagerly(
            module, inputs, name, ends_in_loss, compute, training, device, seeds, gradients, strides, unreached
        )
    wants_gradients = any(tensor.requires_grad for tensor in [*module.parameters(), *inputs])
    strides = strides and lowering is not Lowering.CORE
    examples = dict(seeds or {}) if wants_gradients else {}
    orders = {index: order_of(example) for index, example in examples.items()}
    seeding = [stored(example, orders[index]) for index, example in examples.items()]
    # The joint export wants something to differentiate; a zero-sized input is as good as any.
    spare = [] if wants_gradients else [torch.zeros(0, requires_grad=True)]
    given = (*inputs, *seeding, *spare)
    try:
        if lowering is Lowering.NATIVE and device.type != "cpu":
            traced, reads, plain = _trace_elsewhere(
                module, given, name, compute, not wants_gradients, device, orders, strides, unreached
            )
        else:
            traced, reads, plain = _trace(
                module, given, compute, not wants_gradients, lowering, orders, strides, unreached
            )
    except Exception as failure:
        why = reason(failure, name)
        if why is None:
            raise
        try:
            captured = _run_eagerly(
                module, inputs, name, ends_in_loss, compute, training, device, seeds, gradients, strides, unreached
            )
        except RelayError:
            raise
        except Exception as second:
            raise explain_eager(second, name, why) from failure
        where = f"layer {name!r}" + (" (or the loss, which runs with it)" if ends_in_loss else "")
        if lowering is Lowering.CORE:
            raise Unsupported(
                f"{where} would have to run eagerly, op by op, since {why}. Use a device that executes PyTorch, such "
                "as 'cpu' or 'cuda', or write the layer with fixed shapes and control flow.",
                op=operation(failure),
            ) from failure
        warnings.warn(
            f"{where} runs eagerly, op by op, since {why}: right, but slower, and only on devices that execute "
            "PyTorch.",
            stacklevel=2,
        )
        return captured
    plain.refuse_states(name, constants_of(traced))
    check_operands(traced.graph, module, inputs, name, ends_in_loss)
    if lowering is not Lowering.CORE:
        correct_statistics(traced.graph, device)
    extraction = Extraction(module, traced, name, wants_gradients, compute, lowering, orders, strides)
    return _cut(extraction, reads, ends_in_loss, name, gradients or {}, save)


def _cut(
    extraction: Extraction, reads: Reads, ends_in_loss: bool, name: str, gradients: Mapping[int, Order], save: bool
) -> Captured:
    """The programs of a trace; the trace stays as it is."""
    captured = extraction.named(name).captured(dict(gradients), ends_in_loss, save and not ends_in_loss)
    return replace(captured, reads=reads, recut=functools.partial(_cut, extraction, reads, ends_in_loss))


def _trace(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    compute: torch.dtype,
    has_spare: bool,
    lowering: Lowering,
    seeds: Mapping[int, Order],
    strides: bool,
    unreached: frozenset[int],
    device: torch.device = CPU,
) -> tuple[fx.GraphModule, Reads, PlainTensors]:
    """The joint graph of a module, what its code read, and what it did to plain tensors. Raises what tracing raises."""
    traced = Traced(module, compute, has_spare, device, seeds, strides, unreached)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        # A module's tensors that are neither parameters nor buffers meet fake ones in the trace.
        mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(own_kernels())
        table = None
        if lowering is not Lowering.NATIVE:
            stack.enter_context(attention())
        if lowering is Lowering.CORE:
            table = decompositions()
        if device != CPU:
            inputs = stack.enter_context(fakes_on(device, mode, module, inputs))
        stack.enter_context(put_back(module))
        # In this order: to look at attributes would count as the module's code reading them all.
        plain = stack.enter_context(PlainTensors(module))
        reads = stack.enter_context(recorded_reads(module))
        joint = aot_export_joint_with_descriptors(stack, traced, tuple(inputs), {}, decompositions=table)
        _refuse_effects(joint.graph_module.graph)
        if device != CPU:
            spell_out(joint.graph_module.graph)
        return joint.graph_module, reads, plain


def _refuse_effects(graph: fx.Graph) -> None:
    """Raise HasEffect for ops that PyTorch threads tokens through, so that they stay in order: not ours to cut."""
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target) == "with_effects":
            raise HasEffect(str(node.args[1]))


def _trace_elsewhere(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    name: str,
    compute: torch.dtype,
    has_spare: bool,
    device: torch.device,
    seeds: Mapping[int, Order],
    strides: bool,
    unreached: frozenset[int],
) -> tuple[fx.GraphModule, Reads, PlainTensors]:
    """The joint graph as PyTorch would run it on `device`, or the portable one where it cannot be traced for that."""
    why = missing(device)
    if not why:
        try:
            traced = _trace(module, inputs, compute, has_spare, Lowering.NATIVE, seeds, strides, unreached, device)
            if any(draws_by_itself(node) and "attention" in str(node.target) for node in traced[0].graph.nodes):
                traced = _trace(
                    module, inputs, compute, has_spare, Lowering.PORTABLE, seeds, strides, unreached, device
                )
            return traced
        except Exception as failure:
            why = in_short(failure)
    logger.warning("%s is traced for any device, attention as matrix products, and not for %s: %s", name, device, why)
    return _trace(module, inputs, compute, has_spare, Lowering.PORTABLE, seeds, strides, unreached)


def _run_eagerly(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    name: str,
    ends_in_loss: bool,
    compute: torch.dtype,
    training: bool,
    device: torch.device,
    seeds: Mapping[int, torch.Tensor] | None,
    gradients: Mapping[int, Order] | None,
    strides: bool,
    unreached: frozenset[int],
) -> Captured:
    """A segment that is not captured: Python runs it at every visit. Raises what the module raises."""
    for path, one in module.named_modules():
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse and one.weight.requires_grad:
            raise sparse_gradient(name, f"{path}.weight")
    with PlainTensors(module) as plain, UsedTensors() as used:
        made = eager_programs(
            module, inputs, name, ends_in_loss, functools.partial(autocast, compute, device.type), training, seeds,
            gradients, strides, unreached,
        )  # fmt: skip
    plain.refuse_states(name, used.addresses)
    forward = made.programs["forward"]
    assert forward is not None
    return Captured(
        parameter_names=tuple(made.segment.parameters),
        buffer_names=tuple(made.segment.buffers),
        forward=forward,
        backward=made.programs["backward"],
        loss=made.programs["loss"],
        joint=made.programs["joint"],
        output_requires_grad=made.wants,
        saved_bytes=made.saved_bytes,
        saved=made.saved,
        eager=made.segment,
        output_orders=made.layouts.outputs,
        seed_orders=made.layouts.seeds,
        gradient_orders=made.layouts.gradients,
    )
