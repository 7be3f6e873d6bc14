"""What the loss of a batch is in terms of its micro-batches' losses, from the labels of a traced model's values.

`find_loss_plan` says what the micro-batches count, and changes the trace of a micro-batch where that is not enough:
values that follow from the batch alone and take samples together become inputs, those of the whole batch; and if the
terms of the loss count differently, each is multiplied by its own share, an input too. A loss, or an output, that mixes
samples cannot be made of micro-batches; the plan says which op does it. Invariant: a term without targets in a
micro-batch adds exactly nothing, to the loss and to every gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from relay.capture.guards.data_guards import Guard
from relay.data.join_outputs import AVERAGED, FREE, SUMMED, Join, RowsAlong
from relay.data.loss_weight import SAMPLES, SUM, LossPlan, Share, TargetCount
from relay.graph.autocast_regions import enter_regions
from relay.graph.mutations import memory_roots, needed_by, written_by
from relay.partition.batch_flow.flow import BatchFlow
from relay.partition.batch_flow.labels import Cause, Count, Kind, Label, Term
from relay.partition.batch_flow.op_call import OpCall

aten = torch.ops.aten

States = Mapping[fx.Node, torch.Tensor]


class LossTerms:
    """Makes the plan for a loss, the first of the results of the large trace of `flow`.

    `batch` are the placeholders of the batch's tensors in both traces, `states` those of the parameters and buffers.
    `where` describes an op and its position for error messages. `changed` says whether the micro-batch's trace was.
    """

    def __init__(
        self,
        flow: BatchFlow,
        results: Sequence[fx.Node],
        batch: tuple[Sequence[fx.Node], Sequence[fx.Node]],
        states: tuple[States, States],
        where: Callable[[Cause], str],
    ) -> None:
        self._flow, self._pair = flow, flow.pair
        self._results = results
        self._small_batch, self._large_batch = batch
        self._small_states, self._large_states = states
        self._where = where
        self._small = flow.pair.small.graph
        self._added: list[fx.Node] = []
        self._given: dict[fx.Node, fx.Node] = {}
        self.changed = False

    def plan(self, assumed: Sequence[Cause], guards: Sequence[Guard]) -> LossPlan:
        """The plan; the trace of the micro-batch is changed to suit it."""
        label = self._flow.label(self._results[0])
        unknown = self._where(assumed[0]) if assumed else None
        mixed_output = self._mixed_output()
        if label.kind in (Kind.MIXED, Kind.UNKNOWN):
            assert label.cause is not None
            why = self._where(label.cause)
            problem = why if label.kind is Kind.MIXED else None
            unknown = unknown if problem else why
            return LossPlan(
                problem=problem, unknown=unknown, mixed_output=mixed_output, joins=self._joins(self._results[1:]),
                guards=tuple(guards),
            )  # fmt: skip
        keys = {term: self._key(term) for term in label.terms}
        shares = list(dict.fromkeys(keys.values())) or [Count.SAMPLES]
        live = needed_by(list(self._results), self._pair.large.graph)
        values = [node for node in self._flow.substituted if node in live]
        for value in values:
            self._replace(value)
        lengths = [(node, leaf) for node, leaf in self._flow.literals if node in live]
        for node, leaf in lengths:
            self._set_literal(node, leaf)
        inputs = [*self._small_batch, *self._added]
        made = {key: self._share(key, inputs) for key in shares}
        scaled = [key for key in shares if key is not Count.SUM] if len(shares) > 1 else []
        dtypes = [self._scale(key, [term for term in label.terms if keys[term] == key]) for key in scaled]
        return LossPlan(
            SUM if scaled else made[shares[0]],
            extracted(self._pair.large, values, self._large_batch, self._large_states) if values else None,
            tuple(made[key] for key in scaled),
            tuple(dtypes),
            self._summed(keys, shares[0] if not scaled else None),
            self._joins(self._results[1:]),
            mixed_output=mixed_output,
            unknown=unknown,
            guards=tuple(guards),
            uses_length=bool(lengths),
        )

    def plan_without_loss(self, guards: Sequence[Guard]) -> LossPlan:
        """The plan for a model that gives no loss."""
        return LossPlan(mixed_output=self._mixed_output(), joins=self._joins(self._results), guards=tuple(guards))

    def _joins(self, results: Sequence[fx.Node]) -> dict[int, Join]:
        """How the micro-batches' results make those of the batch, by number, where it is known."""
        found: dict[int, Join] = {}
        for number, result in enumerate(results):
            label = self._flow.labels[result]
            if not isinstance(label, Label):
                continue
            counts = {term.count for term in label.terms}
            if label.kind is Kind.FREE:
                found[number] = FREE
            elif label.kind is Kind.ROWS and label.unit:
                found[number] = RowsAlong(label.dim, label.unit)
            elif label.kind is Kind.TERMS and counts in ({Count.SUM}, {Count.SAMPLES}):
                found[number] = SUMMED if counts == {Count.SUM} else AVERAGED
        return found

    def _mixed_output(self) -> str | None:
        for result in self._results:
            label = self._flow.labels[result]
            tensor = result.meta.get("val")
            is_tensor = isinstance(tensor, torch.Tensor) and tensor.dim() > 0
            if is_tensor and isinstance(label, Label) and label.kind is Kind.MIXED and not label.given:
                assert label.cause is not None
                return self._where(label.cause)
        return None

    def _summed(self, keys: Mapping[Term, Any], single: Any) -> frozenset[int]:
        """Which of the other results are sums of terms that count as the loss does."""
        found = []
        for number, result in enumerate(self._results[1:]):
            label = self._flow.labels[result]
            if isinstance(label, Label) and label.kind is Kind.TERMS:
                own = [keys.get(term) or self._key(term) for term in label.terms]
                known = all(term in keys or term.count is Count.SUM for term in label.terms)
                if known if single is None else all(key == single for key in own):
                    found.append(number)
        return frozenset(found)

    def _key(self, term: Term) -> Any:
        """What two terms that count alike have in common."""
        if term.count is not Count.TARGETS:
            return term.count
        call = OpCall(self._flow, term.node, False)
        return call.argument("target"), call.argument("weight"), call.argument("ignore_index")

    def _share(self, key: Any, inputs: Sequence[fx.Node]) -> Share:
        if isinstance(key, Count):
            return SUM if key is Count.SUM else SAMPLES
        target, weight, ignored = key
        # Weights of classes that follow from the batch are those of the whole batch here too.
        own = ((node, self._pair.small_of[node]) for node in (target, weight) if node is not None)
        wanted = [self._given.get(node, small) for node, small in own]
        return TargetCount(extracted(self._pair.small, wanted, inputs, self._small_states), int(ignored))

    def _placeholder(self, name: str, value: torch.Tensor) -> fx.Node:
        last = self._small.find_nodes(op="placeholder")[-1]
        with self._small.inserting_after(last):
            node = self._small.placeholder(name)
        node.meta = {"val": value}
        self._added.append(node)
        self.changed = True
        return node

    def _replace(self, value: fx.Node) -> None:
        """Put the whole batch's value into the place of the micro-batch's."""
        node = self._pair.small_of[value]
        given = self._placeholder(f"whole_{len(self._added)}", node.meta["val"])
        node.replace_all_uses_with(given)
        self._given[value] = given

    def _set_literal(self, node: fx.Node, leaf: int) -> None:
        self.changed = True
        own = self._pair.small_of[node]
        leaves, form = pytree.tree_flatten((own.args, own.kwargs))
        leaves[leaf] = pytree.tree_flatten((node.args, node.kwargs))[0][leaf]
        own.args, own.kwargs = pytree.tree_unflatten(leaves, form)

    def _scale(self, key: Any, terms: Sequence[Term]) -> torch.dtype:
        """Multiply the terms by their share, which is given; returns in which dtype."""
        nodes = [self._pair.small_of[term.node] for term in terms]
        double = any(node.meta["val"].dtype is torch.float64 for node in nodes)
        dtype = torch.float64 if double else torch.float32
        share = self._placeholder(f"share_{len(self._added)}", nodes[0].meta["val"].new_empty((), dtype=dtype))
        for term, node in zip(terms, nodes, strict=True):
            if term.operand is not None:
                self._scale_operand(node, term.operand, share)
            else:
                self._scale_result(node, share, guarded=not isinstance(key, Count))
        return dtype

    def _scale_operand(self, node: fx.Node, operand: int, share: fx.Node) -> None:
        value: Any = node.args[operand]
        with self._small.inserting_before(node):
            scaled = self._call(aten.mul.Tensor, share, value)
        node.args = tuple(scaled if place == operand else one for place, one in enumerate(node.args))
        # What was a plain number is a tensor now.
        packet = getattr(node.target, "overloadpacket", None)
        node.target = aten.where.self if packet is aten.where else packet.Tensor  # type: ignore[union-attr]

    def _scale_result(self, node: fx.Node, share: fx.Node, guarded: bool) -> None:
        users = list(node.users)
        with self._small.inserting_after(node):
            scaled = self._call(aten.mul.Tensor, node, share)
        result = scaled
        if guarded:  # a mean over no targets is 0 / 0
            with self._small.inserting_after(scaled):
                counts = self._call(aten.ne.Scalar, share, 0)
            with self._small.inserting_after(counts):
                nothing = self._call(aten.zeros_like.default, scaled)
            with self._small.inserting_after(nothing):
                result = self._call(aten.where.self, counts, scaled, nothing)
        for user in users:
            user.replace_input_with(node, result)

    def _call(self, target: Any, *args: Any) -> fx.Node:
        node = self._small.call_function(target, args)
        values = [one.meta["val"] if isinstance(one, fx.Node) else one for one in args]
        node.meta = {"val": target(*values)}
        return node


