"""A model whose code after its last layer cannot be traced: that code runs eagerly, as the model's own Python.

A mask that selects rows, a loss like CTC's, or an autograd function of the model's own has no graph. What comes before
the last layer is traced as always. Invariant: the loss, the results and their gradients are those of the model's
forward; a forward in which that cannot be seen to hold is not taken on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from relay.capture import BLOCK
from relay.graph.pytree import tensor_leaves
from relay.partition.eager.around import Around, AroundLayers
from relay.partition.eager.dry_run import DryRun
from relay.partition.segments import Partition, Segment, Value

Loss = Callable[[Any], torch.Tensor | None]
"""The loss in a model's output, if there is one."""


def needed_outputs(found: DryRun) -> list[tuple[int, int]]:
    """The outputs of layers on which the loss and the results depend: (call, number), in order."""
    return sorted(index for kind, index in found.needed if kind == "output")


def epilogue_states(found: DryRun) -> set[str]:
    """The parameters and buffers that the code after the last layer takes, and the buffers that it changes."""
    last = len(found.calls)
    late = {name for name, changes in found.changed.items() if changes[-1] == last}
    return {name for kind, name in found.needed if kind == "state"} | late


def refusal(found: DryRun) -> str:
    """Why the code after the last layer cannot run by itself, with the rest traced; empty if it can."""
    last = len(found.calls)
    if any(kind == "draw" and index[0] < last for kind, index in found.needed):
        return "the loss depends on random numbers drawn before the last layer"
    for name, changes in found.changed.items():
        if changes[0] < last and (changes[-1] == last or ("state", name) in found.needed):
            return f"the buffer {name!r} is changed before the last layer, and used or changed after it"
    return ""


def drop_after_layers(graph: fx.Graph) -> None:
    """Remove from a trace that ends in outputs of layers what was traced after the last layer, writes included."""
    for node in reversed(list(graph.nodes)):
        if node.target is BLOCK:
            return
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)


def with_eager_epilogue(partition: Partition, around: Around, found: DryRun, loss: Loss, why: str) -> Partition:
    """The partition of a trace that ends in the needed outputs, with the eager segment in place of its last one."""
    *segments, last = partition.segments
    values: list[Value] = partition.values
    made_by_last = set(last.outputs)
    for value in values:
        if last.index in value.consumers:
            value.consumers.remove(last.index)
    inputs = (
        *partition.inputs,
        *(_source(partition, last, position) for position in range(len(needed_outputs(found)))),
    )
    kept = [value for value in values if value.index not in made_by_last]
    assert [value.index for value in kept] == list(range(len(kept)))
    partition.segments, partition.values = segments, kept
    add_epilogue(partition, around, found, loss, inputs, "after its last layer", why)
    return partition


def add_epilogue(
    partition: Partition,
    around: Around,
    found: DryRun,
    loss: Loss,
    inputs: tuple[int, ...],
    where: str,
    why: str,
) -> None:
    """Add the eager segment at the end of a partition. `inputs` are the batch's values and those of the outputs."""
    index = len(partition.segments)
    has_loss = loss(found.output) is not None
    module = EagerEpilogue(
        around, found, needed_outputs(found), epilogue_states(found), loss if has_loss else None, where, why
    )
    results, tree = tensor_leaves(found.output)
    first = len(partition.values)
    new = [
        Value(first + position, tuple(result.shape), result.dtype, index)
        for position, result in enumerate([*([torch.empty(())] if has_loss else []), *results])
    ]
    outputs = tuple(value.index for value in new)
    segment = Segment(index, "epilogue", module, inputs, outputs, module.model_parameters, module.model_buffers)
    for number in inputs:
        partition.values[number].consumers.append(index)
    partition.segments.append(segment)
    partition.values += new
    partition.has_loss, partition.result_tree = has_loss, tree
    partition.results = outputs[1:] if has_loss else outputs


def _source(partition: Partition, last: Segment, position: int) -> int:
    """The value that the last segment of the traced partition hands on as its result number `position`."""
    graph: fx.Graph = last.module.graph.graph  # type: ignore[union-attr,assignment]
    placeholders = graph.find_nodes(op="placeholder")
    result = next(iter(reversed(graph.nodes))).args[0][position]
    return last.inputs[placeholders.index(result) - len(last.module.state_names)]  # type: ignore[arg-type]


class EagerEpilogue(AroundLayers):
    """(tensors of the batch, needed outputs of layers) -> (loss, results): the model's forward without its layers.

    Without `loss` it returns the results alone.
    """

    def __init__(
        self,
        around: Around,
        found: DryRun,
        outputs: Sequence[tuple[int, int]],
        states: set[str],
        loss: Loss | None,
        where: str,
        why: str,
    ) -> None:
        super().__init__(around, found, outputs, states, where, why)
        self.loss = loss

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = self.run(tensors)
        results, _ = tensor_leaves(output)
        if self.loss is None:
            return tuple(results)
        loss = self.loss(output)
        assert loss is not None
        return (loss, *(result.detach() for result in results))
