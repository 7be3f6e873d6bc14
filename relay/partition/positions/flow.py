"""Following positions: which ops compute row by row, and how they are written for the rows of a chunk.

`PositionFlow` labels each op that the loss needs and says how a chunk's graph writes it, by the rules of `RowRules`,
which also serve the pieces of layers (`relay.partition.positions.layers`). Dimensions are counted from
the end there, since a chunk's positions are one dimension where the model may have several. Nothing is built here.

Invariant: row i of what is labelled ROWS depends on row i of the hidden states alone, and a TERM is the sum of what the
chunks give. Everything else raises `NotByPosition`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from relay.capture import SET_GRAD_ENABLED
from relay.graph.autocast_regions import regions_of
from relay.graph.mutations import needed_by, written_by
from relay.partition.positions.labels import Count, Kind, Label, NotByPosition, OfBatch, OfState, Written, rows_of
from relay.partition.positions.op_calls import (
    ALONG,
    CLASSES,
    IDENTITIES,
    LIKE,
    LOSSES,
    MEAN,
    NONE,
    REORDERS,
    RESHAPES,
    SUM,
    arguments_of,
    name_of,
    order_of,
    shape_of,
)

aten = torch.ops.aten


class RowRules:
    """Labels ops one by one, from the labels of what they read, and says how a chunk's graph writes them.

    `leading` is the shape of the positions.
    """

    def __init__(self, labels: Mapping[fx.Node, Label], leading: tuple[int, ...]) -> None:
        self.labels: dict[fx.Node, Label] = dict(labels)
        self.written: dict[fx.Node, Written | fx.Node] = {}
        self.leading = leading

    # -- one op -----------------------------------------------------------------------------------------------

    def label(self, node: fx.Node) -> Label:
        """The label of an op's result. Raises NotByPosition where there is none."""
        if node.target is torch.tensor:
            return Label(Kind.STATE)
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                self.labels.setdefault(source, Label(Kind.STATE))
            if source not in self.labels:
                raise NotByPosition(f"{name_of(node)} reads a tensor of a layer that has no rows for the positions")
        if written_by(node) is not None:
            raise NotByPosition(f"{name_of(node)} writes to a part of a tensor")
        taken = [self.labels[source] for source in node.all_input_nodes]
        kinds = {label.kind for label in taken}
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return self._random(node)
        if any(label.moved for label in taken):
            return self._of_moved(node)
        if not kinds & {Kind.ROWS, Kind.TERM}:
            trained = any(label.trained for label in taken)
            if Kind.GIVEN in kinds and trained:
                raise NotByPosition(f"{name_of(node)} puts a trained parameter together with the batch")
            return Label(Kind.GIVEN if Kind.GIVEN in kinds else Kind.STATE, trained=trained)
        if Kind.TERM in kinds:
            return self._of_terms(node, taken)
        return self._of_rows(node)

    def _random(self, node: fx.Node) -> Label:
        arguments = arguments_of(node)
        source = arguments.get("input")
        if name_of(node) == "dropout" and isinstance(source, fx.Node) and not (arguments["train"] and arguments["p"]):
            self.written[node] = source
            return self.labels[source]
        raise NotByPosition(f"{name_of(node)} draws random numbers after the last layer")

    def _of_terms(self, node: fx.Node, taken: list[Label]) -> Label:
        """A sum of terms, or a term times or divided by what is the same for all chunks."""
        name, arguments = name_of(node).rstrip("_"), arguments_of(node)
        first, second = arguments.get("self"), arguments.get("other")
        of = [isinstance(one, fx.Node) and self.labels[one].kind is Kind.TERM for one in (first, second)]
        label = Label(Kind.TERM)
        if any(one.kind is Kind.ROWS for one in taken) or node.meta["val"].numel() != 1:
            raise NotByPosition(f"{name_of(node)} puts a sum over positions together with each position")
        others = [one for one in node.all_input_nodes if self.labels[one].kind is not Kind.TERM]
        if any(one.meta["val"].numel() != 1 for one in others):
            raise NotByPosition(f"{name_of(node)} computes further with a sum over positions")
        same = IDENTITIES | RESHAPES | LIKE | {"neg", "sum", "mean"}
        linear = (
            (name in same)
            or (name in ("add", "sub") and (all(of) or (of[0] and second in (0, 0.0))))
            or (name == "mul" and of != [True, True])
            or (name == "div" and of == [True, False] and arguments.get("rounding_mode") is None)
            or (name == "where" and all(of) and self.labels[arguments["condition"]].kind is not Kind.TERM)
        )
        if not linear:
            if name in ("add", "sub"):
                raise NotByPosition("the loss adds a term that is not a sum over positions")
            raise NotByPosition(f"{name_of(node)} computes further with a sum over positions")
        self._as_it_is(node, self._whole)
        return label

    def _of_rows(self, node: fx.Node) -> Label:
        name, arguments = name_of(node), arguments_of(node)
        plain = name.rstrip("_") if name.endswith("_") and not name.startswith("_") else name
        if node.target is operator.getitem:
            self.written[node] = Written(operator.getitem, tuple(node.args), {})
            return self.labels[node.all_input_nodes[0]]
        if plain in CLASSES:
            return self._classes(node, arguments)
        if plain in LOSSES:
            return self._elements(node, arguments)
        source = node.all_input_nodes[0]
        if plain in ("sum", "mean") and arguments.get("dim") in (None, []):
            return self._total(node, arguments["self"], mean=plain == "mean")
        if plain in RESHAPES:
            return self._reshaped(node, source)
        if plain in REORDERS and self._moves_classes(node, source):
            self.written[node] = source
            return replace(self.labels[source], moved=True)
        if plain in ("expand", "expand_as"):
            label = self._same_lead(node, source)
            shape = [-1, *shape_of(node)[label.lead :]]
            self.written[node] = Written(aten.expand.default, (source, shape), {})
            return label
        if plain in IDENTITIES or plain in LIKE:
            label = self.labels[source]
            self._as_it_is(node, self._state)
            return label
        if plain in ("linear", "matmul", "mm", "addmm"):
            return self._product(node, plain, arguments)
        if plain in ("layer_norm", "rms_norm"):
            label = self._same_lead(node, source)
            if len(arguments["normalized_shape"]) > len(shape_of(source)) - label.lead:
                raise NotByPosition(f"{name} normalises over positions")
            self._as_it_is(node, self._state)
            return label
        if plain in ALONG and any(key in arguments for key in ("dim", "dim0")):
            return self._along(node, source, arguments)
        if torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return self._pointwise(node)
        raise NotByPosition(f"{name} is not known to work position by position")

    # -- operands ---------------------------------------------------------------------------------------------

    def _as_it_is(self, node: fx.Node, operand: Callable[[fx.Node], Any]) -> None:
        """The same call, with each operand as `operand` gives it."""
        args = fx.node.map_arg(tuple(node.args), operand)
        kwargs = fx.node.map_arg(dict(node.kwargs), operand)
        self.written[node] = Written(node.target, args, kwargs)

    def _whole(self, node: fx.Node) -> Any:
        kind = self.labels[node].kind
        if kind is Kind.GIVEN:
            return OfBatch(node, shape_of(node))
        return OfState(node) if kind is Kind.STATE else node

    def _state(self, node: fx.Node) -> Any:
        """An operand that is a row, or made of parameters alone."""
        if self.labels[node].kind is Kind.GIVEN:
            raise NotByPosition("a tensor of the batch is a weight after the last layer")
        return OfState(node) if self.labels[node].kind is Kind.STATE else node

    def _same_lead(self, node: fx.Node, source: fx.Node) -> Label:
        """The label of rows that keep the dimensions of their positions."""
        label = self.labels[source]
        if label.kind is not Kind.ROWS or shape_of(node)[: label.lead] != shape_of(source)[: label.lead]:
            raise NotByPosition(f"{name_of(node)} changes which positions there are")
        return label

    def _broadcast(self, node: fx.Node, label: Label, shape: tuple[int, ...]) -> Any:
        """An operand of an op over tensors of `shape`, whose first `label.lead` dimensions are positions."""
        own, lead, rest = self.labels[node], label.lead, len(shape) - label.lead
        sizes = shape_of(node)
        if own.kind is Kind.ROWS:
            if (own.lead, own.part, len(sizes)) != (lead, label.part, len(shape)) or sizes[:lead] != shape[:lead]:
                raise NotByPosition("positions are put together with other positions")
            return node
        outer, inner = sizes[: max(0, len(sizes) - rest)], sizes[max(0, len(sizes) - rest) :]
        if all(size == 1 for size in outer):
            if own.kind is Kind.STATE:
                return OfState(node, inner if outer else None)
            return OfBatch(node, inner)
        if own.trained:
            raise NotByPosition("a trained parameter has rows for the positions")
        if label.part:
            raise NotByPosition("a tensor of the batch is used at some of the positions only")
        inner = (1,) * (rest - len(inner)) + inner
        return OfBatch(node, (*shape[:lead], *inner), lead)

    # -- rules ------------------------------------------------------------------------------------------------

    def _pointwise(self, node: fx.Node) -> Label:
        shape = shape_of(node)
        label = next(self.labels[one] for one in node.all_input_nodes if self.labels[one].kind is Kind.ROWS)
        self._as_it_is(node, lambda one: self._broadcast(one, label, shape))
        return label

    def _reshaped(self, node: fx.Node, source: fx.Node) -> Label:
        label = self.labels[source]
        if label.kind is not Kind.ROWS:
            raise NotByPosition(f"{name_of(node)} takes the shape of the positions")
        before, after = shape_of(source), shape_of(node)
        positions = rows_of(before, label.lead)
        lead = next((count for count in range(1, len(after) + 1) if rows_of(after, count) == positions), 0)
        rest = after[lead:]
        if not lead or math.prod(rest) != math.prod(before[label.lead :]):
            raise NotByPosition(f"{name_of(node)} puts positions together")
        if rest == before[label.lead :]:
            self.written[node] = source
        else:
            self.written[node] = Written(aten.reshape.default, (source, [-1, *rest]), {})
        return Label(Kind.ROWS, lead, label.part)

    def _along(self, node: fx.Node, source: fx.Node, arguments: dict[str, Any]) -> Label:
        """An op along dimensions that are not positions, or a slice of the positions."""
        label = self.labels[source]
        if label.kind is not Kind.ROWS:
            raise NotByPosition(f"{name_of(node)} reads positions by number")
        count = len(shape_of(source))
        named = {key: arguments[key] for key in ("dim", "dim0", "dim1") if key in arguments}
        dims = [dim % count for one in named.values() for dim in (one if isinstance(one, (list, tuple)) else [one])]
        if any(dim < label.lead for dim in dims):
            if name_of(node) == "slice":
                return self._slice(node, source, label, dims[0], arguments)
            if name_of(node) in ("sum", "mean") and sorted(dims) == list(range(count)):
                return self._total(node, source, mean=name_of(node) == "mean")
            raise NotByPosition(f"{name_of(node)} goes over the positions")
        values = dict(arguments)
        for key, one in named.items():
            ends = [dim % count - count for dim in (one if isinstance(one, (list, tuple)) else [one])]
            values[key] = ends if isinstance(one, (list, tuple)) else ends[0]
        shape, schema = shape_of(source), node.target._schema  # type: ignore[union-attr]

        def operand(one: fx.Node) -> Any:
            sizes = shape_of(one)
            if len(sizes) != count:
                return self._state(one)
            return self._broadcast(one, label, (*shape[: label.lead], *sizes[label.lead :]))

        by_position = tuple(values[one.name] for one in schema.arguments if not one.kwarg_only)
        by_name = {one.name: values[one.name] for one in schema.arguments if one.name in node.kwargs and one.kwarg_only}
        args, kwargs = fx.node.map_arg(by_position, operand), fx.node.map_arg(by_name, operand)
        self.written[node] = Written(node.target, args, kwargs)
        return label

    def _slice(self, node: fx.Node, source: fx.Node, label: Label, dim: int, arguments: dict[str, Any]) -> Label:
        size = shape_of(source)[dim]
        start, stop, step = slice(arguments["start"], arguments["end"]).indices(size)
        if arguments.get("step", 1) != 1 or step != 1:
            raise NotByPosition("slice takes some of the positions only")
        self.written[node] = source
        if (start, stop) == (0, size):
            return label
        if label.part or shape_of(source)[: label.lead] != self.leading:
            raise NotByPosition("slice takes some of the positions only, more than once")
        return Label(Kind.ROWS, label.lead, ((dim, start, stop),))

    def _moves_classes(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether an op moves the last dimension of rows behind the first one."""
        count, label = len(shape_of(source)), self.labels[source]
        last_second = (0, count - 1, *range(1, count - 1))
        return label.kind is Kind.ROWS and label.lead == count - 1 > 1 and order_of(node) == last_second

    def _of_moved(self, node: fx.Node) -> Label:
        """Losses of rows whose classes stand behind the first dimension, and what may stand between. Chunks have the
        classes last."""
        name, arguments, source = name_of(node).rstrip("_"), arguments_of(node), node.all_input_nodes[0]
        label, count = self.labels[source], len(shape_of(source))
        if name in CLASSES:
            return self._classes(node, arguments)
        if name in REORDERS and order_of(node) == (0, *range(2, count), 1):
            self.written[node] = source
            return replace(label, moved=False)
        if name in ("log_softmax", "softmax") and arguments["dim"] % count == 1:
            self.written[node] = Written(node.target, (source, -1, arguments["dtype"]), {})
            return label
        if len(node.all_input_nodes) == 1 and (name in IDENTITIES or torch.Tag.pointwise in node.target.tags):  # type: ignore[union-attr]
            self._as_it_is(node, self._state)
            return label
        raise NotByPosition(f"{name_of(node)} reads classes in another dimension than the last")

    def _product(self, node: fx.Node, name: str, arguments: dict[str, Any]) -> Label:
        rows = {"linear": "input", "addmm": "mat1"}.get(name, "self")
        source = arguments[rows]
        others = [one for one in node.all_input_nodes if one is not source]
        if any(self.labels[one].kind is not Kind.STATE for one in others) or any(
            one.meta["val"].dim() > 2 for one in others
        ):
            raise NotByPosition(f"{name_of(node)} multiplies positions by positions")
        label = self._same_lead(node, source)
        if label.lead >= len(shape_of(source)):
            raise NotByPosition(f"{name_of(node)} sums over positions")
        self._as_it_is(node, lambda one: one if one is source else OfState(one))
        return label

    def _classes(self, node: fx.Node, arguments: dict[str, Any]) -> Label:
        """Cross-entropy over classes: a sum over targets, divided by how many count in a mean."""
        source, target, weight = arguments["self"], arguments["target"], arguments.get("weight")
        label, shape = self.labels[source], shape_of(source)
        if label.kind is not Kind.ROWS or not (label.moved or (label.lead == 1 and len(shape) == 2)):
            raise NotByPosition(f"{name_of(node)} takes classes in another dimension than the last")
        if self.labels[target].kind is not Kind.GIVEN:
            raise NotByPosition(f"{name_of(node)} takes targets that do not come from the batch")
        if isinstance(weight, fx.Node) and (self.labels[weight].kind is not Kind.STATE or self.labels[weight].trained):
            raise NotByPosition(f"{name_of(node)} takes weights of classes that are trained or come from the batch")
        probabilities = target.meta["val"].is_floating_point()
        if probabilities and label.moved:
            raise NotByPosition(f"{name_of(node)} takes probabilities of classes in another dimension than the last")
        if probabilities and label.part:
            raise NotByPosition(f"{name_of(node)} takes probabilities at some of the positions only")
        reduction, ignored = arguments["reduction"], int(arguments["ignore_index"])
        if reduction == NONE and label.part:
            raise NotByPosition("losses of some of the positions only are computed further")
        given = OfBatch(target, shape_of(target), label.lead, label.part, ignored)
        divisor: Count | int | None = None
        if reduction == MEAN:
            divisor = rows_of(shape, 1) if probabilities else Count(target, weight, ignored)
        values = {
            **arguments, "target": given, "weight": None if weight is None else OfState(weight),
            "reduction": NONE if reduction == NONE else SUM,
        }  # fmt: skip
        self.written[node] = Written(node.target, tuple(values.values()), {}, divisor)
        return Label(Kind.ROWS, label.lead) if reduction == NONE else Label(Kind.TERM)

    def _elements(self, node: fx.Node, arguments: dict[str, Any]) -> Label:
        """A loss element by element: a sum, divided by the number of elements in a mean."""
        source = arguments["self"]
        label = self.labels[source]
        if label.kind is not Kind.ROWS or label.part:
            raise NotByPosition(f"{name_of(node)} takes some of the positions only, or takes them as targets")
        shape, reduction = shape_of(source), arguments["reduction"]
        values = {
            key: self._broadcast(one, label, shape) if isinstance(one, fx.Node) and one is not source else one
            for key, one in arguments.items()
        }
        values["reduction"] = NONE if reduction == NONE else SUM
        count = math.prod(shape) if reduction == MEAN else None
        schema = node.target._schema  # type: ignore[union-attr]
        by_name = {one.name: values.pop(one.name) for one in schema.arguments if one.kwarg_only}
        self.written[node] = Written(node.target, tuple(values.values()), by_name, count)
        return label if reduction == NONE else Label(Kind.TERM)

    def _total(self, node: fx.Node, source: fx.Node, mean: bool) -> Label:
        """The sum or the mean over everything."""
        if self.labels[source].part:
            raise NotByPosition(f"{name_of(node)} is over some of the positions only")
        arguments = arguments_of(node)
        kwargs = {"dtype": arguments["dtype"]} if arguments.get("dtype") is not None else {}
        count = math.prod(shape_of(source)) if mean else None
        if node.meta["val"].dim():
            raise NotByPosition(f"{name_of(node)} keeps dimensions of a sum over positions")
        self.written[node] = Written(aten.sum.default, (source,), kwargs, count)
        return Label(Kind.TERM)


class PositionFlow(RowRules):
    """The labels of all that the loss needs, and how a chunk's graph writes each op of it.

    `labels` are those of the placeholders at first. `width` is the most elements that a position has in any tensor: as
    many as there are classes, for a language model.
    """

    def __init__(
        self, graph: fx.Graph, loss: fx.Node, labels: Mapping[fx.Node, Label], leading: tuple[int, ...]
    ) -> None:
        super().__init__(labels, leading)
        self.width = 0
        self.needed = needed_by([loss], graph)
        gradients_on = True
        for node in graph.nodes:
            if node in self.needed and regions_of(node):
                raise NotByPosition("it uses torch.autocast")
            if node.target is SET_GRAD_ENABLED:
                gradients_on = bool(node.args[0])
            elif node in self.needed and node.op == "call_function":
                label = self.labels[node] = self.label(node)
                if not gradients_on and (label.kind in (Kind.ROWS, Kind.TERM) or label.trained):
                    raise NotByPosition(f"{name_of(node)} runs under torch.no_grad")
                if label.kind is Kind.ROWS and isinstance(node.meta["val"], torch.Tensor):
                    self.width = max(self.width, math.prod(shape_of(node)[label.lead :]))
        if self.labels[loss].kind is not Kind.TERM or self.labels[loss].part:
            raise NotByPosition("the loss is not a sum over positions")
