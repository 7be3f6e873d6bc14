"""The virtual clock: when each submitted call would start and end on the hardware that is described.

It is a discrete-event simulation of a few serial lanes (downward link, upward link and compute of each device, and the
host) whose calls draw on shared rates (host memory, device memory, both directions of a link together). It runs no
numbers: that is `backends.simulator.orders`, which the clock never asks.

Invariant: the clock stands at the virtual time of the thread that submits. It moves only when that thread waits for
an event, and then no further than that event, so a call that is submitted later never starts in the past.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from backends.simulator.sharing import SharedRates, speeds
from hal.event import Event
from hal.spec.timeline import LANES, Span, Timeline

DOWN, UP, COMPUTE, HOST = range(4)


def lane_of(device: int, kind: int) -> int:
    """The lane of a device; there is one lane HOST for all of them."""
    return HOST if kind == HOST else len(LANES) * device + kind


@dataclass(frozen=True, slots=True, eq=False)
class Cost:
    """The cost of a call: `seconds` if it runs alone, and the bytes that it moves over each shared rate meanwhile.

    `launch` is the part of `seconds` that is neither arithmetic nor bytes; `flops` is only reported. `demand` is
    the bytes a second it wants of host memory, device memory and link. `again` gives what the same call costs on
    another machine, from the costs of that machine; None where it costs nothing anywhere. A cost that many calls have
    is made once for all of them: the clock remembers by it how calls share.
    """

    seconds: float = 0.0
    host_bytes: float = 0.0
    device_bytes: float = 0.0
    link_bytes: float = 0.0
    launch: float = 0.0
    flops: float = 0.0
    again: Callable[[Any], Cost] | None = None
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
    """A call: its start and end in virtual time, and, where numbers are computed, the calls that it must run after."""

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
        self.wait_list: list[SimulatedEvent] = []  # the events that it was submitted to wait for, until it has ended
        self.followers: list[SimulatedEvent] = []
        self.call: Callable[[], None] | None = None
        self.ran = False
        self.error: BaseException | None = None
        self.parents: Sequence[SimulatedEvent] = ()
        self.before: SimulatedEvent | None = None  # the call before it on its queue, whose errors do not affect it
        self.outside: Event | None = None  # the event of another device or thread that this event stands in for
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
            call = stack.pop()
            if not call.ran and call.number not in found:
                found[call.number] = call
                stack.extend(call.awaited())
        return list(found.values())


class Owner:
    """The machine that runs the calls: it completes an event when a caller waits for it."""

    def demand(self, event: SimulatedEvent) -> None:
        """Run the call, and advance the clock to its end."""
        raise NotImplementedError


class Account:
    """What one device has done so far: seconds by kind of lane, bytes, operations, spans, and its kernels in order."""

    def __init__(self) -> None:
        self.busy = [0.0] * len(LANES)
        self.stalled = [0.0] * len(LANES)
        self.bytes = [0.0] * len(LANES)
        self.device_bytes = 0.0
        self.launch = 0.0
        self.beside = 0.0
        self.beside_alone = 0.0
        self.flops = 0.0
        self.calls = 0
        self.spans: list[Span] = []
        self.kernels: deque[SimulatedEvent] = deque()


class Clock:
    """Virtual time of some devices on one host.

    Device `d` has the lanes `lane_of(d, DOWN)`, `lane_of(d, UP)` and `lane_of(d, COMPUTE)`; all share the lane HOST.
    `rates` are what calls share. With `shared_lane` host tasks run on the compute lane: a device that computes on the
    host's own cores.
    """

    def __init__(self, rates: SharedRates, shared_lane: bool) -> None:
        self.now = 0.0
        self.recording = False
        self._rates = rates
        self._shared_lane = shared_lane
        self._accounts = [Account() for _ in range(rates.devices)]
        lanes = len(LANES) * rates.devices
        self._ready: list[deque[SimulatedEvent]] = [deque() for _ in range(lanes)]
        self._active: list[SimulatedEvent | None] = [None] * lanes
        self._host_bytes = 0.0
        self._paces: dict[tuple[object, ...], list[float] | None] = {}

    def submit(self, event: SimulatedEvent, waits: Sequence[SimulatedEvent], pending: Sequence[SimulatedEvent]) -> None:
        """Take a call in, to start after the events of `waits`.

        `pending` are those of them that have not ended, or enough of those: when they have ended, all have.
        """
        if event.lane == HOST and self._shared_lane:
            event.lane = COMPUTE
        device, kind = divmod(event.lane, len(LANES))
        if kind == COMPUTE:
            self._accounts[device].kernels.append(event)
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
            active = [call for call in self._active if call is not None]
            pace = self._pace(active)
            if pace is None:
                ends = [call.left for call in active]
            else:
                ends = [call.left / speed for call, speed in zip(active, pace, strict=True)]
            passed = min(ends)
            for device, account in enumerate(self._accounts):
                self._count(account, device, passed, event)
            self.now += passed
            latest = passed * (1 + 1e-12)
            for number, call in enumerate(active):
                if ends[number] <= latest:
                    self._finish(call)
                else:
                    call.left -= passed if pace is None else passed * pace[number]

    def _pace(self, active: Sequence[SimulatedEvent]) -> list[float] | None:
        """The speed of each call; None where all are undisturbed. Calls of the same costs share alike every time."""
        costs: tuple[object, ...] = tuple([call.cost for call in active])
        if len(self._accounts) > 1:
            costs += tuple([call.lane for call in active])
        if costs not in self._paces:
            if len(self._paces) >= PACES:
                self._paces.clear()
            demands = [self._rates.demand(*divmod(call.lane, len(LANES)), call.cost.demand) for call in active]
            pace = speeds(demands, self._rates.rates)
            self._paces[costs] = None if all(speed == 1.0 for speed in pace) else pace
        return self._paces[costs]

    def run_out(self) -> None:
        """Let time pass until all calls have ended."""
        for lane in range(len(self._ready)):
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
                    call = ready.popleft()
                    call.start = self.now
                    active[lane] = call
                    if call.left <= 0.0:
                        self._finish(call)
                        again = True

    def _finish(self, call: SimulatedEvent) -> None:
        self._active[call.lane] = None
        call.end = self.now
        call.finished = True
        device, kind = divmod(call.lane, len(LANES))
        account, cost = self._accounts[device], call.cost
        if kind in (DOWN, UP):
            account.bytes[kind] += cost.link_bytes
        self._host_bytes += cost.host_bytes
        account.device_bytes += cost.device_bytes
        account.launch += cost.launch
        account.flops += cost.flops
        account.calls += 1
        if self.recording:
            moved = cost.link_bytes or cost.host_bytes
            account.spans.append(Span(LANES[kind], call.label, call.start, call.end, int(moved)))
        for follower in call.followers:
            follower.waits -= 1
            if follower.waits == 0:
                self._ready[follower.lane].append(follower)
        call.followers = []
        call.waits_for = ()
        call.wait_list = []

    def _count(self, account: Account, device: int, passed: float, target: SimulatedEvent) -> None:
        """Add time that has passed to a device's account. The host's lane counts for every device."""
        first = len(LANES) * device
        lanes = self._active[first], self._active[first + UP], self._active[first + COMPUTE], self._active[HOST]
        for kind, call in enumerate(lanes):
            if call is not None:
                account.busy[kind] += passed
        computes = lanes[COMPUTE] is not None
        if sum(call is not None for call in lanes) > computes:
            account.beside += passed
        if not computes:
            account.beside_alone += passed
            waiting = account.kernels
            while waiting and waiting[0].finished:
                waiting.popleft()
            account.stalled[self._holding_up(waiting[0] if waiting else target)] += passed

    def _holding_up(self, event: SimulatedEvent) -> int:
        """The kind of lane whose call an event waits for, directly or through others."""
        while event.waits:
            event = next(other for other in event.waits_for if not other.finished)
        return event.lane % len(LANES)

    def timeline(self, device: int = 0) -> Timeline:
        """The timeline of a device up to now. The host's lane and the traffic of its memory are those of all."""
        account = self._accounts[device]
        under_way = [call for call in self._active if call is not None] if self.recording else []
        own = [call for call in under_way if call.lane // len(LANES) == device]
        return Timeline(
            now=self.now,
            busy=dict(zip(LANES, account.busy, strict=True)),
            stalled=dict(zip(LANES, account.stalled, strict=True)),
            link_bytes={LANES[lane]: int(account.bytes[lane]) for lane in (DOWN, UP)},
            host_memory_bytes=int(self._host_bytes),
            device_memory_bytes=int(account.device_bytes),
            launch=account.launch,
            beside=account.beside,
            beside_alone=account.beside_alone,
            flops=account.flops,
            calls=account.calls,
            spans=tuple(account.spans),
            unfinished=tuple(Span(LANES[call.lane % len(LANES)], call.label, call.start, self.now, 0) for call in own),
        )
