"""The speed of a simulated run on 1, 2, 4, ... hosts that share out the batch, and what binds it at each number.

One host's step is simulated with the real schedule. To its timeline this module adds what `relay.distributed` does with
n hosts, in its order: the gradients of a segment go to their owners as they arrive, each owner updates 1/n of the
segment, and the new weights go to all hosts, one segment behind. Each host has the same number of sequences for any n.

It is a model, not the schedule itself. Messages are sent one after another; a host sends and receives at the full rate
of its network, whatever the others do; gradients arrive as on one host, which is late where one host's optimizer binds.

Invariant: with one host the figures are those of the simulated step, with no factor for the software.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hal.spec.units import parse_size
from relay.simulation.figures import SimulationFigures
from relay.simulation.simulate import Simulation, options_of, simulate
from relay.simulation.simulated_step import UNLIMITED

MESSAGE_SECONDS = 20e-6
"""Seconds a message takes beside its bytes, for each other host: an assumption for TCP."""

GAIN = 1.5
"""More hosts no longer pay where twice as many give less than this times the speed."""

OWNED = ("weight remainders", "first moments", "second moments")
"""States in the ledger of the host of which each host keeps its own part."""

GRADIENT_COPIES, WEIGHT_COPIES = 5, 3
"""How often an exchange reads or writes a byte in host memory. Gradients: packed (2), sent, received, summed. Weights:
received, and copied to the store (2)."""

_UPDATE = "update of "


@dataclass(frozen=True)
class HostsPoint:
    """A run on a number of hosts.

    `binds` is the busiest resource of one host, or, where the exchange between hosts is busy for longer, the largest
    part of that: the network's bytes, the messages beside their bytes, or host memory. `memory` is the bytes that each
    host needs, and `fits` whether it has them.
    """

    hosts: int
    step_seconds: float
    tokens_per_second: float
    efficiency: float
    binds: str
    network_bytes: float
    memory: int
    fits: bool


@dataclass(frozen=True)
class ScalingCurve:
    """The points of 1, 2, 4, ... hosts, the last number included.

    `pays_until` is the largest number of hosts up to which every doubling gives at least `GAIN` times the speed.
    """

    points: tuple[HostsPoint, ...]
    pays_until: int


@dataclass(frozen=True)
class _Segment:
    """A segment's gradients on one host: when they have arrived, its update's seconds, and its parameters."""

    arrives: float
    update_seconds: float
    parameters: float


def scaling_curve(
    found: SimulationFigures,
    hosts: int,
    network: float,
    host_memory: int,
    message_seconds: float = MESSAGE_SECONDS,
) -> ScalingCurve:
    """The curve of a simulated run, which must have been recorded, up to a number of hosts.

    Arguments:
        found: One host's step, simulated with `record=True`.
        hosts: The largest number of hosts.
        network: Bytes a second that a host sends, and receives at the same time.
        host_memory: Bytes that each host has.
        message_seconds: Seconds a message takes beside its bytes.

    Raises ValueError for runs whose updates wait for the end of the step.
    """
    if found.run.defers_updates:
        raise ValueError(
            "Several hosts are simulated with updates as gradients arrive, and with clipping or a dynamic loss scale "
            "updates wait for the whole step. Leave clip_grad_norm out, and give a fixed loss scale with fp16."
        )
    segments = _segments(found)
    if not segments:
        raise ValueError("The curve needs a recorded step with updates: simulate with record=True.")
    points = tuple(_point(found, segments, n, network, host_memory, message_seconds) for n in _numbers(hosts))
    pays = points[0].hosts
    for before, after in pairwise(points):
        if after.tokens_per_second < before.tokens_per_second * GAIN ** (after.hosts / before.hosts - 1):
            break
        pays = after.hosts
    return ScalingCurve(points, pays)


def simulate_hosts(
    model: Any = None,
    *,
    hosts: int,
    network: float,
    host_memory: int | str | None = None,
    message_seconds: float = MESSAGE_SECONDS,
    **options: Any,
) -> tuple[Simulation, ScalingCurve]:
    """One host's step and the curve up to a number of hosts. `options` are those of `relay.simulate`.

    The step is simulated whatever the memory of the host is; each point of the curve tells whether it fits. Raises
    DoesNotFit where a device lacks memory, for no number of hosts changes that.
    """
    found = simulate(model, host_memory=UNLIMITED, record=True, **options)
    memory = int(found.machine.host["memory"]) if host_memory is None else parse_size(host_memory)
    return found, scaling_curve(found, hosts, network, memory, message_seconds)


def curve_of(
    planned: Simulation, hosts: int, network: float, host_memory: int | str | None, capacity: int | str | None
) -> ScalingCurve:
    """The curve of a run that was simulated without a record, such as a plan's. The arguments are as elsewhere here."""
    _, curve = simulate_hosts(
        planned.shape,
        hosts=hosts,
        network=network,
        host_memory=host_memory,
        capacity=capacity,
        **options_of(planned),
    )
    return curve


