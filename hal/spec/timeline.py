"""Devices whose time is virtual: what a simulator offers beyond a device.

Time and traffic are reported by `Timeline`, and a described machine is opened by `VirtualBackend`. Nothing is
modelled here. Invariant of a timeline: the seconds in which compute was busy and those in which it waited for each
lane add up to the time that passed while a caller waited.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hal.device import Backend, Device
from hal.spec import Machine

LANES = ("down", "up", "compute", "host")
"""The serial resources: the link to the device, the link from it, the device's compute, the host's tasks."""


@dataclass(frozen=True)
class Span:
    """One call on a lane, in virtual seconds; `moved` is the bytes it moved over the link or in host memory."""

    lane: str
    label: str
    start: float
    end: float
    moved: int


@dataclass(frozen=True)
class Timeline:
    """What a virtual device has done since it was opened. Times in seconds, traffic in bytes.

    `busy` is by lane. `stalled` is the time in which compute waited, by the lane that it waited for. `launch` is
    the part of the compute lane's busy time that is neither arithmetic nor bytes. `beside` is the time in which any
    lane but compute's was busy, and `beside_alone` the part of it in which compute was not. `spans`, where recorded,
    are of calls that have ended and `unfinished` of those under way, up to now, with no bytes yet.
    """

    now: float
    busy: dict[str, float]
    stalled: dict[str, float]
    link_bytes: dict[str, int]
    host_memory_bytes: int
    device_memory_bytes: int
    launch: float
    beside: float
    beside_alone: float
    flops: float
    calls: int
    spans: tuple[Span, ...] = field(repr=False)
    unfinished: tuple[Span, ...] = field(repr=False)

    def since(self, earlier: Timeline) -> Timeline:
        """What has happened between two timelines of one device. Its time, that of its spans too, begins at 0 with the
        earlier one; what was under way then is there from 0 on."""

        def minus(now: dict[str, float], then: dict[str, float]) -> dict[str, float]:
            return {key: value - then[key] for key, value in now.items()}

        began = earlier.now

        def cut(spans: tuple[Span, ...]) -> tuple[Span, ...]:
            return tuple(replace(span, start=max(span.start - began, 0.0), end=span.end - began) for span in spans)

        return Timeline(
            self.now - began,
            minus(self.busy, earlier.busy),
            minus(self.stalled, earlier.stalled),
            {key: value - earlier.link_bytes[key] for key, value in self.link_bytes.items()},
            self.host_memory_bytes - earlier.host_memory_bytes,
            self.device_memory_bytes - earlier.device_memory_bytes,
            self.launch - earlier.launch,
            self.beside - earlier.beside,
            self.beside_alone - earlier.beside_alone,
            self.flops - earlier.flops,
            self.calls - earlier.calls,
            cut(self.spans[len(earlier.spans) :]),
            cut(self.unfinished),
        )


def joined(timelines: Sequence[Timeline]) -> Timeline:
    """The timeline of several devices together: the mean of their seconds, and the sum of what they have done.

    The traffic of the host's memory is every device's already. Spans are those of the first.
    """
    count, first = len(timelines), timelines[0]
    if count == 1:
        return first

    def mean(seconds: Sequence[dict[str, float]]) -> dict[str, float]:
        return {lane: sum(each[lane] for each in seconds) / count for lane in first.busy}

    return replace(
        first,
        busy=mean([each.busy for each in timelines]),
        stalled=mean([each.stalled for each in timelines]),
        link_bytes={lane: sum(each.link_bytes[lane] for each in timelines) for lane in first.link_bytes},
        device_memory_bytes=sum(each.device_memory_bytes for each in timelines),
        launch=sum(each.launch for each in timelines) / count,
        beside=sum(each.beside for each in timelines) / count,
        beside_alone=sum(each.beside_alone for each in timelines) / count,
        flops=sum(each.flops for each in timelines),
        calls=sum(each.calls for each in timelines),
    )


class VirtualDevice(Device):
    """A device on a virtual clock."""

    machine: Machine

    @abc.abstractmethod
    def timeline(self) -> Timeline:
        """What has happened so far."""

    @abc.abstractmethod
    def record(self) -> None:
        """Keep a span of every call from now on."""

    @abc.abstractmethod
    def keep_calls(self) -> None:
        """Keep the calls of all devices on this clock and what is waited for, for `retimed`. Before the first."""

    @abc.abstractmethod
    def mark(self) -> None:
        """Name this moment among the calls that are kept."""

    @abc.abstractmethod
    def retimed(self, machines: Sequence[Machine], one_link: bool = False) -> list[float]:
        """The virtual times of the marks, in seconds, if the devices on this clock were these machines.

        The calls and what they wait for stay as they were submitted. They are timed again, and nothing else runs.
        """


class VirtualBackend(Backend):
    """A backend that opens machines from their description."""

    @abc.abstractmethod
    def open_together(self, selectors: Sequence[str], capacity: int | None = None) -> list[VirtualDevice]:
        """Open devices on one host, that of the first one, and on one clock. See `open`."""

    @abc.abstractmethod
    def open_machines(
        self, machines: Sequence[Machine], numerics: bool = True, one_link: bool = False
    ) -> list[VirtualDevice]:
        """Open described machines as devices on one host, that of the first one, and on one clock.

        Without `numerics` nothing is computed and nothing is allocated. With `one_link` all are behind the link of the
        first one; else each has a link of its own.
        """
