"""What a run would need and cost on hardware that is not here: fits, how fast, how many joules, what to change.

The figures come from the real schedule on a virtual clock (`relay.simulation.simulated_step`); this file asks it the
right questions and says what the answers mean. It prints nothing: that is `relay.simulation.report`.

Every figure rests on the machine's description: specification sheets, presets, or a calibration. Energy is a range,
because board power says little about the power drawn (published comparisons are 27 to 37 % off).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from inspect import signature
from typing import Any

import torch
from torch import nn

from hal.spec import Machine, SpecError, machine
from hal.spec.timeline import Timeline
from hal.spec.units import parse_size
from relay.errors import RelayError
from relay.options import refuse_unknown
from relay.runtime.grad_mode import as_if_alone
from relay.simulation.describe import describe
from relay.simulation.energy import joules, joules_waiting
from relay.simulation.host_cache import HostSides
from relay.simulation.meta_model import MetaModel
from relay.simulation.shortfall import shortfalls, suggestions
from relay.simulation.simulated_step import Memory, RunShape, SimulatedRun, Step
from relay.simulation.transformer_shape import VOCABULARY, ModelShape, ShapeError

ENERGY_ERROR = 0.37
"""Energy from board power is off by up to this share, either way."""

SENSITIVE = {
    "device compute": ("device", ("achieved_fp32", "achieved_fp16", "achieved_bf16")),
    "device memory bandwidth": ("device", ("bandwidth_achieved",)),
    "link down": ("link", ("down", "both")),
    "link up": ("link", ("up", "both")),
    "host memory bandwidth": ("host", ("bandwidth_achieved", "optimizer_bandwidth")),
}
"""What `sensitivity` makes ten per cent faster, one at a time; last of all it takes a tenth off `LAUNCH`."""

LAUNCH = ("launch", "call")
"""Seconds of the device for each op and each program that are neither arithmetic nor bytes."""

FEWER_LAUNCHES = (
    "launch (fewer, larger micro-batches launch less often; so does software that joins ops into one kernel, of which "
    "--software counts the traffic it saves and not the launches)"
)

_LABELS = {"compute": "compute", "down": "link down", "up": "link up", "host": "host optimizer"}


class DoesNotFit(RelayError):
    """The run does not fit. `simulation` holds both ledgers, `suggestions` what would fit.

    What to do: one of the suggestions, or more memory.
    """

    def __init__(self, message: str, simulation: Simulation) -> None:
        super().__init__(message)
        self.simulation = simulation


@dataclass(frozen=True, repr=False)
class Simulation:
    """The answer. Bytes, seconds, joules; `waterfall` adds up to `step_seconds`. As a string it is the report.

    `run` is what runs: as many micro-batches as the batch is cut into, no more layers a slot than there are. `notes`
    say what was guessed of the model. Where it does not fit, `step` is None, every figure that needs it is too, and
    `shortfalls` says why.
    """

    shape: ModelShape | MetaModel
    run: RunShape
    machine: Machine
    memory: Memory
    device_capacity: int
    host_capacity: int
    shortfalls: tuple[str, ...]
    suggestions: tuple[str, ...]
    step: Step | None
    sensitivity: dict[str, float]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        from relay.simulation.report import as_text

        return as_text(self, None)

    def __repr__(self) -> str:
        speed = f"{self.tokens_per_second:,.1f} tokens/s" if self.fits else "does not fit"
        return f"<Simulation of {self.shape.title} on {self.machine.device.title}: {speed}>"

    @property
    def fits(self) -> bool:
        """Whether it fits on device and host."""
        return not self.shortfalls

    @property
    def timeline(self) -> Timeline:
        """The step in virtual time. RelayError where it does not fit."""
        if self.step is None:
            raise RelayError("A run that does not fit has no step: " + " ".join(self.shortfalls))
        return self.step.timeline

    @property
    def step_seconds(self) -> float:
        """Seconds of one training step."""
        return self.timeline.now

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second."""
        return self.run.tokens / self.step_seconds

    @property
    def waterfall(self) -> dict[str, float]:
        """Where the step's seconds go: compute, launches, and what compute waited for."""
        timeline = self.timeline
        stalled = timeline.stalled
        return {
            "compute": timeline.busy["compute"] - timeline.launch,
            "launch": timeline.launch,
            "exposed down": stalled["down"],
            "exposed up": stalled["up"],
            "exposed optimizer": stalled["host"],
            "other": stalled["compute"],
        }

    @property
    def lower_bound(self) -> float:
        """The busiest resource's seconds: no schedule is faster."""
        return max(self.timeline.busy.values())

    @property
    def overlap_efficiency(self) -> float:
        """The lower bound over the step."""
        return self.lower_bound / self.step_seconds

    @property
    def bottleneck(self) -> str:
        """The busiest resource; "launch" where compute is and launches are the larger part of it."""
        busy = self.timeline.busy
        busiest = max(busy, key=lambda lane: busy[lane])
        return "launch" if busiest == "compute" and self.timeline.launch > busy["compute"] / 2 else _LABELS[busiest]

    @property
    def peak_flops(self) -> float:
        """The device's dense peak in the run's precision, or what it achieves where no peak is known."""
        device, precision = self.machine.device, self.run.precision
        return device[f"peak_{precision}"] if device.has(f"peak_{precision}") else device.sustained(precision)

    @property
    def mfu(self) -> float:
        """Model FLOPs (recompute not counted) over the dense peak."""
        done = self.shape.model_flops(self.run.sequence) * self.run.tokens
        return done / self.step_seconds / self.peak_flops

    @property
    def hardware_utilisation(self) -> float:
        """FLOPs that are done, recompute included, over the dense peak."""
        return self.timeline.flops / self.step_seconds / self.peak_flops

    @property
    def joules_per_token(self) -> tuple[float, float, float]:
        """Low, middle and high estimate, by the model of power in `relay.simulation.energy`."""
        middle = joules(self.machine, self.timeline) / self.run.tokens
        return middle * (1 - ENERGY_ERROR), middle, middle * (1 + ENERGY_ERROR)

    @property
    def flops_per_watt(self) -> float:
        """Model FLOP/s for each watt of device and host."""
        return self.shape.model_flops(self.run.sequence) / self.joules_per_token[1]

    @property
    def wasted_energy(self) -> float:
        """The share of energy spent while compute stood still."""
        return joules_waiting(self.machine, self.timeline) / joules(self.machine, self.timeline)

    @property
    def break_even(self) -> dict[str, float]:
        """Tokens a layer visit from which each kind of work hides behind compute (closed forms, one middle layer).

        forward: b R / 2H; backward with recompute: the larger of loads and gradients, b R / 6H; optimizer: C R / 6.
        """
        rate = self.machine.device.sustained(self.run.precision)
        link = self.machine.link
        width = 4 if self.run.precision == "fp32" else 2
        assert self.step is not None
        optimizer = self.timeline.busy["host"] / self.memory.parameters
        return {
            "forward": width * rate / (2 * link["down"]),
            "backward": max(width / link["down"], 4 / link["up"]) * rate / 6,
            "optimizer": optimizer * rate / 6,
        }

    def days(self, tokens: float) -> float:
        """Days for that many tokens."""
        return tokens / self.tokens_per_second / 86400

    def kilowatt_hours(self, tokens: float) -> tuple[float, float, float]:
        """kWh for that many tokens: low, middle, high."""
        low, middle, high = (joules * tokens / 3.6e6 for joules in self.joules_per_token)
        return low, middle, high