def extracted(
    module: fx.GraphModule, wanted: Sequence[fx.Node], inputs: Sequence[fx.Node], states: States
) -> fx.GraphModule:
    """The part of a trace that computes some of its values from others. What is written to is copied first."""
    graph, root = fx.Graph(), nn.Module()
    copied: dict[fx.Node, fx.Node] = {node: graph.placeholder(f"input_{place}") for place, node in enumerate(inputs)}
    needed = needed_by(wanted, module.graph)
    memory = memory_roots(module.graph)
    written = {memory.get(target) for target in map(written_by, needed) if target is not None}
    for node in inputs:
        if node in written:
            copied[node] = graph.call_function(aten.clone.default, (copied[node],))
    for node in module.graph.nodes:
        if node in copied or node not in needed:
            continue
        tensor = states.get(node) if node.op == "placeholder" else None
        if node.op == "get_attr":
            tensor = getattr(module, str(node.target))
        if tensor is not None:
            name = f"tensor_{len(copied)}"
            root.__dict__[name] = tensor  # the model's own, whatever it holds by then
            copied[node] = graph.create_node("get_attr", name)
        else:
            copied[node] = graph.node_copy(node, copied.__getitem__)
    enter_regions(graph)
    graph.output(tuple(copied[node] for node in wanted))
    return fx.GraphModule({name: value for name, value in root.__dict__.items() if name.startswith("tensor_")}, graph)
