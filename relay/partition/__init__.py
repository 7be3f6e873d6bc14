"""From a model to segments: prologue, repeated layers, epilogue with the loss, and the values between them.

A model given whole is traced once with fake tensors, with each call of a repeated block as one op. The ops before the
first block become the prologue, those after the last the epilogue, those between two blocks an interlude; the edges
become the values that one segment passes to another. A list of modules is a partition already, and its last segment
includes the loss. Programs are made in `relay.capture`, and segments are run in `relay.runtime`; no model class is
known by name here. `relay.runtime` and the folders above it may import this folder.

Invariant: run in order, the segments compute what the model computes, op for op, dropout and buffers included.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType

import torch
from torch import nn

from relay.capture import BlockCall, GuardTracer, autocast, blocks_as_ops, call_with, trace
from relay.capture.guards.attribute_reads import Reads, recorded_reads
from relay.capture.guards.counters import Counter, changed, computed_with, numbers_of
from relay.capture.guards.executed_code import recorded_code
from relay.capture.guards.held_tensors import replacing
from relay.capture.guards.messages import drawn_outside, in_words
from relay.capture.guards.plain_tensors import KeepsState, PlainTensors, constants_of
from relay.capture.guards.unsupported import check_module, check_outside
from relay.capture.states.lasting_state import LastingStates, keeps_state, refuse_if_read, written_constants
from relay.capture.states.own_generators import decide, have_drawn, python_numbers, same_python_numbers
from relay.capture.states.shared_states import SharedStates
from relay.data.loss_weight import LossPlan
from relay.data.microbatches import Piece
from relay.errors import CaptureError, LayerCallRefused, PartitionError
from relay.graph.pytree import TensorTree, tensor_leaves
from relay.models.huggingface import without_cache
from relay.partition.batch_analysis import NotFollowed, TracedModel, WholeTrace, follow_batch, plan_for
from relay.partition.cut_head import cut_over_batch
from relay.partition.eager.around import Around, WithAssignedBuffers
from relay.partition.eager.dry_run import DryRun
from relay.partition.eager.epilogue import drop_after_layers, needed_outputs, refusal, with_eager_epilogue
from relay.partition.eager.layer_arguments import partition_around, refusal_around
from relay.partition.find_blocks import find_blocks, undisturbed
from relay.partition.graph_split import cut_graph
from relay.partition.list_over_batch import partition_list_over_batch
from relay.partition.module_list import canonical_names, list_as_model, partition_list
from relay.partition.named_outputs import loss_of
from relay.partition.segments import Partition
from relay.partition.state_at_calls import ChangesBetweenCalls, StateAtCalls
from relay.partition.whole_head import WantedOutputs

logger = logging.getLogger(__name__)

NEVER_EAGERLY = (KeepsState, ChangesBetweenCalls, LayerCallRefused)
"""What is refused whatever runs the code around the layers, since it is about the layers."""

__all__ = ["list_as_model", "partition_list", "partition_list_over_batch", "partition_model"]


def partition_model(
    model: nn.Module,
    batch: Sequence[torch.Tensor],
    tree: TensorTree,
    compute: torch.dtype = torch.float32,
    active: Sequence[str] | None = None,
    whole: Piece | None = None,
    size: int = 0,
    over_batch: WantedOutputs | None = None,
    whole_trace: WholeTrace | None = None,
) -> Partition:
    """Cut a whole model into segments.

    The model is called as `model(**tree.fill(batch))`, under PyTorch's autocast to `compute` where that is not float32.
    With `active`, the names of some of its repeated blocks, the other blocks return their first argument unchanged.
    If `batch` is a micro-batch of `size` samples, `whole` is the batch that it is cut from. With `over_batch`, what
    comes after the last layer is a head over the `whole` batch, which computes these outputs besides the loss.
    `whole_trace` keeps the trace of the `whole` batch for other micro-batches of it.

    Raises PartitionError if the model cannot be cut, and CaptureError if it cannot be traced.
    """
    check_module(model)
    blocks = find_blocks(model)
    if not blocks:
        raise PartitionError(
            f"{type(model).__name__} has no repeated layers: no ModuleList or Sequential in it holds two or more "
            "layers of one class. Pass the model as a list of modules, with loss=."
        )
    names = canonical_names(model)
    states = dict(model.named_parameters()) | dict(model.named_buffers())
    reads: Reads = {}
    skipped = set() if active is None else set(blocks) - set(active)
    check_outside(model, blocks)
    originals = list(states.values())
    inside = {id(part) for block in blocks.values() for part in block.modules()}
    counting: list[Counter] = []
    code: set[CodeType] = set()

    called: list[BlockCall] = []
    shell = WithAssignedBuffers(model, inside=inside)

    def traced_for(
        tensors: Sequence[torch.Tensor],
        guard_tracer: GuardTracer,
        ends: Sequence[tuple[int, int]] | None = None,
        again: bool = False,
        at_calls: StateAtCalls | None = None,
    ) -> TracedModel:
        """The trace for a batch. With `ends`, it ends with these outputs of layers, where the code fails after them.

        It is made `again` with tensors in attributes that a first call puts there. `at_calls` watches the layers.
        """
        nonlocal called
        found: list[tuple[bool, TensorTree]] = []

        def run(state: list[torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
            own = replacing(originals, state, type(model).__name__)
            numbers = numbers_of(model)
            try:
                with recorded_reads(model) as seen, recorded_code() as ran, own:
                    output = call_with(shell, originals, state, (), tree.fill(leaves))
            except Exception:
                reads.update(seen)
                if ends is None:
                    raise
                ended = [called[call].outputs[number] for call, number in ends]
                found.append((False, tensor_leaves(ended)[1]))
                return ended
            counting[:] = [one for one in changed(numbers, numbers_of(model), ran) if id(one.module) not in inside]
            code.update(ran)
            reads.update(seen)
            loss = loss_of(output)
            results, output_tree = tensor_leaves(output)
            found.append((loss is not None, output_tree))
            return ([loss] if loss is not None else []) + results

        known = len(shell.assigned)
        with PlainTensors(model) as plain:
            around = None if at_calls is None else functools.partial(_watched, at_calls, shared)
            with blocks_as_ops(blocks, skipped, compute, around) as calls, without_cache(model), autocast(compute):
                called = calls
                traced = trace(run, (originals, list(tensors)), type(model).__name__, guard_tracer)
                if at_calls is not None:
                    at_calls.check()
        if len(shell.assigned) > known:  # once more, with copies of the buffers that the forward assigns
            return traced_for(tensors, guard_tracer, ends, again)
        plain.refuse_states(type(model).__name__, constants_of(traced))
        with plain.as_after_a_call(reads) as differs:
            if differs and not again:
                traced_for(tensors, GuardTracer(tensors), ends, again=True)
        return TracedModel(traced, calls, *found[0])

    guard_tracer = GuardTracer(batch)
    shared = SharedStates()
    outside = LastingStates((path, part) for path, part in model.named_modules() if id(part) not in inside)
    drawn = python_numbers()
    try:
        traced = traced_for(batch, guard_tracer, at_calls=StateAtCalls(type(model).__name__))
    except (CaptureError, PartitionError) as failure:
        around = Around(model, blocks, skipped, states, batch, tree, compute)
        final = over_batch is not None or isinstance(failure, NEVER_EAGERLY)
        dry = None if final else around.dry_run()
        if dry is None:
            raise
        if dry.draws_python:
            raise drawn_outside(type(model).__name__) from failure
        why = in_words(failure)

        def up_to_the_last_layer(ends: Sequence[tuple[int, int]]) -> Partition:
            nonlocal guard_tracer
            guard_tracer = GuardTracer(batch)
            traced = traced_for(batch, guard_tracer, ends)
            drop_after_layers(traced.module.graph)
            return cut_graph(traced.module, states, traced.calls, names, False, traced.result_tree)

        partition = _with_code_run_eagerly(around, dry, len(called) == len(dry.calls), names, up_to_the_last_layer, why)
        if partition is None:
            raise
        where = "after the last layer" if len(called) == len(dry.calls) else "around the layers"
        plan = LossPlan(unknown=f"the code {where} runs eagerly ({why})") if whole else LossPlan()
        partition.guards, partition.loss_plan, partition.reads = tuple(guard_tracer.guards), plan, reads
        return partition
    shared.note("", outside, code)
    shared.check()
    if written := written_constants(traced.module):
        raise keeps_state(type(model).__name__, written)
    again = functools.partial(traced_for, batch)
    if have_drawn(drawn) and decide(traced.module, lambda: again(GuardTracer(batch)).module):
        raise drawn_outside(type(model).__name__)
    with same_python_numbers(drawn):
        refuse_if_read(type(model).__name__, outside, traced.module, lambda: again(GuardTracer(batch)).module)
    if counting:
        traced_for(batch, GuardTracer(batch))  # what changes again is a counter
        for counter in computed_with(counting, code):
            raise PartitionError(
                f"every forward of {type(model).__name__} changes the number {counter.label!r}, outside of its "
                "repeated layers, and computes with it, so a compiled program would keep the one that it was made "
                "with. Keep it in a buffer (register_buffer), or give it as part of the batch."
            )
    if not traced.calls:
        raise PartitionError(
            f"{type(model).__name__} did not call any of its repeated layers ({', '.join(list(blocks)[:3])}, ...) for "
            "this batch. Pass the model as a list of modules, with loss=."
        )
    trace_whole = (whole_trace or WholeTrace()).once(traced_for, (active, model.training), reads)
    if over_batch is not None:
        assert whole is not None
        name = type(model).__name__
        try:
            with undisturbed(model):  # traces that the model never sees
                followed = follow_batch(traced, guard_tracer.answers, trace_whole, whole, size, states)
        except NotFollowed as why:
            raise PartitionError(
                f"{name} cannot be run with a head over the whole batch: {why}. Use microbatches=1, or "
                "loss_over='microbatch' if its loss does not mix samples."
            ) from why
        partition, unknown = cut_over_batch(followed, states, names, over_batch, name)
        plan = LossPlan(unknown=unknown, guards=followed.guards)
        partition.guards, partition.loss_plan, partition.reads = tuple(guard_tracer.guards), plan, reads
        return partition
    plan = LossPlan()
    if whole is not None:
        with undisturbed(model):  # the whole batch is traced, which the model never sees
            plan, _ = plan_for(traced, guard_tracer.answers, trace_whole, whole, size, states)
    partition = cut_graph(traced.module, states, traced.calls, names, traced.has_loss, traced.result_tree)
    partition.guards, partition.loss_plan, partition.reads = tuple(guard_tracer.guards), plan, reads
    return partition


@contextmanager
def _watched(at_calls: StateAtCalls, shared: SharedStates, name: str, block: nn.Module) -> Iterator[None]:
    with shared.call(id(block), name, list(block.named_modules())), at_calls.call(name, block):
        yield


def _with_code_run_eagerly(
    around: Around,
    dry: DryRun,
    reached_the_end: bool,
    names: dict[int, str],
    up_to_the_last_layer: Callable[[Sequence[tuple[int, int]]], Partition],
    why: str,
) -> Partition | None:
    """The partition of a model whose code cannot be traced, if that code can run eagerly; else None.

    If its trace `reached_the_end` of the layers only what follows runs eagerly, and all code around the layers if not.
    """
    ends = needed_outputs(dry)
    refused = refusal(dry) if reached_the_end else refusal_around(dry)
    if not refused and ends:
        if reached_the_end:
            return with_eager_epilogue(up_to_the_last_layer(ends), around, dry, loss_of, why)
        return partition_around(around, dry, loss_of, names, why)
    name = type(around.model).__name__
    logger.info("the code of %s cannot run eagerly: %s", name, refused or "its results depend on no layer")
    return None
