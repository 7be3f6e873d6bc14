"""The figures of one simulated step: speed, memory, energy, the bottleneck.

Bytes, seconds and joules are derived here from the recorded timeline and the ledgers of
`relay.simulation.simulated_step`. Nothing is simulated, printed or written here: see `relay.simulation.simulate` and
`relay.simulation.report`.

Figures of the simulated step itself (`step_seconds`, `tokens_per_second`, `waterfall`) compare candidates with each
other. What is expected of a real run are the ranges (`step_time`, `speed`, `mfu`, `joules_per_token`, `days`, ...): the
simulated step, corrected by the factor of the software (`relay.simulation.ranges`). Only ranges are printed.

Invariant: every figure is a function of the fields alone, and each waterfall adds up to its step.
"""

from __future__ import annotations

from dataclasses import dataclass

from hal.spec import Machine
from hal.spec.timeline import Timeline
from relay.errors import RelayError
from relay.simulation.described.experts import RoutedExperts
from relay.simulation.described.meta_model import MetaModel
from relay.simulation.described.transformer_shape import ModelShape
from relay.simulation.energy import ENERGY_ERROR, joules, joules_waiting
from relay.simulation.ranges.ranged import Ranged
from relay.simulation.ranges.software_factors import (
    FACTORS,
    SoftwareFactor,
    factor_of,
    is_calibrated,
    step_time,
    uncalibrated_kind,
)
from relay.simulation.simulated_step import Memory, RunShape, Step

_LABELS = {"compute": "compute", "down": "link down", "up": "link up", "host": "host optimizer"}


