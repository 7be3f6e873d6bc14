"""Traces: what ran when, on which queue, as the devices measured it.

A trace holds events and reads their spans when they have ended; it measures nothing itself. `write` makes a file for
https://ui.perfetto.dev and chrome://tracing, with one track for each queue.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from hal.event import Event
from relay.checkpoint.atomic_file import write_whole


@dataclass(frozen=True)
class Span:
    """One call: `start` and `end` in seconds on the device's clock."""

    track: str
    label: str
    start: float
    end: float


class Trace:
    """The calls of some steps."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, str, Event]] = []

    def mark(self, track: str, label: str, event: Event) -> None:
        """Add a submitted call."""
        self._marks.append((track, label, event))

    def spans(self) -> list[Span]:
        """All calls that ended well, by start. Waits for those that have not ended."""
        spans = []
        for track, label, event in self._marks:
            try:
                event.wait()
            except Exception:  # the step reports the error; a trace shows what ran
                continue
            start, end = event.span()
            spans.append(Span(track, label, start, end))
        return sorted(spans, key=lambda span: span.start)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the spans as trace-event JSON, microseconds from the first start."""
        spans = self.spans()
        zero = spans[0].start if spans else 0.0
        tracks = {track: number for number, track in enumerate(dict.fromkeys(span.track for span in spans))}
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": track}}
            for track, number in tracks.items()
        ]
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": tracks[span.track],
                "name": span.label,
                "ts": (span.start - zero) * 1e6,
                "dur": (span.end - span.start) * 1e6,
            }
            for span in spans
        ]
        write_whole(os.fspath(path), json.dumps({"traceEvents": events}))
