"""How much each micro-batch counts in the mean loss of the whole batch.

A batch's loss is a mean over samples, or, where it is a cross-entropy, over the targets that are not masked. Cut
into pieces it must stay that mean, so each piece's loss is weighted by its share of samples or of targets. Which
it is, and how the targets come from the batch, is read off the traced loss; targets that depend on parameters, and
losses of several cross-entropies, fall back to samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from relay.capture import trace

aten = torch.ops.aten

_CROSS_ENTROPIES = {
    aten.cross_entropy_loss.default: 4,
    aten.nll_loss.default: 4,
    aten.nll_loss_nd.default: 4,
    aten.nll_loss2d.default: 4,
    aten.nll_loss_forward.default: 4,
}
"""Ops of the form (input, target, weight, reduction, ignore_index), with the place of ignore_index."""

_MEAN = 1


class LossWeight:
    """Counts the unmasked targets of a piece of a batch, from the piece's own tensors."""

    def __init__(self, graph: fx.GraphModule, ignored: int, first: int = 0) -> None:
        self._graph = graph
        self._ignored = ignored
        self._first = first  # tensors of the batch before it have no part in the targets

    def count(self, tensors: Sequence[torch.Tensor]) -> int:
        """How many targets count, given the batch's tensors in the order they were traced."""
        with torch.no_grad():
            target = self._graph(*tensors[self._first :])
        return int((target != self._ignored).sum())


def loss_weight_of(graph: fx.Graph, batch: Sequence[fx.Node], first: int = 0) -> LossWeight | None:
    """Read the weight off a traced loss. `batch` are the placeholders that carry the batch's tensors from `first`."""
    losses = [node for node in graph.nodes if node.op == "call_function" and node.target in _CROSS_ENTROPIES]
    if len(losses) != 1:
        return None
    arguments = _with_defaults(losses[0])
    target, weight, reduction, ignored = arguments[1:5]
    if weight is not None or reduction != _MEAN or target.meta["val"].dtype.is_floating_point:
        return None
    cut = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(batch):
        environment[node] = cut.placeholder(f"batch_{position}")
    needed = _ancestors(target)
    for node in graph.nodes:
        if node not in needed or node in environment:
            continue
        if node.op != "call_function":
            return None  # it depends on a parameter
        environment[node] = cut.node_copy(node, environment.__getitem__)
    cut.output(environment[target])
    return LossWeight(fx.GraphModule(torch.nn.Module(), cut), ignored, first)


def find_loss_weight(
    loss: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], torch.Tensor],
    outputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    first: int,
) -> LossWeight | None:
    """The weight for `loss(outputs, targets)`, given fake tensors; it counts from the targets alone.

    `first` is how many tensors of the batch come before the targets.
    """
    examples = [
        [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in group]
        for group in (outputs, targets)
    ]
    try:
        traced = trace(loss, examples, "loss")
    except Exception:  # a loss that cannot be traced by itself is weighted by samples, and traced again with its layer
        return None
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    return loss_weight_of(traced.graph, placeholders[len(outputs) :], first)


def _with_defaults(node: fx.Node) -> list[object]:
    schema = node.target._schema  # type: ignore[union-attr]
    values = []
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            values.append(node.args[position])
        else:
            values.append(node.kwargs.get(argument.name, argument.default_value))
    return values


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen: set[fx.Node] = set()
    stack = [node]
    while stack:
        current = stack.pop()
        if current not in seen:
            seen.add(current)
            stack.extend(current.all_input_nodes)
    return seen