def default_precision(described: Machine) -> str:
    """bf16 where the device has it, else fp16, else fp32."""
    device = described.device
    return next(kind for kind in ("bf16", "fp16", "fp32") if device.computes(kind))


@as_if_alone()
def simulate(
    model: str | ModelShape | MetaModel | nn.Module | None = None,
    *,
    example: Mapping[str, torch.Tensor] | None = None,
    config: str | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    vocabulary: int = VOCABULARY,
    ffn: int = 0,
    tied: bool | None = None,
    device: str | Machine = "generic",
    link: str | None = None,
    host: str | None = None,
    software: str = "eager",
    host_memory: int | str | None = None,
    capacity: int | str | None = None,
    sensitivity: bool = False,
    record: bool = False,
    precision: str | None = None,
    must_fit: bool | None = True,
    sides: HostSides | None = None,
    **run: Any,
) -> Simulation:
    """Simulate one training step.

    The model is a name, a `config.json`, numbers (as `describe` takes them), or an `nn.Module` (on torch's meta device
    it takes no memory) with an `example` of a step's batch. `device`, `link` and `host` are presets or TOML files (or
    one `Machine`); `host_memory` and `capacity` (of the device) are bytes, or such as "512GB". `run` takes `sequence`,
    `batch`, `microbatches` (one a sequence where it is not given), `state_dtype`, `stash`, `slots`, `layers_per_slot`,
    `recompute`, `clip_grad_norm`, `loss_scale` and `optimizer`, as `RunShape` has them. `sides` saves time where one
    model is simulated often.

    Raises DoesNotFit, with ledgers and what would fit, unless `must_fit` is False (or None, which does not look for
    what would fit either); SpecError for arithmetic that the device does not have; ShapeError for a model or batch
    that cannot be; ValueError for an option that the trainer would refuse too; TypeError for one that is not known.
    """
    refuse_unknown("simulate", run, _KEYWORDS)
    if isinstance(model, nn.Module):
        if example is None:
            raise ShapeError("A module needs an example= of a step's batch, for its shapes.")
        model = MetaModel(model, example)
        run = {"batch": model.sequences, "sequence": model.sequence, **run}
    meant = describe(model, config, layers, hidden, heads, vocabulary, ffn, tied)
    shape = meant.shape
    described = device if isinstance(device, Machine) else machine(device, link, host, software)
    run.setdefault("microbatches", run.get("batch", RunShape.batch))
    wanted = RunShape(precision=precision or default_precision(described), **run)
    check_precision(described, wanted.precision)
    limits = _capacities(described, capacity, host_memory)
    sides = HostSides() if sides is None else sides
    prepared = SimulatedRun(shape, wanted, described, sides)
    wanted = prepared.run
    memory = prepared.memory()
    missing = shortfalls(memory, *limits, described.device.unified)
    step: Step | None = None
    if not missing:
        if record:
            prepared.record()
        step = prepared.step()
    prepared.close()
    seeks = bool(missing) and must_fit is not None
    would_fit = suggestions(shape, wanted, described, *limits, sides) if seeks else ()
    gains: dict[str, float] = {}
    if step is not None and sensitivity:
        gains = _sensitivity(shape, wanted, described, step.timeline.now, sides)
    notes = meant.notes_at(wanted.sequence)
    result = Simulation(shape, wanted, described, memory, *limits, missing, would_fit, step, gains, notes)
    if missing and must_fit:
        advice = f" What would fit: {'; '.join(would_fit)}." if would_fit else " No smaller setting fits either."
        raise DoesNotFit(" ".join(missing) + advice, result)
    return result


