"""Following the batch through a traced model: which values are its rows, and which take several samples together.

Every value of a trace gets a `Label`: free of the batch, row-wise, a sum of terms, mixing samples, or unknown. A value
that follows from the batch alone and takes several samples together (how many targets are not masked, say) may stand
where a value free of the batch may: for the whole batch it is known before a step, and `substituted` lists those that
are used so. Layers are followed into. It changes no graph. Invariant: a value is labelled row-wise only if what
belongs to a sample is the same in every batch with that sample in it, statistics of BatchNorm aside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from relay.capture import SET_GRAD_ENABLED
from relay.capture.fake_tensors import is_fake, modes_off
from relay.capture.op_parts import parts_of
from relay.graph.mutations import memory_roots, written_by
from relay.partition.batch_flow import rules
from relay.partition.batch_flow.labels import Cause, Count, Kind, Label, Term, free, rows
from relay.partition.batch_flow.op_call import Labels, OpCall, name_of
from relay.partition.batch_flow.trace_pair import TracePair

Blocks = Callable[[fx.Node, Sequence[Label]], tuple[Label, ...] | None]
"""Labels the outputs of a call of a layer, given its node and the labels of its tensors; None if it cannot."""


class BatchFlow:
    """The labels of all values of a trace, `labels`; `inputs` are those of its placeholders.

    `substituted` are the values that follow from the batch alone and must be those of the whole batch, `literals` the
    numbers that must be: a node, and which of its arguments' leaves. `assumed` are the ops that cannot be followed, and
    are taken for row-wise by their shapes. `layer` names the layer that the trace is of.
    """

    def __init__(
        self,
        pair: TracePair,
        inputs: Mapping[fx.Node, Label],
        blocks: Blocks | None = None,
        layer: str = "",
        inside: bool = False,
    ) -> None:
        self.pair = pair
        self.labels: dict[fx.Node, Labels] = dict(inputs)
        self.substituted: dict[fx.Node, None] = {}
        self.literals: dict[tuple[fx.Node, int], None] = {}
        self.assumed: list[Cause] = []
        self.layer = layer
        self._blocks = blocks
        self.inside = inside  # an op's parts, or a layer: nothing can be replaced in there
        self._roots = memory_roots(pair.large.graph)
        for node in pair.large.graph.nodes:
            if node.op in ("placeholder", "output") or node.target is SET_GRAD_ENABLED:
                continue
            self.labels[node] = self._label(node)
            target = written_by(node)
            if target is not None:
                self._written(node, target)

    @property
    def outputs(self) -> list[Label]:
        """The labels of what the trace returns."""
        result = next(iter(reversed(self.pair.large.graph.nodes))).args[0]
        found = result if isinstance(result, (tuple, list)) else [result]
        return [self.label(node) if isinstance(node, fx.Node) else free(True) for node in found]

    def label(self, node: fx.Node) -> Label:
        """The label of a tensor."""
        found = self.labels[node]
        assert isinstance(found, Label)
        return found

    def taken(self, user: fx.Node, node: fx.Node, given: bool) -> Label:
        """The label of an operand, as its user takes it: one that the whole batch's stands in for is free."""
        found = self.labels[node]
        if not isinstance(found, Label):
            return found[0] if found else free()
        spread = not given or bool(self.pair.varying(user))  # what is given alone and has no rows is computed as it is
        if spread and not self.inside and self.replaceable(node):
            self.substituted[node] = None
            return free(True)
        return found

    def replaceable(self, node: fx.Node) -> bool:
        """Whether a value follows from the batch alone, takes samples together, and has a shape of its own."""
        found = self.labels[node]
        return (
            isinstance(found, Label)
            and found.given
            and found.kind in (Kind.TERMS, Kind.MIXED, Kind.UNKNOWN)
            and not self.pair.varying(node)
        )

    def _label(self, node: fx.Node) -> Labels:
        if node.op == "get_attr":
            return self._constant(node)
        if node.target is operator.getitem:
            found = self.labels[node.args[0]]  # type: ignore[index]
            return found[node.args[1]] if isinstance(found, tuple) else found  # type: ignore[index]
        given = not _draws(node) and all(self.is_given(other) for other in node.all_input_nodes)
        namespace = getattr(node.target, "namespace", "")
        if namespace == "relay" and self._blocks is not None:
            tensors = [self.taken(node, other, False) for other in _tensors_of(node)]
            of_block = self._blocks(node, tensors)
            if of_block is None:
                return self.unknown(node, self.cause(node, "cannot be followed"), False, noted=True)
            return self._items_of_block(node, of_block)
        call = OpCall(self, node, given)
        ruled = rules.label_of(call)
        return self._by_parts(call) if ruled is None else ruled

    def is_given(self, node: fx.Node) -> bool:
        found = self.labels.get(node, free())
        return all(one.given for one in found) if isinstance(found, tuple) else found.given

    def _items_of_block(self, node: fx.Node, found: tuple[Label, ...]) -> tuple[Label, ...]:
        """A layer's sums and means are terms where their item is taken."""
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        labels = []
        for number, label in enumerate(found):
            if label.kind is Kind.TERMS:
                counts = {term.count for term in label.terms}
                if len(counts) > 1 or Count.TARGETS in counts or number not in items:
                    name = label.terms[0].node.name
                    label = Label(
                        Kind.MIXED, cause=Cause(name, "returns a sum of terms that count differently", layer=self.layer)
                    )
                else:
                    label = Label(Kind.TERMS, terms=(Term(items[number], counts.pop()),))
            labels.append(label)
        return tuple(labels)

    def _constant(self, node: fx.Node) -> Label:
        small = getattr(self.pair.small, str(self.pair.small_of[node].target), None)
        large = getattr(self.pair.large, str(node.target), None)
        if isinstance(small, torch.Tensor) and isinstance(large, torch.Tensor):
            if is_fake(small) or is_fake(large):  # what an op made that the trace does not hold
                cause = self.cause(node, "cannot be followed")
                self.assumed.append(cause)
                return Label(Kind.UNKNOWN, cause=cause)
            with modes_off():  # constants have their numbers in a run without numbers too
                same = small.shape == large.shape and torch.equal(small, large)
            if not same:
                return Label(Kind.MIXED, given=True, cause=self.cause(node, "is made from the batch's length"))
        return free(True)

    def cause(self, node: fx.Node, reason: str) -> Cause:
        """Why a value is mixed or unknown from this op on."""
        return Cause(name_of(node), reason, node, self.layer)

    def _by_parts(self, call: OpCall) -> Labels:
        """An op without a rule of its own is what its parts make of it."""
        node = call.node
        small, large = (
            parts_of(node.target, *_filled(each, self.pair, side))  # type: ignore[arg-type]
            for side, each in ((0, self.pair.small_of[node]), (1, node))
        )
        try:
            if small is None or large is None:
                raise ValueError("it has no parts")
            pair = TracePair(small, large, self.pair.lengths)
        except ValueError:
            return self.unknown(node, self.cause(node, "cannot be followed"), call.given)
        placeholders = large.graph.find_nodes(op="placeholder")
        taken = [call.label(other) for other in _tensors_of(node)]
        inner = BatchFlow(pair, dict(zip(placeholders, taken, strict=True)), None, self.layer, True)
        if inner.assumed:
            return self.unknown(node, self.cause(node, "cannot be followed"), call.given)
        labels = tuple(self._of_part(call, label) for label in inner.outputs)
        val = node.meta.get("val")
        return labels[0] if isinstance(val, torch.Tensor) else labels

    def unknown(self, node: fx.Node, cause: Cause, given: bool, noted: bool = False) -> Labels:
        """The labels of what cannot be followed: row-wise if the shapes look like it, which is `noted` in `assumed`."""
        if not noted:
            self.assumed.append(cause)
        val = node.meta.get("val")
        count = len(val) if isinstance(val, (tuple, list)) else None
        found = tuple(self._by_shape(node, item, cause, given) for item in ([None] if count is None else range(count)))
        return found[0] if count is None else found

    def _by_shape(self, node: fx.Node, item: int | None, cause: Cause, given: bool) -> Label:
        dims = self.pair.varying(node, item)
        val = node.meta["val"] if item is None else node.meta["val"][item]
        length = self.pair.lengths[1]
        if len(dims) == 1 and val.shape[dims[0]] % length == 0:
            return rows(dims[0], val.shape[dims[0]] // length, given)
        return Label(Kind.UNKNOWN, given=given, cause=cause)

    def _of_part(self, call: OpCall, label: Label) -> Label:
        """An output's label, with the op itself in place of the parts it is made of."""
        if label.cause is not None and label.cause.node is not None and label.cause.node.graph is not call.node.graph:
            label = Label(
                label.kind, label.dim, label.unit, label.given, cause=self.cause(call.node, label.cause.reason)
            )
        if label.kind is Kind.TERMS and any(term.node.graph is not call.node.graph for term in label.terms):
            counts = {term.count for term in label.terms}
            if len(counts) > 1 or Count.TARGETS in counts:
                return call.mixed("adds sums over the batch to means")
            return Label(Kind.TERMS, given=call.given, terms=(Term(call.node, counts.pop()),))
        return label.derived(call.given)

    def _written(self, node: fx.Node, target: fx.Node) -> None:
        """What was written to, and all that looks at its memory, is labelled anew."""
        root = self._roots.get(target, target)
        written, before = self.labels[node], self.labels[root]
        if not isinstance(written, Label) or not isinstance(before, Label):
            return
        if root is target:
            self.labels[root] = written
        elif Kind.MIXED in (written.kind, before.kind) or Kind.UNKNOWN in (written.kind, before.kind):
            worse = written if written.kind in (Kind.MIXED, Kind.UNKNOWN) else before
            self.labels[root] = worse.derived(written.given and before.given)
        else:
            self.labels[root] = self._joined(node, target, root, written, before)
        for other in self.pair.large.graph.nodes:
            if other is node:
                break
            if self._roots.get(other) is root and other is not root and written_by(other) is None:
                self.labels[other] = self._label(other)

    def _joined(self, node: fx.Node, view: fx.Node, root: fx.Node, written: Label, before: Label) -> Label:
        """The label of a tensor of which a part was written."""
        given = written.given and before.given
        whole = self.pair.varying(root)
        if not whole and written.kind is before.kind is Kind.FREE:
            return free(given)
        part = self.pair.varying(view)
        if len(whole) != 1 or len(part) != 1 or Kind.TERMS in (written.kind, before.kind):
            return Label(Kind.MIXED, given=given, cause=self.cause(node, "writes to some samples' part of a tensor"))
        same = view.meta["val"].shape[part[0]] == root.meta["val"].shape[whole[0]]
        units = {label.unit for label in (written, before) if label.kind is Kind.ROWS and label.unit}
        if not same or len(units) > 1:
            return Label(Kind.MIXED, given=given, cause=self.cause(node, "writes to some samples' part of a tensor"))
        return rows(whole[0], units.pop() if units else 0, given)


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _tensors_of(node: fx.Node) -> list[fx.Node]:
    """The tensors among the arguments, as often as they stand there."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _filled(node: fx.Node, pair: TracePair, side: int) -> tuple[Any, Any]:
    """The arguments with the fake tensors of a trace in place of the nodes."""
    filled: tuple[Any, Any] = fx.node.map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
    return filled
