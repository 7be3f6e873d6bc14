"""From the trace of a model for a micro-batch to the plan for its loss: the batch is followed through it.

The same code is traced for the whole batch as well. If the model asks what is in the batch, and the answers for the
batch and the micro-batch differ, it is traced once more for the whole batch with the micro-batch's answers; the loss
itself must then be computed in the same way with either. Nothing is cut or captured here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from relay.capture import BLOCK, BlockCall, GuardTracer
from relay.capture.guards.attribute_reads import Reads
from relay.capture.guards.data_guards import Guard
from relay.data.loss_weight import LossPlan
from relay.data.microbatches import Piece
from relay.errors import RelayError
from relay.graph.pytree import TensorTree
from relay.partition.batch_flow.flow import BatchFlow
from relay.partition.batch_flow.labels import Cause, Label, free, rows
from relay.partition.batch_flow.layer_labels import LayerLabels
from relay.partition.batch_flow.trace_pair import TracePair
from relay.partition.loss_terms import LossTerms


@dataclass(frozen=True, eq=False)
class TracedModel:
    """A model traced with its layers opaque: the calls of these, whether its first result is the loss, and the nest of
    the other results."""

    module: fx.GraphModule
    calls: list[BlockCall]
    has_loss: bool
    result_tree: TensorTree

    @property
    def results(self) -> list[fx.Node]:
        """What the trace returns."""
        found: list[fx.Node] = list(next(iter(reversed(self.module.graph.nodes))).args[0])
        return found

    def copy(self) -> TracedModel:
        """The same with a graph of its own, which may be changed."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.module.graph, {}))
        return replace(self, module=fx.GraphModule(self.module, graph))


Trace = Callable[[Sequence[torch.Tensor], GuardTracer], TracedModel]
"""Traces a model for a batch, and asks the tracer for what the model asks of the batch."""


class WholeTrace:
    """The trace of a whole batch, which is made once for all kinds of its micro-batches.

    It is kept until the next batch, or `clear`.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the batch."""
        self._of: tuple[Sequence[torch.Tensor], object] = ((), None)
        self._traced: TracedModel | None = None
        self._tracer = GuardTracer(())
        self._reads: Reads = {}

    def once(self, trace: Trace, active: object, reads: Reads) -> Trace:
        """The function `trace`, which calls it once for a batch with these layers `active`.

        `trace` adds the attributes that the model's code reads to `reads`.
        """

        def traced(tensors: Sequence[torch.Tensor], tracer: GuardTracer) -> TracedModel:
            if tracer.repeats:
                return trace(tensors, tracer)
            if self._traced is None or self._of[0] is not tensors or self._of[1] != active:
                self._traced, self._of, self._tracer = trace(tensors, tracer), (tensors, active), tracer
                self._reads = dict(reads)
            tracer.guards, tracer.answers = list(self._tracer.guards), list(self._tracer.answers)
            reads.update(self._reads)
            return self._traced.copy()

        return traced


@dataclass(frozen=True, eq=False)
class Followed:
    """A model traced for a micro-batch (`small`) and for the batch (`large`), with the batch followed through it.

    `assumed` are the ops that cannot be followed and are taken for row-wise. `guards` are the model's questions about
    the whole batch.
    """

    small: TracedModel
    large: TracedModel
    pair: TracePair
    flow: BatchFlow
    assumed: tuple[Cause, ...]
    guards: tuple[Guard, ...]

    def where(self, cause: Cause) -> str:
        """An op and its position, in words."""
        return f"{cause.op} {_place(cause, self.large)} {cause.reason}"


class NotFollowed(Exception):
    """The batch cannot be followed through a model; the text says why."""


