"""The virtual clock: when each submitted call would start and end on the hardware that is described.

It is a discrete-event simulation of a few serial lanes (downward link, upward link, compute, host) whose calls draw
on shared rates (host memory, device memory, both directions of the link together). It runs no numbers: that is
`backends.simulator.orders`, which the clock never asks.

Invariant: the clock stands at the virtual time of the thread that submits. It moves only when that thread waits for
an event, and then no further than that event, so nothing submitted later can come too late to count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from backends.simulator.sharing import speeds
from hal.event import Event
from hal.spec.timeline import LANES, Span, Timeline

DOWN, UP, COMPUTE, HOST = range(4)


@dataclass(frozen=True, slots=True, eq=False)
class Cost:
    """What a call asks for: `seconds` were it alone, and the bytes it moves over each shared rate meanwhile.

    `launch` is the part of `seconds` that is neither arithmetic nor bytes; `flops` is told on, not used. `demand` is
    the bytes a second it wants of host memory, device memory and link. A cost that many calls have is made once for all
    of them: the clock remembers by it how calls share.
    """

    seconds: float = 0.0
    host_bytes: float = 0.0
    device_bytes: float = 0.0
    link_bytes: float = 0.0
    launch: float = 0.0
    flops: float = 0.0
    demand: tuple[float, float, float] = field(init=False)

    def __post_init__(self) -> None:
        seconds = self.seconds
        demand = (0.0, 0.0, 0.0)
        if seconds > 0:
            demand = self.host_bytes / seconds, self.device_bytes / seconds, self.link_bytes / seconds
        object.__setattr__(self, "demand", demand)


NOTHING = Cost()

PACES = 4096
"""So many combinations of costs are remembered with how they share."""


class SimulatedEvent(Event):
    """One call: its place in virtual time, and, where numbers are computed, its place among the calls to run."""

    __slots__ = (
        "before",
        "call",
        "cost",
        "dependents",
        "end",
        "error",
        "finished",
        "followers",
        "label",
        "lane",
        "left",
        "number",
        "outside",
        "owner",
        "parents",
        "queue",
        "ran",
        "start",
        "unrun",
        "wait_list",
        "waits",
        "waits_for",
    )

    def __init__(self, owner: Owner, number: int, lane: int, label: str, cost: Cost) -> None:
        self.owner = owner
        self.number = number
        self.queue = number  # of the first call on its queue
        self.lane = lane
        self.label = label
        self.cost = cost
        self.left = cost.seconds
        self.start = 0.0
        self.end = 0.0
        self.finished = False
        self.waits = 0
        self.waits_for: Sequence[SimulatedEvent] = ()
        self.wait_list: list[SimulatedEvent] = []  # what it was told to wait for, until it has ended
        self.followers: list[SimulatedEvent] = []
        self.call: Callable[[], None] | None = None
        self.ran = False
        self.error: BaseException | None = None
        self.parents: Sequence[SimulatedEvent] = ()
        self.before: SimulatedEvent | None = None  # on its queue; its errors are its own
        self.outside: Event | None = None  # of another device or of the host's, whose end this stands for
        self.dependents: list[SimulatedEvent] = []
        self.unrun = 0

    def done(self) -> bool:
        return self.finished and self.ran

    def wait(self) -> None:
        if not (self.finished and self.ran):
            self.owner.demand(self)
        if self.error is not None:
            raise self.error

    def span(self) -> tuple[float, float]:
        return self.start, self.end

    def awaited(self) -> list[SimulatedEvent]:
        """All that must have run before it."""
        return [*self.parents, *([] if self.before is None else [self.before])]

    def needed(self) -> list[SimulatedEvent]:
        """What has to run for it to have run, itself among them, in no order."""
        found: dict[int, SimulatedEvent] = {}
        stack = [self]
        while stack:
            one = stack.pop()
            if not one.ran and one.number not in found:
                found[one.number] = one
                stack.extend(one.awaited())
        return list(found.values())


class Owner:
    """Who brings an event about when somebody waits for it."""

    def demand(self, event: SimulatedEvent) -> None:
        """See that the call has run and that the clock has reached its end."""
        raise NotImplementedError


class Clock:
    """Virtual time. `rates` are bytes a second of host memory, device memory and the link's two directions together.

    With `one_lane` host tasks run on the compute lane: a device that computes on the host's own cores.
    """

    def __init__(self, rates: tuple[float, float, float], one_lane: bool) -> None:
        self.now = 0.0
        self.recording = False
        self._rates = rates
        self._one_lane = one_lane
        self._ready: list[deque[SimulatedEvent]] = [deque() for _ in LANES]
        self._active: list[SimulatedEvent | None] = [None] * len(LANES)
        self._next_compute: deque[SimulatedEvent] = deque()
        self._busy = [0.0] * len(LANES)
        self._stalled = [0.0] * len(LANES)
        self._bytes = [0.0] * len(LANES)
        self._host_bytes = 0.0
        self._device_bytes = 0.0
        self._launch = 0.0
        self._beside = 0.0
        self._beside_alone = 0.0
        self._flops = 0.0
        self._calls = 0
        self._spans: list[Span] = []
        self._paces: dict[tuple[Cost, ...], list[float] | None] = {}

    def submit(self, event: SimulatedEvent, waits: Sequence[SimulatedEvent], pending: Sequence[SimulatedEvent]) -> None:
        """Take a call in, to start after the events of `waits`.

        `pending` are enough of those that have not ended: when they have, all have.
        """
        if event.lane == HOST and self._one_lane:
            event.lane = COMPUTE
        if event.lane == COMPUTE:
            self._next_compute.append(event)
        if pending:
            event.waits = len(pending)
            event.waits_for = waits
            for other in pending:
                other.followers.append(event)
        else:
            self._ready[event.lane].append(event)

    def run_until(self, event: SimulatedEvent) -> None:
        """Let time pass until a call has ended."""
        while not event.finished:
            self._start()
            if event.finished:
                break
            active = [one for one in self._active if one is not None]
            pace = self._pace(active)
            if pace is None:
                ends = [one.left for one in active]
            else:
                ends = [one.left / speed for one, speed in zip(active, pace, strict=True)]
            passed = min(ends)
            self._account(active, passed, event)
            self.now += passed
            latest = passed * (1 + 1e-12)
            for number, one in enumerate(active):
                if ends[number] <= latest:
                    self._finish(one)
                else:
                    one.left -= passed if pace is None else passed * pace[number]

    def _pace(self, active: Sequence[SimulatedEvent]) -> list[float] | None:
        """The speed of each call; None where all are undisturbed. Calls of the same costs share alike every time."""
        costs = tuple([one.cost for one in active])
        if costs not in self._paces:
            if len(self._paces) >= PACES:
                self._paces.clear()
            pace = speeds([cost.demand for cost in costs], self._rates)
            self._paces[costs] = None if all(speed == 1.0 for speed in pace) else pace
        return self._paces[costs]

    def run_out(self) -> None:
        """Let time pass until all calls have ended."""
        for lane in range(len(LANES)):
            while self._ready[lane] or self._active[lane] is not None:
                self.run_until(self._active[lane] or self._ready[lane][-1])

    def _start(self) -> None:
        """Give free lanes their next calls; calls that take no time end at once and free others."""
        active = self._active
        again = True
        while again:
            again = False
            for lane, ready in enumerate(self._ready):
                while ready and active[lane] is None:
                    one = ready.popleft()
                    one.start = self.now
                    active[lane] = one
                    if one.left <= 0.0:
                        self._finish(one)
                        again = True

    def _finish(self, one: SimulatedEvent) -> None:
        self._active[one.lane] = None
        one.end = self.now
        one.finished = True
        cost = one.cost
        if one.lane in (DOWN, UP):
            self._bytes[one.lane] += cost.link_bytes
        self._host_bytes += cost.host_bytes
        self._device_bytes += cost.device_bytes
        self._launch += cost.launch
        self._flops += cost.flops
        self._calls += 1
        if self.recording:
            moved = cost.link_bytes or cost.host_bytes
            self._spans.append(Span(LANES[one.lane], one.label, one.start, one.end, int(moved)))
        for follower in one.followers:
            follower.waits -= 1
            if follower.waits == 0:
                self._ready[follower.lane].append(follower)
        one.followers = []
        one.waits_for = ()
        one.wait_list = []

    def _account(self, active: Sequence[SimulatedEvent], passed: float, target: SimulatedEvent) -> None:
        for one in active:
            self._busy[one.lane] += passed
        computes = self._active[COMPUTE] is not None
        if len(active) > computes:
            self._beside += passed
        if not computes:
            self._beside_alone += passed
            waiting = self._next_compute
            while waiting and waiting[0].finished:
                waiting.popleft()
            self._stalled[self._holding_up(waiting[0] if waiting else target)] += passed

    def _holding_up(self, event: SimulatedEvent) -> int:
        """The lane whose call an event waits for, directly or through others."""
        while event.waits:
            event = next(other for other in event.waits_for if not other.finished)
        return event.lane

    def timeline(self) -> Timeline:
        """What has been so far."""
        under_way = [one for one in self._active if one is not None] if self.recording else []
        return Timeline(
            now=self.now,
            busy=dict(zip(LANES, self._busy, strict=True)),
            stalled=dict(zip(LANES, self._stalled, strict=True)),
            link_bytes={LANES[lane]: int(self._bytes[lane]) for lane in (DOWN, UP)},
            host_memory_bytes=int(self._host_bytes),
            device_memory_bytes=int(self._device_bytes),
            launch=self._launch,
            beside=self._beside,
            beside_alone=self._beside_alone,
            flops=self._flops,
            calls=self._calls,
            spans=tuple(self._spans),
            unfinished=tuple(Span(LANES[one.lane], one.label, one.start, self.now, 0) for one in under_way),
        )
