"""The tensors that a forward saves for a backward that recomputes nothing.

They are those that autograd would save: everything that the backward reads of the forward, except what is available
anyway (parameters, inputs, the segment's outputs), views, and what is computed from parameters alone; the last two are
recomputed. Masks of dropout are saved, as autograd does. Which segments save tensors is decided in `relay.runtime`.

Invariant: a saved tensor has the strides it had in the forward, so the ops of the backward are those of eager autograd,
to the bit.
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
    """The nodes of a joint graph whose results are saved, in its order.

    `forward` are the nodes that the forward computes, `gradients` the results of the backward, `seeds` and `states` the
    placeholders of seeds and of parameters and buffers.
    """
    from_seeds = set(seeds)
    from_states = set(states)  # and from nothing else
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
        # The forward also computes the results of its ops that only the backward reads (statistics).
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
    """Whether a node is recomputed: a view, or not a tensor. Items of an op that returns several tensors are not."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    return is_view(node) or not isinstance(node.meta.get("val"), torch.Tensor)
