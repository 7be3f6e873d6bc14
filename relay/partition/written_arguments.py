"""Layers that write to the tensors that they are given, such as one that begins with `nn.ReLU(inplace=True)`.

A layer's recompute needs what it was given, so it gets a copy to write to, and what it computes is the same. The model
must not read that memory after the call, as it would find the old numbers. Nothing is traced here. Invariant: a model
that reads what a layer wrote to its arguments is refused by name.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import fx

from relay.capture import BlockCall
from relay.errors import PartitionError
from relay.graph.mutations import memory_roots


def copied(tensors: Sequence[torch.Tensor], written: Container[int]) -> tuple[torch.Tensor, ...]:
    """The tensors, with copies of those whose numbers are `written`."""
    return tuple(tensor.clone() if number in written else tensor for number, tensor in enumerate(tensors))


def written_elsewhere(layer: str) -> PartitionError:
    """The error for a layer that writes to memory that is read elsewhere."""
    return PartitionError(
        f"layer {layer!r} changes one of its inputs in place, and the model reads the same memory elsewhere: after the "
        "call, or through another tensor. Layers get copies of their inputs, so it would find the old numbers. Clone "
        "the input in the layer before it is changed (value = value.clone()), or return it."
    )


def refuse_written_and_read(blocks: Sequence[fx.Node], calls: Sequence[BlockCall], states: Container[fx.Node]) -> None:
    """Raise PartitionError if a model reads what a block wrote to its arguments.

    `blocks` are the nodes of the calls, in the model's order; `states` the placeholders of parameters and buffers.
    """
    if not any(call.memory.writes for call in calls):
        return
    graph = blocks[0].graph
    roots = memory_roots(graph)
    position = {node: number for number, node in enumerate(graph.nodes)}
    for block, call in zip(blocks, calls, strict=True):
        for number in call.memory.writes:
            written: fx.Node = block.args[1][number]  # type: ignore[index,assignment]
            root = roots[written]
            same = [node for node in graph.nodes if roots[node] is root]
            later = any(position[user] > position[block] for node in same for user in node.users)
            beside = any(node is not written and block in node.users for node in same)
            if root in states or later or beside or _handed_on(root, block, blocks, calls, roots):
                raise written_elsewhere(call.name)


def _handed_on(
    root: fx.Node,
    block: fx.Node,
    blocks: Sequence[fx.Node],
    calls: Sequence[BlockCall],
    roots: dict[fx.Node, fx.Node],
) -> bool:
    """Whether a block before `block` that made or took this memory returned it in another tensor."""
    for other, call in zip(blocks, calls, strict=True):
        if other is block:
            return False
        made = root.op == "call_function" and root.args[:1] == (other,)
        took = any(roots[node] is root for node in other.all_input_nodes)
        if (made and (call.memory.shares_others or call.memory.shares_arguments)) or (
            took and call.memory.shares_arguments
        ):
            return True
    return False
