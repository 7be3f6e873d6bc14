"""Ops that write to their inputs, in a traced model that is about to be cut.

Between segments values pass by copy, so a write in one segment to memory that another has made would be lost. Where
an in-place op works on a tensor of its own it becomes the op that makes a new one; the rest (writes through a view)
are bound together with all that shares their memory, to stand in one segment. Invariant: the graph computes what it
did, and every write that is left stands in an `AliasGroup`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

AliasGroup = list[fx.Node]
"""Nodes that look at one piece of memory, at least one of which writes to it, in the graph's order."""


def bind_writes(graph: fx.Graph, states: Collection[fx.Node]) -> list[AliasGroup]:
    """Take out in-place ops where that is possible; returns what must stay together. `states` may be written to."""
    roots = memory_roots(graph)
    for node in list(graph.nodes):
        target = written_by(node)
        if target is not None and target in roots and roots[target] is target and target not in states:
            _make_functional(node, target, roots)
    roots = memory_roots(graph)
    written = dict.fromkeys(
        roots[target] for target in map(written_by, graph.nodes) if target is not None and target in roots
    )
    for root in written:
        if root not in states and _comes_from_outside(root):
            with graph.inserting_after(root):
                own = graph.call_function(aten.clone.default, (root,))
            own.meta = dict(root.meta)
            root.replace_all_uses_with(own, delete_user_cb=lambda user, own=own: user is not own)
    roots = memory_roots(graph)
    alias_groups: dict[fx.Node, AliasGroup] = {}
    for node in graph.nodes:
        if node in roots:
            alias_groups.setdefault(roots[node], []).append(node)
    mutated = {roots[target] for target in map(written_by, graph.nodes) if target is not None and target in roots}
    return [group for root, group in alias_groups.items() if root in mutated]


def written_by(node: fx.Node) -> fx.Node | None:
    """The tensor that an op writes to, or None. Ops that write to several (BatchNorm's) say so in no schema."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return given if isinstance(given, fx.Node) else None
    return None


def memory_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node with a tensor, the node whose memory it may share."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = _source(node)
        roots[node] = node if source is None else roots.get(source, source)
    return roots


def _source(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        # Items of a view of several share its memory; items of an op that makes several have memory of their own.
        return node.args[0] if _source(node.args[0]) is not None else None
    schema = getattr(node.target, "_schema", None)
    shares = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return node.args[0] if shares else None


def _comes_from_outside(node: fx.Node) -> bool:
    """Whether a node's memory is a batch's or another segment's."""
    return node.op == "placeholder" or node.target is operator.getitem


def _make_functional(node: fx.Node, target: fx.Node, roots: dict[fx.Node, fx.Node]) -> None:
    """Replace `op_(x, ...)` by `op(x, ...)` and later uses of x by its result, if x has no views that see it."""
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
    overload: Any = getattr(packet, node.target._overloadname, None)  # type: ignore[union-attr]
    if overload is None or node.args[0] is not target or name == "copy_":
        return
    before, after = target.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.dtype != after.dtype:
        return
    position = {each: number for number, each in enumerate(node.graph.nodes)}
    sharing = [each for each, root in roots.items() if root is target and each is not target and each is not node]
    if any(position[user] > position[node] for each in sharing for user in each.users):
        return
    if any(other.dtype != before.dtype for other in _tensors(node)):
        return  # an op that promotes gives another dtype than one that writes in place
    node.target = overload
    target.replace_all_uses_with(
        node, delete_user_cb=lambda user: user is not node and position.get(user, 0) > position[node]
    )


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    values = [argument.meta.get("val") for argument in node.all_input_nodes]
    return [value for value in values if isinstance(value, torch.Tensor) and value.dtype is not torch.bool]
