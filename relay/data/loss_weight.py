"""How much each micro-batch counts in the loss of the whole batch.

A batch's loss is a mean over samples, or, where it is a cross-entropy, over the targets that are not masked (each
times its class's weight, if classes have weights); or it is a sum. Cut into pieces it must stay what it is, so each
piece's loss is weighted by its share. Which it is, and how the targets come from the batch, is read off the traced
loss; targets that depend on parameters, and losses of several cross-entropies, are weighted by samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

aten = torch.ops.aten

CROSS_ENTROPIES = {
    aten.cross_entropy_loss.default: 4,
    aten.nll_loss.default: 4,
    aten.nll_loss_nd.default: 4,
    aten.nll_loss2d.default: 4,
    aten.nll_loss_forward.default: 4,
}
"""Ops of the form (input, target, weight, reduction, ignore_index), with the place of ignore_index."""

MEAN, SUM = 1, 2
"""PyTorch's numbers for the reductions of a loss."""


STACKS = {aten.stack.default, aten.cat.default}
"""Ops that put tensors side by side."""


class LossWeight:
    """What a piece of a batch counts, from the piece's own tensors. `is_sum`: the loss is a sum, all count fully."""

    def __init__(
        self,
        graph: fx.GraphModule | None,
        ignored: int = -100,
        first: int = 0,
        class_weights: torch.Tensor | None = None,
    ) -> None:
        self._graph = graph
        self._ignored = ignored
        self._first = first  # tensors of the batch before it have no part in the targets
        self._class_weights = class_weights
        self.is_sum = graph is None

    def count(self, tensors: Sequence[torch.Tensor]) -> float:
        """How many targets count, given the batch's tensors in the order they were traced."""
        assert self._graph is not None
        with torch.no_grad():
            target = self._graph(*tensors[self._first :])
            kept = target[target != self._ignored]
            if self._class_weights is None:
                return kept.numel()
            return float(self._class_weights[kept].sum(dtype=torch.float64))


def loss_weight_of(
    traced: fx.GraphModule,
    loss: fx.Node,
    batch: Sequence[fx.Node],
    states: Mapping[fx.Node, torch.Tensor],
    first: int = 0,
) -> LossWeight | None:
    """Read the weight off a traced `loss`; None is by samples.

    `batch` are the placeholders that carry the batch's tensors from number `first` on, `states` those that carry the
    model's own.
    """
    if is_sum(loss):
        return LossWeight(None)
    graph = traced.graph
    losses = [node for node in graph.nodes if node.op == "call_function" and node.target in CROSS_ENTROPIES]
    if len(losses) != 1:
        return None
    arguments = _with_defaults(losses[0])
    target, weight, reduction, ignored = arguments[1:5]
    if reduction != MEAN or not isinstance(target, fx.Node) or target.meta["val"].dtype.is_floating_point:
        return None
    class_weights: torch.Tensor | None = None
    if isinstance(weight, fx.Node):
        class_weights = getattr(traced, str(weight.target)) if weight.op == "get_attr" else states.get(weight)
        if class_weights is None:
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
    assert isinstance(ignored, int)
    return LossWeight(fx.GraphModule(torch.nn.Module(), cut), ignored, first, class_weights)


def is_sum(loss: fx.Node) -> bool:
    """Whether the last op of a loss is a sum over everything, or a loss that PyTorch was asked to sum."""
    if loss.op != "call_function":
        return False
    if loss.target is aten.sum.default:
        return not joins_losses(loss.all_input_nodes[0])
    return reduction_of(loss) == SUM


def reduction_of(node: fx.Node) -> object:
    """What one of PyTorch's own losses was asked to be of its elements (`MEAN`, `SUM`); None for any other op."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return _with_defaults(node)[names.index("reduction")] if "reduction" in names else None


def joins_losses(node: fx.Node) -> bool:
    """Whether it puts a few losses, each a number, side by side: what is taken over these goes over no samples."""
    return node.target in STACKS and all(one.meta["val"].dim() == 0 for one in node.all_input_nodes)


def _with_defaults(node: fx.Node) -> list[object]:
    """An op's arguments by place, those not given as its schema has them."""
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
