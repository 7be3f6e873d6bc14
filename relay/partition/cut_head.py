"""Cutting a whole model for a head over the whole batch: layers from a micro-batch's trace, the head from the batch's.

Both traces are of one code (`relay.partition.batch_flow.trace_pair`), so every value that the head takes has a
counterpart in the micro-batch. Its label says how the micro-batches' parts are joined. Lists of modules are cut in
`relay.partition.module_list`. Invariant: up to the head nothing takes several samples together; if something does, it
is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from relay.capture import BLOCK, SET_GRAD_ENABLED, fingerprint
from relay.errors import PartitionError
from relay.graph.mutations import memory_roots, needed_by, written_by
from relay.partition.batch_analysis import Followed, TracedModel
from relay.partition.batch_flow.labels import Cause, Kind, Label
from relay.partition.batch_flow.op_call import name_of
from relay.partition.graph_segment import GraphSegment
from relay.partition.graph_split import GraphCut
from relay.partition.named_outputs import outputs_in
from relay.partition.segments import Join, Partition, Segment, Value, WholeHead
from relay.partition.whole_head import WantedOutputs, join_of


def mixes_early(model: str, why: str, what: str = "The loss") -> PartitionError:
    """The refusal of a model in which samples are taken together before the head."""
    return PartitionError(
        f"{what} of {model} mixes samples: {why}. Only the head, which is what comes after the last layer, can run "
        "over the whole batch, so several micro-batches cannot make it. Use microbatches=1; or move what takes samples "
        "together behind the last layer; or, if each micro-batch is meant to have its own loss, as when gradients are "
        "accumulated, say by loss_weight= what each counts."
    )


def assumed_before_head(followed: Followed, stage: Mapping[fx.Node, int], last: int) -> str | None:
    """What could not be followed before the head, in words; None if everything could."""
    early = [cause for cause in followed.assumed if cause.layer or stage.get(cause.node, 0) < last]  # type: ignore[arg-type]
    return followed.where(early[0]) if early else None


def cut_over_batch(
    followed: Followed, states: dict[str, torch.Tensor], names: dict[int, str], wanted: WantedOutputs, model: str
) -> tuple[Partition, str | None]:
    """The partition of a micro-batch whose last segment stands for the head, and what before it cannot be followed.

    The arguments are as those of `relay.partition.graph_split.cut_graph`. Raises PartitionError where samples are taken
    together before the head.
    """
    small, large, flow = followed.small, followed.large, followed.flow
    count, first = len(large.results) - large.has_loss, int(large.has_loss)
    kept = list(range(count))
    if not wanted.everything:
        asked = outputs_in(large.result_tree, count, wanted.names, True)
        kept = sorted({number for output in asked.values() for number in output.numbers})
    for traced in (small, large):
        _keep_results(traced, [*range(first), *(number + first for number in kept)], len(states))
    ours, whole = (GraphCut(traced.module, states, traced.calls, names, traced.has_loss) for traced in (small, large))
    together = _taking_together(followed, whole)
    whole.move_to_head(together)
    ours.move_to_head([followed.pair.small_of[node] for node in together])
    partition, of_whole = ours.partition(small.result_tree), whole.partition(large.result_tree)
    if [segment.name for segment in partition.segments] != [segment.name for segment in of_whole.segments]:
        raise PartitionError(
            f"{model} is cut into other segments for a micro-batch than for the batch, so no head can run over the "
            "whole batch. Use microbatches=1."
        )
    _refuse_taken_together(followed, whole, model)

    head = of_whole.segments[-1]
    keys = {value: key for key, value in whole.value_of.items()}
    placeholder = {node: number for number, node in enumerate(whole.batch_nodes)}
    batch_of: list[int] = []  # the batch's tensors that the head takes
    given: list[int] = []  # the micro-batch's values that it takes
    joins: list[Join] = []
    sources: list[tuple[bool, int]] = []
    for value in head.inputs:
        key = keys[value]
        if key in placeholder:
            sources.append((False, len(batch_of)))
            batch_of.append(placeholder[key])
            continue
        node = _node_of(key, whole)
        label = flow.labels.get(node)
        counterpart = followed.pair.small_of.get(node)
        if not isinstance(label, Label) or counterpart is None or ours.key(counterpart) not in ours.value_of:
            raise mixes_early(model, f"the value {str(node.target)!r} between two segments cannot be followed")
        size = of_whole.values[value].shape[label.dim] if label.kind is Kind.ROWS else 0
        join = join_of(label, size, followed.pair.lengths[1])
        if join is None:
            raise mixes_early(model, _why(label, node, followed))
        sources.append((True, len(joins)))
        joins.append(join)
        given.append(ours.value_of[ours.key(counterpart)])
    arguments = tuple(number if joined else len(joins) + number for joined, number in sources)
    _put_in_place(partition, given)
    assert isinstance(head.module, GraphSegment)
    form = fingerprint(head.module.graph.graph, [], [], {}), tuple(joins), arguments, tuple(batch_of)
    own = _partition_of(head, of_whole, batch_of, kept, count)
    unknown = assumed_before_head(followed, whole.stage, whole.last_stage) or _norm_between_layers(followed, whole)
    partition.head = WholeHead(own, tuple(joins), arguments, form)
    return partition, unknown


def _is_batch_norm(node: fx.Node) -> bool:
    """Whether a node is a BatchNorm in training."""
    return "batch_norm" in str(node.target) and any(argument is True for argument in node.args[:6])


def _taking_together(followed: Followed, whole: GraphCut) -> list[fx.Node]:
    """Ops of the whole batch that take its samples together, those of a BatchNorm in training among them.

    They run in the head where no layer depends on them, wherever the model calls them.
    """
    names = {name: node for node, (name, _) in whole.state_nodes.items()}
    found = [*followed.flow.substituted, *(node for node, _ in followed.flow.literals)]
    counts: set[fx.Node | None] = set()
    for node, label in followed.flow.labels.items():
        labels = label if isinstance(label, tuple) else (label,)
        if any(one.kind is Kind.MIXED for one in labels):
            found.append(node)
        elif _is_batch_norm(node):
            found.append(node)
            owners = [
                whole.state_nodes[one][0].rpartition(".")[0] for one in node.all_input_nodes if one in whole.state_nodes
            ]
            counts.update(names.get(f"{owner}.num_batches_tracked") for owner in owners)
    changes = [node for node in whole.stage if written_by(node) in counts - {None}]
    return [*found, *changes]


def _norm_between_layers(followed: Followed, whole: GraphCut) -> str | None:
    """A BatchNorm in training between two layers that a later layer depends on, in words.

    In the head it would take the whole batch's statistics; here it takes those of each micro-batch.
    """
    for node in followed.large.module.graph.nodes:
        between = 0 < whole.stage.get(node, 0) < whole.last_stage
        if between and _is_batch_norm(node):
            return followed.where(
                Cause(name_of(node), "runs for each micro-batch, since a later layer depends on it", node)
            )
    return None


def _keep_results(traced: TracedModel, kept: Sequence[int], states: int) -> None:
    """Drop all other results from a trace, and the ops between and after the layers that only they need."""
    graph = traced.module.graph
    output = next(iter(reversed(graph.nodes)))
    output.args = ([traced.results[number] for number in kept],)
    placeholders = graph.find_nodes(op="placeholder")[:states]
    roots = memory_roots(graph)
    changes = [node for node in graph.nodes if roots.get(written_by(node)) in placeholders]  # type: ignore[arg-type]
    needed = needed_by([*traced.results, *changes], graph)
    for node in reversed(list(graph.nodes)):
        plain = node.op in ("call_function", "get_attr") and node.target not in (BLOCK, SET_GRAD_ENABLED)
        if plain and node not in needed and not node.users:
            graph.erase_node(node)


def _node_of(key: object, cut: GraphCut) -> fx.Node:
    """The node of a value: of an item of a layer's output the one that takes it."""
    if isinstance(key, fx.Node):
        return key
    return next(node for node, item in cut.item.items() if item == key and node.users)


