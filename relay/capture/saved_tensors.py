"""What a forward keeps for its backward, where the backward does not recompute it.

The cut is that of plain autograd: whatever the backward reads of the forward is kept, but for what is there anyway
(parameters, inputs, the segment's own outputs), what is only a view of something, and what parameters alone decide;
these are made anew. A dropout's mask is kept, as autograd keeps it. Invariant: a kept tensor comes back with the
strides it had, so that the backward's ops are those of eager autograd to the bit.

Which segments keep is not decided here.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from hal.ops.cost import is_view
from relay.capture.memory_order import order_in_memory


def nodes_to_save(
    graph: fx.Graph, forward: set[fx.Node], gradients: Sequence[fx.Node], seeds: set[fx.Node], states: set[fx.Node]
) -> list[fx.Node]:
    """The nodes of a joint graph to keep, in its order.

    `forward` are the nodes that the forward computes, `gradients` the backward's results, `seeds` and `states` the
    placeholders of seeds and of parameters and buffers.
    """
    from_seeds = set(seeds)
    from_states = set(states)  # and of nothing but them
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        sources = node.all_input_nodes
        if any(source in from_seeds for source in sources):
            from_seeds.add(node)
        elif all(source in from_states or source.op == "get_attr" for source in sources) and not _draws(node):
            from_states.add(node)
    saved: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    waiting = list(gradients)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op != "call_function" or node in from_states:
            continue
        # Of an op with several results, those that only the backward reads (statistics) are made by the forward too.
        maker = node.args[0] if node.target is operator.getitem else node
        computed = maker in forward and node not in from_seeds
        if computed and not _made_anew(node) and order_in_memory(node.meta["val"]) is not None:
            saved.add(node)
        else:
            waiting += node.all_input_nodes
    return [node for node in graph.nodes if node in saved]


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _made_anew(node: fx.Node) -> bool:
    """Whether it is a view of something else; an item of an op that makes several tensors is one of these."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    return is_view(node) or not isinstance(node.meta.get("val"), torch.Tensor)
