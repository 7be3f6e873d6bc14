"""The cost of a graph (FLOPs, bytes moved, peak of temporaries), and its fingerprint.

Figures are computed from the shapes in the nodes' metadata, and nothing is run. Memory that libraries use inside a
kernel (packing buffers of a matrix product, scratch of fused attention) is not counted, but for the logits of a chunk
in a fused linear cross-entropy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import fx

from hal.ops.cost import is_view, scratch_of, tensors_of, work_of
from hal.program import Port


def _size(value: torch.Tensor) -> int:
    return value.numel() * value.dtype.itemsize


def count_flops(graph: fx.Graph) -> int:
    """The multiplications and additions of matrix products and attention."""
    works = [work_of(node) for node in graph.nodes]
    return int(sum(work.flops for work in works if work is not None))


def count_moved(graph: fx.Graph) -> int:
    """The bytes that all ops except views read and write."""
    total = 0
    for node in graph.nodes:
        if node.op == "call_function" and not is_view(node):
            total += sum(_size(value) for value in tensors_of(node))
            total += sum(_size(value) for argument in node.all_input_nodes for value in tensors_of(argument))
    return total


def peak_of_temporaries(graph: fx.Graph, stored_early: Sequence[int] = ()) -> int:
    """The largest number of bytes in use at once, if each tensor is freed after its last use. Views count with their
    base.

    Results stay in use to the end, since a device may hold them until then. Those with indices in `stored_early` do
    not: a device stores saved tensors as soon as they are computed.
    """
    owner = _owners(graph)
    last_use: dict[fx.Node, fx.Node] = {}
    node: fx.Node
    for node in graph.nodes:
        if owner[node] is node:
            last_use[node] = node
        arguments = node.all_input_nodes
        if node.op == "output" and stored_early:
            results: tuple[fx.Node, ...] = node.args[0]  # type: ignore[assignment]
            arguments = [result for index, result in enumerate(results) if index not in stored_early]
        for argument in arguments:
            base = owner[argument]
            if base is not None:
                last_use[base] = node
    ends: dict[fx.Node, list[fx.Node]] = {}
    for base, node in last_use.items():
        ends.setdefault(node, []).append(base)
    alive = peak = 0
    for node in graph.nodes:
        if owner[node] is node:
            alive += sum(_size(value) for value in tensors_of(node))
            peak = max(peak, alive + scratch_of(node))
        for base in ends.get(node, []):
            alive -= sum(_size(value) for value in tensors_of(base))
    return peak


def saved_bytes(graph: fx.Graph, forward: set[fx.Node], backward: set[fx.Node], states: set[fx.Node]) -> int:
    """The bytes that autograd saves: tensors of the forward that the backward reads, parameters and buffers excluded.

    `forward` and `backward` are the nodes that each of them computes, `states` the placeholders of parameters and
    buffers.
    """
    owner = _owners(graph)
    saved: set[fx.Node] = set()
    for node in forward:
        if any(user in backward and user not in forward for user in node.users):
            base = owner[node]
            if base is None:
                base = node
                while base.op == "call_function" and base.all_input_nodes:
                    base = base.all_input_nodes[0]
            if base not in states:
                saved.add(base)
    return sum(_size(value) for node in saved for value in tensors_of(node))


def _owners(graph: fx.Graph) -> dict[fx.Node, fx.Node | None]:
    """For each node, the node that made the memory of its result; None for the memory of an input."""
    owner: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            owner[node] = None
        elif is_view(node) and node.all_input_nodes:
            # The items of an op that returns several tensors count with the op.
            owner[node] = owner[node.all_input_nodes[0]]
        else:
            owner[node] = node
    return owner


def fingerprint(
    graph: fx.Graph, inputs: Sequence[Port], outputs: Sequence[Port], constants: dict[str, torch.Tensor]
) -> str:
    """A digest of a graph's ops, arguments, shapes and constants. Names do not count."""
    number = {node: position for position, node in enumerate(graph.nodes)}
    lines = [repr(tuple(inputs)), repr(tuple(outputs))]
    for node in graph.nodes:
        target = constants[node.target].tolist() if node.op == "get_attr" else str(node.target)
        if node.op == "placeholder":
            target = ""
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda argument: f"%{number[argument]}")
        lines.append(f"{node.op} {target} {arguments}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