def _why(label: Label, node: fx.Node, followed: Followed) -> str:
    if label.cause is not None:
        return followed.where(label.cause)
    return followed.where(Cause(name_of(node), "gives a value that the micro-batches' parts do not make", node))


def _refuse_taken_together(followed: Followed, whole: GraphCut, model: str) -> None:
    """Refuse what is used before the head and would have to be the whole batch's there."""
    graph = followed.large.module.graph
    needed = needed_by(followed.large.results, graph)
    together = [*followed.flow.substituted, *(node for node, _ in followed.flow.literals)]
    for node in together:
        if node in needed and whole.stage.get(node, whole.last_stage) < whole.last_stage:
            cause = Cause(name_of(node), "takes several samples of the batch together", node)
            raise mixes_early(model, followed.where(cause))


def _put_in_place(partition: Partition, given: Sequence[int]) -> None:
    """Make the last segment of a micro-batch's partition the place of the head, which takes the values `given`."""
    last = partition.segments[-1]
    for value in partition.values:
        value.consumers = [consumer for consumer in value.consumers if consumer != last.index]
    for number in dict.fromkeys(given):
        partition.values[number].consumers.append(last.index)
    last.inputs, last.outputs = tuple(given), last.outputs[: int(partition.has_loss)]
    partition.results = ()


def _partition_of(
    head: Segment, source: Partition, batch_of: Sequence[int], kept: Sequence[int], count: int
) -> Partition:
    """A partition of the head alone, whose values are the batch's tensors and what the head returns."""
    values = [
        Value(number, source.values[value].shape, source.values[value].dtype, None, order=source.values[value].order)
        for number, value in enumerate(source.inputs)
    ]
    for number in batch_of:
        values[number].consumers.append(0)
    outputs = []
    for value in head.outputs:
        outputs.append(len(values))
        values.append(Value(len(values), source.values[value].shape, source.values[value].dtype, 0))
    segment = Segment(
        0,
        head.name,
        head.module,
        tuple(batch_of),
        tuple(outputs),
        head.parameters,
        head.buffers,
        layer_index=head.index,
    )
    rest = dict(zip(kept, outputs[int(source.has_loss) :], strict=True))
    results = tuple(rest.get(number, -1) for number in range(count))
    inputs = tuple(range(len(source.inputs)))
    return Partition([segment], values, inputs, source.has_loss, results, source.result_tree)