def follow_batch(
    small: TracedModel,
    answers: Sequence[Any],
    trace: Trace,
    whole: Piece,
    size: int,
    states: Mapping[str, torch.Tensor],
) -> Followed:
    """Trace the model for the `whole` batch, and follow the batch through it.

    `small` is the trace of a micro-batch of `size` samples; `answers` are its answers to what the model asked. `trace`
    traces the model for a batch; `states` are its parameters and buffers, the first inputs of a trace. Raises
    NotFollowed.
    """
    own = GuardTracer(whole.tensors)
    lengths = size, whole.size
    if len(small.module.graph.find_nodes(op="placeholder")) - len(states) != len(whole.tensors):
        raise NotFollowed("it takes lists with one tensor for each sample")
    try:
        large = trace(whole.tensors, own)
        try:
            pair = TracePair(small.module, large.module, lengths)
        except ValueError:
            if own.answers == list(answers):
                raise
            again = trace(whole.tensors, GuardTracer(whole.tensors, answers))
            pair = TracePair(small.module, again.module, lengths)
            if _loss_of(again) != _loss_of(large):
                raise
            large = again
    except (RelayError, ValueError) as why:
        short = str(why).split(". ")[0]
        raise NotFollowed(f"its code differs for a micro-batch and for the batch ({short})") from why
    return _followed(small, large, pair, list(states.values()), own)


def plan_for(
    small: TracedModel,
    answers: Sequence[Any],
    trace: Trace,
    whole: Piece,
    size: int,
    states: Mapping[str, torch.Tensor],
) -> tuple[LossPlan, bool]:
    """The plan for a batch of which `small` is the trace of a micro-batch, and whether that trace was changed.

    The arguments are those of `follow_batch`.
    """
    try:
        followed = follow_batch(small, answers, trace, whole, size, states)
    except NotFollowed as why:
        return LossPlan(unknown=str(why)), False
    pair, large = followed.pair, followed.large
    placeholders = large.module.graph.find_nodes(op="placeholder")
    small_placeholders = [pair.small_of[node] for node in placeholders]
    count, tensors = len(states), list(states.values())
    terms = LossTerms(
        followed.flow,
        large.results,
        (small_placeholders[count:], placeholders[count:]),
        (
            dict(zip(small_placeholders, tensors, strict=False)),
            dict(zip(placeholders[:count], tensors, strict=True)),
        ),
        followed.where,
    )
    if not large.has_loss:
        return terms.plan_without_loss(followed.guards), terms.changed
    return terms.plan(followed.assumed, followed.guards), terms.changed


def _followed(
    small: TracedModel, large: TracedModel, pair: TracePair, states: Sequence[torch.Tensor], guards: GuardTracer
) -> Followed:
    placeholders = large.module.graph.find_nodes(op="placeholder")
    of_states, batch = placeholders[: len(states)], placeholders[len(states) :]
    labels = {node: free(not tensor.requires_grad) for node, tensor in zip(of_states, states, strict=True)}
    labels.update({node: rows(0, given=True) if pair.varying(node) else free(True) for node in batch})
    layers = LayerLabels(pair.lengths)

    def of_block(node: fx.Node, given: Sequence[Label]) -> tuple[Label, ...] | None:
        call = large.calls[node.args[0]]  # type: ignore[index]
        if call.skipped:
            return tuple(free() for _ in node.meta["val"])
        ours, theirs = ([one.meta["val"] for one in each.args[1]] for each in (pair.small_of[node], node))  # type: ignore[union-attr]
        return layers.labels(call, ours, theirs, given)

    flow = BatchFlow(pair, labels, of_block)
    assumed = (*(cause for cause in flow.assumed if not cause.layer), *layers.assumed)
    return Followed(small, large, pair, flow, assumed, tuple(guards.guards))


def _place(cause: Cause, traced: TracedModel) -> str:
    if cause.layer:
        return f"in layer {cause.layer!r}"
    nodes = list(traced.module.graph.nodes)
    before = nodes.index(cause.node) if cause.node in nodes else len(nodes)
    names = [traced.calls[node.args[0]].name for node in nodes if node.target is BLOCK]
    done = sum(node.target is BLOCK for node in nodes[:before])
    if not done:
        return "before the first layer"
    return "after the last layer" if done == len(names) else f"after layer {names[done - 1]!r}"


def _loss_of(traced: TracedModel) -> list[Any]:
    """The ops from the layers to the loss, with what is given to them besides tensors."""
    needed: set[fx.Node] = set()
    stack = traced.results[:1]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += [] if node.target is BLOCK else node.all_input_nodes
    described = []
    for node in traced.module.graph.nodes:
        if node in needed and node.target is not BLOCK and node.op == "call_function":
            leaves = pytree.tree_leaves((node.args, node.kwargs))
            described.append((node.target, [None if isinstance(leaf, fx.Node) else leaf for leaf in leaves]))
    return described
