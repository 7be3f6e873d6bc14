"""One call of an op as the rules see it: its arguments by name, its operands' labels, and what may come out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import fx

from relay.partition.batch_flow.labels import Cause, Count, Kind, Label, Term, free
from relay.partition.batch_flow.trace_pair import TracePair

Labels = Label | tuple[Label, ...]


def name_of(node: fx.Node) -> str:
    """An op's name without its overload: "add" of aten.add_.Tensor."""
    schema = getattr(node.target, "_schema", None)
    name = schema.name.split("::")[1] if schema is not None else str(node.target)
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


class Flow(Protocol):
    """The walk through a trace, as far as rules need it (`relay.partition.batch_flow.flow.BatchFlow`)."""

    pair: TracePair
    labels: dict[fx.Node, Labels]
    literals: dict[tuple[fx.Node, int], None]
    inside: bool

    def taken(self, user: fx.Node, node: fx.Node, given: bool) -> Label:
        """The label of an operand, as its user takes it."""

    def is_given(self, node: fx.Node) -> bool:
        """Whether a value follows from the batch alone."""

    def cause(self, node: fx.Node, reason: str) -> Cause:
        """Why a value is mixed or unknown from this op on."""


class OpCall:
    """One call of an op: its arguments by name, and what their labels are. `given` values come from the batch alone."""

    def __init__(self, flow: Flow, node: fx.Node, given: bool) -> None:
        self.flow, self.node, self.given = flow, node, given
        self.name = name_of(node)
        self.arguments: dict[str, Any] = {}
        schema = getattr(node.target, "_schema", None)
        for position, argument in enumerate(schema.arguments if schema is not None else ()):
            default = argument.default_value if argument.has_default_value() else None
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, default)
            self.arguments[argument.name] = value
        self.operands = list(node.all_input_nodes)

    def label(self, value: Any) -> Label:
        """The label of an argument; of what is no tensor, free."""
        return self.flow.taken(self.node, value, self.given) if isinstance(value, fx.Node) else free(True)

    def argument(self, *names: str, default: Any = None) -> Any:
        """The first of the arguments of these names that the op has."""
        return next((self.arguments[name] for name in names if name in self.arguments), default)

    def dims(self, value: fx.Node) -> list[int]:
        """The dimensions an op goes over, all of them where it names none."""
        count = value.meta["val"].dim()
        named = self.argument("dim", "dims", "axis")
        if named is None or named == []:
            return list(range(count))
        return [dim % max(count, 1) for dim in (named if isinstance(named, (list, tuple)) else [named])]

    def mixed(self, reason: str) -> Label:
        """From here on samples are taken together."""
        return Label(Kind.MIXED, given=self.given, cause=self.flow.cause(self.node, reason))

    def unknown(self) -> Label:
        """A result of which nothing is known."""
        return Label(Kind.UNKNOWN, cause=self.flow.cause(self.node, "cannot be followed"))

    def term(self, count: Count) -> Label:
        """What comes out is a term of its own."""
        return Label(Kind.TERMS, given=self.given, terms=(Term(self.node, count),))

    def shaped(self, label: Label, reason: str = "takes samples together") -> Labels:
        """Row-wise outputs: each has the rows where its size comes from the batch's length."""
        val = self.node.meta.get("val")
        if isinstance(val, (tuple, list)):
            return tuple(self.shaped_item(label, number, reason) for number in range(len(val)))
        return self.shaped_item(label, None, reason)

    def shaped_item(self, label: Label, item: int | None, reason: str) -> Label:
        val = self.node.meta["val"] if item is None else self.node.meta["val"][item]
        dims = self.flow.pair.varying(self.node, item)
        if not isinstance(val, torch.Tensor):
            return free()
        if len(dims) != 1:
            return self.mixed(reason)
        source = self._source_size(label)
        if source is not None and source != val.shape[dims[0]]:
            return self.mixed(reason)
        return replace(label, dim=dims[0], given=self.given)

    def _source_size(self, label: Label) -> int | None:
        for operand in self.operands:
            if self.flow.labels[operand] == label and label.kind in (Kind.ROWS, Kind.MIXED):
                return int(operand.meta["val"].shape[label.dim])
        return None


def alike(call: OpCall, label: Label) -> Labels:
    val = call.node.meta.get("val")
    return (label,) * len(val) if isinstance(val, (tuple, list)) else label
