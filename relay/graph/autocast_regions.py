"""What a model computes under an autocast of its own, outside of its layers.

A trace has the ops below autocast's casts, and calls that enter and leave a region. Cut into segments, the calls would
be separated from the ops. So each op notes its regions, and a graph made of such ops enters them again. Nothing is
computed here. Invariant: an op runs under the autocast that it was traced under.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

REGIONS = "autocast"
"""The key of a node's metadata: (device type, dtype, enabled, cache) of each region around it, outermost first."""


def note_regions(graph: fx.Graph) -> None:
    """Note of each op of a new trace which regions it is in, and remove the calls that enter and leave them."""
    around: dict[fx.Node, tuple[Any, ...]] = {}
    calls: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is _enter_autocast:
            around[node] = node.args
            calls.append(node)
        elif node.target is _exit_autocast:
            around.pop(node.args[0], None)
            calls.append(node)
        elif around and node.op == "call_function":
            node.meta[REGIONS] = tuple(around.values())
    for node in reversed(calls):
        graph.erase_node(node)


def regions_of(node: fx.Node) -> tuple[tuple[Any, ...], ...]:
    """The regions that an op is in."""
    return tuple(node.meta.get(REGIONS, ()))


def enter_regions(graph: fx.Graph) -> None:
    """Have a graph of such ops, still without output, enter and leave their regions."""
    within: tuple[tuple[Any, ...], ...] = ()
    entered: list[fx.Node] = []

    def leave() -> None:
        while entered:
            graph.call_function(leave_autocast, (entered.pop(),))

    for node in [node for node in graph.nodes if node.op == "call_function"]:
        regions = regions_of(node)
        if regions == within:
            continue
        with graph.inserting_before(node):
            leave()
            entered += [graph.call_function(enter_autocast, region) for region in regions]
        within = regions
    leave()


def enter_autocast(device_type: str, dtype: torch.dtype, enabled: bool, cache: bool) -> contextlib.ExitStack:
    """Enter a region. One that a trace on the CPU entered for the CPU is for the accelerator that runs it too."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kinds = {device_type, accelerator.type} if device_type == "cpu" and accelerator is not None else {device_type}
    stack = contextlib.ExitStack()
    for kind in sorted(kinds):
        if kind == "cpu" or accelerator is not None:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
    return stack


def leave_autocast(stack: contextlib.ExitStack) -> None:
    """Leave a region."""
    stack.close()
