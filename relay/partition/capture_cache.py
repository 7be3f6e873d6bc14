"""A cache of the captures of segments, so that layers built alike are traced once.

It captures nothing itself. Invariant: what `find` returns is what capturing the segment again would give.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx, nn

from relay.capture import Captured
from relay.capture.guards.code_guards import CodeGuards
from relay.capture.guards.code_walk import follow, reads_by_class
from relay.partition.find_blocks import same_structure, tie_pattern
from relay.partition.segments import Segment


class Captures:
    """Captures of segments, found again for segments of equal structure in any partition.

    With `keeps_traces` one trace also serves segments that differ in what they save. Traced graphs then stay in memory.
    """

    def __init__(self, limit: int = 512, keeps_traces: bool = False) -> None:
        self._limit = limit
        self._keeps_traces = keeps_traces
        self._known: list[tuple[Segment, Any, Any, CodeGuards, Captured]] = []

    def find(self, segment: Segment, traced: Any, cut: Any) -> Captured | None:
        """The capture that fits the segment, or None. `traced` is what a trace depends on, `cut` what is cut out."""
        if segment.alike is None:
            return None
        modes = _modes(segment.module)
        source: Captured | None = None
        for other, other_traced, other_cut, guards, captured in self._known:
            if (
                other_traced == traced
                and (other_cut == cut or captured.recut is not None)
                and _modes(other.module) == modes
                and other.alike[1:] == segment.alike[1:]
                and same_structure(other.alike[0], segment.alike[0], captured.reads)
                and tie_pattern(other.module) == tie_pattern(segment.module)
                and not guards.changed()  # it is as it was when it was captured
            ):
                if other_cut == cut:
                    return captured
                source = captured
        if source is None or source.recut is None:
            return None
        return self.add(segment, traced, cut, source.recut(segment.name, *cut))

    def add(self, segment: Segment, traced: Any, cut: Any, captured: Captured) -> Captured:
        """Store a capture, and return it. Beyond the limit the oldest is dropped."""
        if not self._keeps_traces:
            captured = replace(captured, recut=None)
        if segment.alike is not None and not captured.holds_tensors:
            guards = follow(segment.module, reads_by_class(segment.module, captured.reads or {}))
            self._known.append((segment, traced, cut, guards, captured))
            del self._known[: -self._limit]
        return captured

    def clear(self) -> None:
        """Drop all captures, and the layers that they were made from."""
        self._known.clear()


def _modes(module: nn.Module) -> Any:
    """What may change in a module after it was captured. Each graph has a class of its own: `alike` compares it."""
    return (
        tuple((fx.GraphModule if isinstance(m, fx.GraphModule) else type(m), m.training) for m in module.modules()),
        tuple((one.shape, one.dtype, one.requires_grad) for one in module.parameters()),
        tuple((one.shape, one.dtype) for one in module.buffers()),
    )
