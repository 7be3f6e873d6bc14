"""The order of a graph's ops: what only later ops read is computed late.

A backward that recomputes its forward first needs memory for all of it. Where the forward of one chunk is read by the
backward of that chunk alone, it can run shortly before. Invariant: the graph computes the same; only the order differs.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx


def late_order(graph: fx.Graph, seeds: Collection[fx.Node]) -> fx.Graph:
    """The graph with every op that depends on no seed moved to just before the first op that reads it.

    Ops that depend on a seed keep their order.
    """
    dependent = set(seeds)
    for node in graph.nodes:
        if any(source in dependent for source in node.all_input_nodes):
            dependent.add(node)
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copy(node: fx.Node) -> None:
        stack = [node]
        while stack:
            last = stack[-1]
            missing = [source for source in last.all_input_nodes if source not in copies]
            if last in copies:
                stack.pop()
            elif missing:
                stack.extend(reversed(missing))
            else:
                copies[last] = made.node_copy(last, copies.__getitem__)
                stack.pop()

    for node in graph.nodes:
        if node.op == "placeholder" or node in dependent or node.op == "output":
            copy(node)
    return made
