"""The weight of each micro-batch in the loss of the whole batch.

The loss of a batch is a mean over samples, a cross-entropy (a mean over the targets that are not masked, each times the
weight of its class), or a sum. The loss of each micro-batch is multiplied by its share, so that the total is the loss
of the batch. The kind of loss, and how the targets are computed from the batch, are read from the traced loss. Losses
with targets that depend on parameters, or with several cross-entropies, are weighted by samples.
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
"""Ops with arguments (input, target, weight, reduction, ignore_index), and the position of ignore_index."""

MEAN, SUM = 1, 2
"""PyTorch's codes for the reduction of a loss."""


STACKS = {aten.stack.default, aten.cat.default}
"""Ops that join tensors."""


class LossWeight:
    """Counts the targets of a micro-batch, given its tensors. `is_sum` is true if the loss is a sum: no weights then.

    `graph` computes the targets from the tensors of a micro-batch, from number `first` on; None for a sum. Targets
    equal to `ignored` do not count. With `class_weights` each target counts as the weight of its class.
    """

    def __init__(
        self,
        graph: fx.GraphModule | None,
        ignored: int = -100,
        first: int = 0,
        class_weights: torch.Tensor | None = None,
    ) -> None:
        self._graph = graph
        self._ignored = ignored
        self._first = first
        self._class_weights = class_weights
        self.is_sum = graph is None

    def count(self, tensors: Sequence[torch.Tensor]) -> float:
        """The number of targets that count, or the sum of their class weights, given a micro-batch's tensors."""
        assert self._graph is not None
        with torch.no_grad():
            target = self._graph(*tensors[self._first :])
            counted = target[target != self._ignored]
            if self._class_weights is None:
                return counted.numel()
            return float(self._class_weights[counted].sum(dtype=torch.float64))


def loss_weight_of(
    traced: fx.GraphModule,
    loss: fx.Node,
    batch: Sequence[fx.Node],
    states: Mapping[fx.Node, torch.Tensor],
    first: int = 0,
) -> LossWeight | None:
    """The weight of micro-batches for a traced `loss`. None means that they are weighted by samples.

    `batch` are the placeholders of the batch's tensors from number `first` on, `states` the parameters and buffers by
    their placeholders.
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
    """Whether a loss is a sum: its last op sums all elements, or is a loss of PyTorch with reduction="sum"."""
    if loss.op != "call_function":
        return False
    if loss.target is aten.sum.default:
        return not joins_losses(loss.all_input_nodes[0])
    return reduction_of(loss) == SUM


def reduction_of(node: fx.Node) -> object:
    """The reduction code (`MEAN`, `SUM`, 0 for none) of an op that is a loss of PyTorch's; None for any other op."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return _with_defaults(node)[names.index("reduction")] if "reduction" in names else None


def joins_losses(node: fx.Node) -> bool:
    """Whether an op joins scalar losses. A sum or mean over these is not one over samples."""
    return node.target in STACKS and all(loss.meta["val"].dim() == 0 for loss in node.all_input_nodes)


def _with_defaults(node: fx.Node) -> list[object]:
    """The arguments of an op by position, with the defaults of its schema filled in."""
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