def check_precision(described: Machine, precision: str) -> None:
    """Raise SpecError where the device has no arithmetic of that precision."""
    device = described.device
    if not device.computes(precision):
        here = ", ".join(kind for kind in ("fp32", "fp16", "bf16") if device.computes(kind))
        notes = f" {device.notes}" if device.notes else ""
        raise SpecError(f"{device.title} does not compute in {precision}; it has {here}.{notes} Choose one of these.")


def _capacities(
    described: Machine, capacity: int | str | None, host_memory: int | str | None
) -> tuple[int, int]:
    device, host = described.device, described.host
    usable = int(device["memory"] - device["reserved"])
    limit = usable if capacity is None else min(parse_size(capacity), usable)
    return limit, int(host["memory"]) if host_memory is None else parse_size(host_memory)


def _sensitivity(
    shape: ModelShape | MetaModel, run: RunShape, described: Machine, seconds: float, sides: HostSides
) -> dict[str, float]:
    """By how much the step shortens when one figure gets better by ten per cent, as a share of the step."""
    gains = {}
    for label, better in _improved(described):
        faster = SimulatedRun(shape, run, better, sides)
        gains[label] = 1 - faster.step().timeline.now / seconds
        faster.close()
    return gains


def _improved(described: Machine) -> Iterator[tuple[str, Machine]]:
    for label, (part, figures) in SENSITIVE.items():
        spec = getattr(described, part)
        known = {name: 1.1 for name in figures if not name.startswith("achieved") or spec.computes(name[9:])}
        yield label, described.scaled(part, **known)
    yield "launch", described.scaled("device", **dict.fromkeys(LAUNCH, 0.9))


_KEYWORDS = (
    *(name for name in signature(simulate).parameters if name != "run"),
    *(one.name for one in fields(RunShape) if one.name != "precision"),
)
