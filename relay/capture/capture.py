"""From a segment to programs: its forward, and its recompute with backward.

Both come from the joint graph of forward and backward that PyTorch's `aot_export_joint_with_descriptors` makes. It is
not decomposed for native devices, so its ops and their order are those of eager autograd, and so are its results, to
the bit. The programs are

  forward    the outputs and the new values of buffers;
  backward   the gradients alone. What they do not need of the recomputed forward is dropped, and so are the new values
             of buffers, since state must change once. If the forward saves what the backward reads of it
             (`relay.capture.saved_tensors`), nothing is recomputed.

Random ops become calls of `hal.random` with a key. An op has the same number in both programs, and so the same mask.

Models as wholes (`relay.partition`), and where tensors live at run time, are not known here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing

from hal.errors import Unsupported
from relay.capture.captured import Captured
from relay.capture.core.lowering import Lowering, attention, cumulative_averages, decompositions
from relay.capture.eager_fallback import eager_programs
from relay.capture.guards.attribute_reads import Reads, recorded_reads
from relay.capture.guards.check_dtypes import check_operands
from relay.capture.guards.counters import Counter
from relay.capture.guards.functional_call import put_back
from relay.capture.guards.messages import (
    NotAGraph,
    described_layer,
    explain_eager,
    in_short,
    operation,
    reason,
    sparse_gradient,
)
from relay.capture.guards.plain_tensors import PlainTensors, UsedTensors, constants_of
from relay.capture.joint_graph import Extraction
from relay.capture.memory_order import Order
from relay.capture.native.dropout_scale import correct_dropout_scale
from relay.capture.native.kernel_strides import kernel_strides_mode
from relay.capture.native.python_kernels import own_kernels
from relay.capture.native.subclass_branches import eager_branches
from relay.capture.norm_dtypes import correct_statistics
from relay.capture.random_ops import draws_by_itself, has_keyed_form
from relay.capture.request import CaptureRequest
from relay.capture.states.lasting_state import LastingStates, keeps_state, refuse_if_read
from relay.capture.states.own_generators import BY_PYTHON, decide, have_drawn, python_numbers, same_python_numbers
from relay.capture.trace_for_device import CPU, fakes_on, missing, spell_out
from relay.capture.traced_module import TracedModule
from relay.errors import RelayError

logger = logging.getLogger(__name__)


def capture(request: CaptureRequest) -> Captured:
    """Trace a segment and return its programs.

    A segment that cannot be traced, or that holds recurrent layers, runs eagerly instead: Python runs its module at
    every visit. A warning names the reason. For devices that execute core graphs the host does that, and only for code
    outside of the layers.

    Raises CaptureError if the segment cannot be captured and cannot run eagerly either, or if its ops refuse the dtypes
    of the inputs, and Unsupported if a layer would have to run eagerly under the core lowering.
    """
    module: Any = request.module
    name = request.name
    if getattr(module, "runs_eagerly", False):  # its trace has failed already
        if module.where:
            what = f"the code of {type(module.around.model).__name__} {module.where}"
            _say_that_it_runs_eagerly(what, module.why, request.lowering is Lowering.CORE)
        return _run_eagerly(request)
    if request.lowering is Lowering.NATIVE and _is_recurrent(module):
        logger.info("layer %r holds recurrent layers, so it runs eagerly, with PyTorch's own kernels", name)
        return _run_eagerly(request)
    states, drawn = LastingStates(module.named_modules()), python_numbers()
    try:
        traced, reads, plain = _trace_as_asked(request)
        if have_drawn(drawn) and decide(traced, lambda: _trace_as_asked(request)[0]):
            raise NotAGraph(BY_PYTHON, "decide what it computes")
    except Exception as failure:
        why = reason(failure, name)
        if why is None:
            raise
        kept = states.now().holding_fakes()
        try:
            captured = _run_eagerly(request)
            if captured.eager is not None and have_drawn(drawn):
                captured.eager.draws_python = True  # its first run may have drawn nothing
        except RelayError:
            raise
        except Exception as second:
            if kept:
                raise keeps_state(f"layer {name!r}", kept, name) from failure
            raise explain_eager(second, name, why) from failure
        where = described_layer(name, request.ends_in_loss)
        if request.lowering is Lowering.CORE and getattr(module, "outside_layers", False):
            _say_that_it_runs_eagerly(where, why, True)
            return captured
        if request.lowering is Lowering.CORE:
            raise Unsupported(
                f"{where} would have to run eagerly, op by op, since {why}. Use a device that executes PyTorch, such "
                "as 'cpu' or 'cuda', or write the layer with fixed shapes and control flow.",
                op=operation(failure),
            ) from failure
        warnings.warn(
            f"{where} runs eagerly, op by op, since {why}. Results are the same, but it is slower, and only devices "
            "that execute PyTorch can do it.",
            stacklevel=2,
        )
        return captured
    plain.refuse_states(name, constants_of(traced))
    with plain.as_after_a_call(reads) as differs:
        if differs:
            again, _, later = _trace(replace(request, device=CPU))
            later.refuse_states(name, constants_of(again))
    with same_python_numbers(drawn):
        refuse_if_read(f"layer {name!r}", states, traced, lambda: _trace_as_asked(request)[0], name)
    check_operands(traced.graph, request)
    if request.lowering is not Lowering.CORE:
        correct_statistics(traced.graph, request.device)
        if request.device == CPU:
            correct_dropout_scale(traced.graph)
    extraction = Extraction(request, traced)
    return _cut(extraction, reads, request.ends_in_loss, name, request.gradient_orders, request.save, request.shown)


def _say_that_it_runs_eagerly(what: str, why: str, on_host: bool) -> None:
    """Warn that code outside of the layers runs eagerly, and on the host where the device takes graphs alone."""
    where = "on the host, as the device takes graphs alone, and" if on_host else "op by op,"
    cost = "slower, and its values cross the link" if on_host else "slower"
    warnings.warn(f"{what} runs eagerly, {where} since {why}. Results are the same, but it is {cost}.", stacklevel=3)


def _is_recurrent(module: nn.Module) -> bool:
    return any(isinstance(part, (nn.RNNBase, nn.RNNCellBase)) for part in module.modules())


def _cut(
    extraction: Extraction,
    reads: Reads,
    ends_in_loss: bool,
    name: str,
    gradient_orders: Mapping[int, Order],
    save: bool,
    shown: frozenset[int],
) -> Captured:
    """Cut the programs of one segment out of a trace, which stays as it is."""
    captured = extraction.named(name).captured(gradient_orders, ends_in_loss, save and not ends_in_loss, shown)
    return replace(
        captured,
        reads=reads,
        recut=functools.partial(_cut, extraction, reads, ends_in_loss),
        holds_tensors=extraction.traced.meta["holds_tensors"],
    )


def _trace(request: CaptureRequest) -> tuple[fx.GraphModule, Reads, PlainTensors]:
    """The joint graph of a segment, which attributes its code read, and what it did to plain tensors.

    Raises whatever tracing raises.
    """
    module, inputs, device = request.module, request.arguments, request.device
    traced = TracedModule(request)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        # Tensors of the module that are neither parameters nor buffers stay real beside the fake ones.
        mode = kernel_strides_mode(allow_non_fake_inputs=True, static_shapes=True)
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(own_kernels(native=request.lowering is not Lowering.CORE))
        if request.lowering is not Lowering.CORE:
            stack.enter_context(eager_branches())
        table = None
        if request.lowering is not Lowering.NATIVE:
            stack.enter_context(attention())
        if request.lowering is Lowering.CORE:
            table = decompositions()
            stack.enter_context(cumulative_averages())
        if device != CPU:
            inputs = stack.enter_context(fakes_on(device, mode, module, inputs))
        stack.enter_context(put_back(module))
        # Before `recorded_reads`, which would count what PlainTensors reads as reads of the module's code.
        plain = stack.enter_context(PlainTensors(module))
        reads = stack.enter_context(recorded_reads(module))
        joint = aot_export_joint_with_descriptors(stack, traced, inputs, {}, decompositions=table)
        for run in traced.plain:
            plain.take(run)
        _refuse_counters(traced.counters)
        _refuse_undescribed(joint.graph_module.graph)
        if request.lowering is not Lowering.CORE:
            _refuse_unkeyed(joint.graph_module.graph)
        if device != CPU:
            spell_out(joint.graph_module.graph)
        joint.graph_module.meta["holds_tensors"] = traced.holds_tensors
        return joint.graph_module, reads, plain


def _trace_as_asked(request: CaptureRequest) -> tuple[fx.GraphModule, Reads, PlainTensors]:
    if request.lowering is Lowering.NATIVE and request.device.type != "cpu":
        return _trace_for_device(request)
    return _trace(replace(request, device=CPU))


def _refuse_counters(counters: Sequence[Counter]) -> None:
    """Raise NotAGraph for a number that every call changes and computes with."""
    for counter in counters:
        raise NotAGraph(f"the number {counter.label!r}", "is changed by every forward, which computes with it")


def _refuse_undescribed(graph: fx.Graph) -> None:
    """Raise NotAGraph for ops with effects, which PyTorch orders by tokens that programs do not carry, and for oneDNN's
    recurrent layer, whose workspace has a length that only its kernel knows."""
    for node in graph.nodes:
        if node.op == "call_function" and str(node.target) == "with_effects":
            raise NotAGraph(str(node.args[1]), "has an effect besides its result (an assertion on data, for example)")
        if node.target is torch.ops.aten.mkldnn_rnn_layer.default:
            raise NotAGraph(str(node.target), "has a workspace whose length only its kernel knows")


def _refuse_unkeyed(graph: fx.Graph) -> None:
    """Raise NotAGraph for random ops without a counter-based form: run eagerly, they draw from a generator that is
    seeded from the key. Attention that drops is traced again as matrix products instead."""
    for node in graph.nodes:
        if draws_by_itself(node) and not has_keyed_form(node) and "attention" not in str(node.target):
            raise NotAGraph(str(node.target), "draws random numbers and has no counter-based form")


def _trace_for_device(request: CaptureRequest) -> tuple[fx.GraphModule, Reads, PlainTensors]:
    """The joint graph as PyTorch would run it on the device, or the portable graph if it cannot be traced for that."""
    why = missing(request.device)
    if not why:
        try:
            traced = _trace(request)
            if any(draws_by_itself(node) and "attention" in str(node.target) for node in traced[0].graph.nodes):
                traced = _trace(replace(request, lowering=Lowering.PORTABLE))
            return traced
        except Exception as failure:
            why = in_short(failure)
    logger.warning(
        "%s is traced for any device, with attention as matrix products, and not for %s: %s",
        request.name,
        request.device,
        why,
    )
    return _trace(replace(request, lowering=Lowering.PORTABLE, device=CPU))


def _run_eagerly(request: CaptureRequest) -> Captured:
    """The programs of a segment that Python runs at every visit. Raises whatever the module raises."""
    for path, part in request.module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and part.weight.requires_grad:
            raise sparse_gradient(request.name, f"{path}.weight")
        if isinstance(part, fx.GraphModule):  # what a whole model computes outside of its layers
            for node in part.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
                if len(node.args) > 4 and node.args[4]:
                    raise sparse_gradient(request.name, "the embedding's weight")
    with PlainTensors(request.module) as plain, UsedTensors() as used:
        made = eager_programs(request)
    plain.refuse_states(request.name, used.addresses)
    with plain.as_after_a_call(None) as differs, PlainTensors(request.module) as later, UsedTensors() as used_again:
        if differs:
            eager_programs(request)
    later.refuse_states(request.name, used_again.addresses)
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