@dataclass(frozen=True, repr=False)
class SimulationFigures:
    """What was simulated and what came of it, in bytes, seconds and joules.

    `run` holds the options as they take effect: as many micro-batches as the batch is cut into, and no more layers a
    slot than the model has. `notes` list the assumptions made about the model. For a run that does not fit, `step` is
    None, `shortfalls` give the reasons, and every figure that needs the step raises RelayError.
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

    @property
    def fits(self) -> bool:
        """Whether the run fits in the memory of device and host."""
        return not self.shortfalls

    @property
    def timeline(self) -> Timeline:
        """The step in virtual time. Raises RelayError for a run that does not fit."""
        if self.step is None:
            raise RelayError("A run that does not fit has no step: " + " ".join(self.shortfalls))
        return self.step.timeline

    @property
    def step_seconds(self) -> float:
        """Seconds of the simulated step, with no factor for the software: see `step_time`."""
        return self.timeline.now

    @property
    def unit(self) -> str:
        """What speed counts: tokens (of encoder and decoder together), images, seconds of audio, or samples."""
        return self.shape.unit

    @property
    def units(self) -> float:
        """How many of the unit a step has."""
        return self.run.batch * self.shape.units(self.run.seq)

    @property
    def experts(self) -> RoutedExperts | None:
        """The model's routed experts, if it has any."""
        return self.shape.experts if isinstance(self.shape, MetaModel) else None

    @property
    def active_parameters(self) -> int:
        """The parameters that a token uses: all but those of the routed experts that it is not sent to."""
        return self.memory.parameters - (self.experts.unused if self.experts is not None else 0)

    @property
    def tokens_per_second(self) -> float:
        """Tokens, or what `unit` names, a second of the simulated step; it compares candidates: see `speed`."""
        return self.units / self.step_seconds

    @property
    def software(self) -> SoftwareFactor:
        """The factor of the software on this machine, and what it follows from."""
        return factor_of(self.machine, self.run.precision)

    @property
    def step_time(self) -> Ranged:
        """Seconds that are expected of one training step."""
        return step_time(self.step_seconds, self.timeline.busy["compute"], self.software)

    @property
    def narrowing(self) -> tuple[float, float] | None:
        """The width of `step_time` without and with the calibration; None where the machine is not calibrated.

        A width is the high end as a multiple of the low end.
        """
        if not is_calibrated(self.machine, self.run.precision):
            return None
        factor = FACTORS[uncalibrated_kind(self.machine)]
        return step_time(self.step_seconds, self.timeline.busy["compute"], factor).width, self.step_time.width

    @property
    def speed(self) -> Ranged:
        """Tokens, or what `unit` names, that are expected in a second."""
        return self.step_time.inverse(self.units)

    @property
    def waterfall(self) -> dict[str, float]:
        """The seconds of the step by cause: compute, launches, and what compute waited for."""
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
    def expected_waterfall(self) -> dict[str, float]:
        """The middle of `step_time` by cause."""
        compute = self.software.compute.middle
        return {
            what: seconds / (compute if what in ("compute", "launch") else 1.0)
            for what, seconds in self.waterfall.items()
        }

    @property
    def busy_seconds(self) -> dict[str, Ranged]:
        """Seconds that each lane is expected to be busy in a step."""
        software = self.software
        return {
            lane: (software.compute if lane == "compute" else software.others).inverse(seconds)
            for lane, seconds in self.timeline.busy.items()
        }

    @property
    def lower_bound(self) -> float:
        """The busy seconds of the busiest resource, which no schedule can beat."""
        if self.step is None:
            return max(self.timeline.busy.values())  # raises
        return max(seconds for each in self.step.timelines for seconds in each.busy.values())

    @property
    def overlap_efficiency(self) -> float:
        """The lower bound as a share of the step."""
        return self.lower_bound / self.step_seconds

    @property
    def bottleneck(self) -> str:
        """The busiest resource. "launch" where that is compute and launches are the larger part of it."""
        busy = self.timeline.busy
        busiest = max(busy, key=lambda lane: busy[lane])
        return "launch" if busiest == "compute" and self.timeline.launch > busy["compute"] / 2 else _LABELS[busiest]

    @property
    def peak_flops(self) -> float:
        """FLOP/s: the dense peak of all devices in the run's precision, or the achieved rate where no peak is known."""
        precision = self.run.precision
        devices = [one.device for one in self.machine.each]
        return sum(
            device[f"peak_{precision}"] if device.has(f"peak_{precision}") else device.sustained(precision)
            for device in devices
        )

    @property
    def mfu(self) -> Ranged:
        """Model FLOPs utilisation: FLOP/s of the model, recompute not counted, as a share of the dense peak."""
        return self.speed.scaled(self.shape.model_flops(self.run.seq) / self.peak_flops)

    @property
    def hardware_utilisation(self) -> Ranged:
        """FLOP/s of the device, recompute included, as a share of the dense peak."""
        return self.step_time.inverse(self.timeline.flops / self.peak_flops)

    @property
    def simulated_joules(self) -> float:
        """Energy of the simulated step: the integral of the watts in its trace."""
        return joules(self.machine, self.timeline)

    @property
    def joules_per_token(self) -> Ranged:
        """Joules a token, or of another `unit`.

        They are the watts of `relay.simulation.energy`, by `ENERGY_ERROR` off either way, over `step_time`.
        """
        error = Ranged(1 - ENERGY_ERROR, 1.0, 1 + ENERGY_ERROR)
        watts = self.simulated_joules / self.step_seconds
        return self.step_time.times(error).scaled(watts / self.units)

    @property
    def flops_per_watt(self) -> Ranged:
        """Model FLOP/s per watt of device and host."""
        return self.joules_per_token.inverse(self.shape.model_flops(self.run.seq))

    @property
    def wasted_energy(self) -> float:
        """The share of the energy that is spent while the device computes nothing."""
        return joules_waiting(self.machine, self.timeline) / joules(self.machine, self.timeline)

    @property
    def break_even(self) -> dict[str, float]:
        """Tokens per layer visit from which each kind of work is hidden behind compute; empty for other units.

        It is for a middle layer.
        With R FLOP/s of the device, H bytes/s of the link, b bytes a parameter on the link and C seconds of the host
        optimizer per parameter: forward b R / 2H; backward with recompute b R / 6H, for the larger of loads and
        gradients; optimizer C R / 6.
        """
        if self.unit != "tokens":
            return {}
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

    def days(self, tokens: float) -> Ranged:
        """Days of training for that many tokens, or of another `unit`."""
        return self.speed.inverse(tokens / 86400)

    def kilowatt_hours(self, tokens: float) -> Ranged:
        """kWh for that many tokens, or of another `unit`."""
        return self.joules_per_token.scaled(tokens / 3.6e6)
