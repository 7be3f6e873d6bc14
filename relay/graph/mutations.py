"""Ops that write to their inputs, in the graph of a model that will be cut into segments.

Values pass between segments as copies, so a write to memory that another segment made would be lost. An in-place op on
a tensor that shares its memory with no other becomes the op that returns a new tensor. The remaining writes (through a
view) are grouped with all nodes that share their memory, and each group must stay in one segment. Invariant: the graph
computes what it did before, and every remaining write is in an `AliasGroup`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

AliasGroup = list[fx.Node]
"""Nodes that share one block of memory, at least one of which writes to it, in the order of the graph."""


def bind_writes(graph: fx.Graph, states: Collection[fx.Node]) -> list[AliasGroup]:
    """Replace in-place ops where possible, and return the groups of nodes that must stay together.

    `states` are the placeholders of parameters and buffers, which may be written to.
    """
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
            root.replace_all_uses_with(own, delete_user_cb=functools.partial(operator.is_not, own))
    roots = memory_roots(graph)
    alias_groups: dict[fx.Node, AliasGroup] = {}
    for node in graph.nodes:
        if node in roots:
            alias_groups.setdefault(roots[node], []).append(node)
    mutated = {roots[target] for target in map(written_by, graph.nodes) if target is not None and target in roots}
    return [group for root, group in alias_groups.items() if root in mutated]


def written_by(node: fx.Node) -> fx.Node | None:
    """The tensor that an op writes to by its schema, or None. Ops that write to several (BatchNorm) declare none."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            return given if isinstance(given, fx.Node) else None
    return None


def memory_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For every node, the node that made the memory which its tensor may share: itself, or the base of its views."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = _source(node)
        roots[node] = node if source is None else roots.get(source, source)
    return roots


def needed_by(wanted: Sequence[fx.Node], source: fx.Graph) -> set[fx.Node]:
    """All that a node's numbers depend on, writes to memory that it looks at included."""
    needed: set[fx.Node] = set()
    stack = list(wanted)
    memory = memory_roots(source)
    while stack:
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack.extend(node.all_input_nodes)
        looked_at = {memory[node] for node in needed if node in memory}
        stack = [
            node
            for node in source.nodes
            if node not in needed and (target := written_by(node)) is not None and memory.get(target) in looked_at
        ]
    return needed


def _source(node: fx.Node) -> fx.Node | None:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        # The items of a view that returns several tensors share its memory; those of other ops have their own.
        return node.args[0] if _source(node.args[0]) is not None else None
    schema = getattr(node.target, "_schema", None)
    shares = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return node.args[0] if shares else None


def _comes_from_outside(node: fx.Node) -> bool:
    """Whether the memory of a node belongs to the batch or to another segment."""
    return node.op == "placeholder" or node.target is operator.getitem


def _make_functional(node: fx.Node, target: fx.Node, roots: dict[fx.Node, fx.Node]) -> None:
    """Replace `op_(x, ...)` by `op(x, ...)`, and later uses of x by its result, if no view of x is used later."""
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
    overload: Any = getattr(packet, node.target._overloadname, None)  # type: ignore[union-attr]
    if overload is None or node.args[0] is not target or name == "copy_":
        return
    before, after = target.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.dtype != after.dtype:
        return
    position = {other: number for number, other in enumerate(node.graph.nodes)}
    sharing = [other for other, root in roots.items() if root is target and other is not target and other is not node]
    if any(position[user] > position[node] for other in sharing for user in other.users):
        return
    if any(other.dtype != before.dtype for other in _tensors(node)):
        return  # out of place, the op would promote to another dtype
    node.target = overload
    target.replace_all_uses_with(
        node, delete_user_cb=lambda user: user is not node and position.get(user, 0) > position[node]
    )


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    values = [argument.meta.get("val") for argument in node.all_input_nodes]
    return [value for value in values if isinstance(value, torch.Tensor) and value.dtype is not torch.bool]