def as_json(curve: ScalingCurve) -> dict[str, Any]:
    """Every figure by name, in SI units."""
    return {"hosts": [asdict(point) for point in curve.points], "pays_until": curve.pays_until}


def as_text(curve: ScalingCurve) -> str:
    """The curve as a table, and where it stops paying."""
    lines = ["hosts   tokens/s        efficiency  step (s)   memory a host   binds"]
    for point in curve.points:
        memory = f"{point.memory / 1e9:,.0f} GB" + ("" if point.fits else " (too much)")
        lines.append(
            f"{point.hosts:<7} {point.tokens_per_second:<15,.0f} {point.efficiency:<11.2f} {point.step_seconds:<10.3f} "
            f"{memory:<15} {point.binds}"
        )
    last = curve.points[-1].hosts
    if curve.pays_until == last:
        lines.append(f"Every doubling up to {last} hosts gives at least {GAIN} times the speed.")
    else:
        lines.append(f"It stops paying after {curve.pays_until} hosts: twice as many give less than {GAIN} times.")
    if not any(point.fits for point in curve.points):
        lines.append("No number of hosts has the memory.")
    lines.append("These are the times of the simulated step, with no factor for the software and no range.")
    return "\n".join(lines)


def _numbers(hosts: int) -> Iterator[int]:
    number = 1
    while number < hosts:
        yield number
        number *= 2
    yield hosts


def _segments(found: SimulationFigures) -> Sequence[_Segment]:
    """The segments in the order of their updates. Parameters are shared out by the bytes that the updates move."""
    spans = [span for span in found.timeline.spans if span.lane == "host" and span.label.startswith(_UPDATE)]
    moved = sum(span.moved for span in spans)
    return [
        _Segment(span.start, span.end - span.start, found.memory.parameters * span.moved / moved)
        for span in sorted(spans, key=lambda span: span.start)
    ]


def _point(
    found: SimulationFigures,
    segments: Sequence[_Segment],
    hosts: int,
    network: float,
    host_memory: int,
    message_seconds: float,
) -> HostsPoint:
    share, others = (hosts - 1) / hosts, hosts - 1
    width = 4 if found.run.precision == "fp32" or found.run.master_weights == "fp32" else 2
    memory_rate = found.machine.host["bandwidth_achieved"]
    wire = {size: [one.parameters * size * share / network for one in segments] for size in (4, width)}
    waits = others * message_seconds
    copies = [
        [one.parameters * size * times / memory_rate for one in segments]
        for size, times in ((4, GRADIENT_COPIES), (width, WEIGHT_COPIES))
    ]
    end = found.step_seconds
    if hosts > 1:
        gradients = [wire[4][index] + waits + copies[0][index] for index in range(len(segments))]
        weights = [wire[width][index] + waits + copies[1][index] for index in range(len(segments))]
        end = max(_computed(found), _exchanged(segments, gradients, weights, hosts))
    exchange = {
        "network": sum(map(sum, (wire[4], wire[width]))),
        "messages": 2 * waits * len(segments),
        "host memory": sum(map(sum, copies)),
    }
    exchanging = hosts > 1 and sum(exchange.values()) > found.lower_bound
    ledger = found.memory.host
    owned = sum(size for state, _, size in ledger if state in OWNED)
    largest = max(one.parameters for one in segments)
    transit = 2 * 4 * largest * (1 + share) + width * largest if hosts > 1 else 0
    needed = round(found.memory.host_total - owned * share + transit)
    speed = hosts * found.run.tokens / end
    return HostsPoint(
        hosts,
        end,
        speed,
        speed / (hosts * found.tokens_per_second),
        max(exchange, key=lambda name: exchange[name]) if exchanging else found.bottleneck,
        sum(one.parameters for one in segments) * (4 + width) * share,
        needed,
        needed <= host_memory,
    )


def _exchanged(segments: Sequence[_Segment], gradients: Sequence[float], weights: Sequence[float], hosts: int) -> float:
    """When the last weights have arrived, if each segment's gradients and weights take those seconds to exchange."""
    free = updated = 0.0
    summed: list[float] = []
    for index, one in enumerate((*segments, None)):
        if one is not None:
            free = max(free, one.arrives) + gradients[index]
            summed.append(free)
        if index:
            updated = max(updated, summed[index - 1]) + segments[index - 1].update_seconds / hosts
            free = max(free, updated) + weights[index - 1]
    return free


def _computed(found: SimulationFigures) -> float:
    """When the devices of one host have computed everything."""
    assert found.step is not None
    return max(span.end for each in found.step.timelines for span in each.spans if span.lane == "compute")
