"""Choosing how to run a model on a machine, by simulating choices: micro-batches, slots, layers a slot, stash, what is
recomputed, state dtype.

Every combination of micro-batches, stash, slots and state dtypes is tried with one layer a slot and everything
recomputed. From the fastest of each stash it goes on: as many segments keep their tensors as fit, or half of these;
two, four, ... layers a slot while that helps; and then once more other numbers of micro-batches. Of what is best then
every option is changed alone: where one of these is better, it is taken, and so on; what the last ones would have
given are the reasons. Among choices within `TIE` of the fastest the plainer one wins: states in more bits, activations
on the device, everything recomputed, fewer layers a slot, fewer slots (but one only where two do not fit or are
slower). It decides nothing that changes the model or the batch, and the dtype of states only among those that are
allowed.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from hal.spec import Machine, machine
from hal.spec.units import format_size, parse_size
from relay.errors import RelayError
from relay.options import fixed_scale, refuse_unknown, several
from relay.runtime.grad_mode import as_if_alone
from relay.simulation.describe import describe
from relay.simulation.host_cache import HostSides
from relay.simulation.meta_model import MetaModel
from relay.simulation.plan_file import TABLE, as_table, caution
from relay.simulation.shortfall import shortfalls
from relay.simulation.simulate import Simulation, check_precision, default_precision, simulate
from relay.simulation.simulated_step import RunShape, SimulatedRun
from relay.simulation.transformer_shape import ModelShape

PROMISING = 0.2
"""The search goes on from choices that are slower than the fastest by no more than this share."""

TIE = 0.02
"""Choices whose speeds differ by less than this share count as equal: predictions are no better than that."""

_PLAINNESS = {"fp32": 0, "bf16": 1, "int8": 2, "device": 0, "host": 1}

_REASONED = ("state_dtype", "stash", "recompute", "layers_per_slot", "slots", "microbatches")
_OPTIONS = ("microbatches", "slots", "layers_per_slot", "stash", "recompute", "precision", "state_dtype")


class NoFeasiblePlan(RelayError):
    """No combination fits. What to do: what the message says is closest, another machine, or a smaller model."""


@dataclass(frozen=True)
class Plan:
    """The choice, what it is expected to do, and why it was taken. `options` are those of `relay.Trainer`."""

    options: dict[str, Any]
    expected: Simulation
    reasons: tuple[str, ...]
    tried: int

    def __str__(self) -> str:
        return "\n".join(self.reasons)

    @property
    def caution(self) -> str | None:
        """What `relay train` would train otherwise than it was planned; None for the model that it builds."""
        shape = self.expected.shape
        assert isinstance(shape, ModelShape)
        return caution(shape, shape.layers, shape.hidden, shape.heads)

    def as_toml(self) -> str:
        """A run file for `relay train`, which holds the model too: where another is built, both it and the command say
        the `caution`."""
        shape, run = self.expected.shape, self.expected.run
        assert isinstance(shape, ModelShape)
        rows: dict[str, Any] = {
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": shape.heads,
            "seq": run.sequence,
            "batch": run.batch,
            **self.options,
        }
        if "clip_grad_norm" in rows:
            rows["clip"] = rows.pop("clip_grad_norm")
        lines = [] if self.caution is None else [*textwrap.wrap(self.caution, 110), ""]
        lines = [f"# {line}".rstrip() for line in [*lines, *self.reasons]]
        lines += [f"{key} = {json.dumps(value)}" for key, value in rows.items()]
        lines += ["", f"[{TABLE}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in as_table(shape).items()]
        return "\n".join(lines) + "\n"


@as_if_alone()
def plan(
    model: str | ModelShape | None = None,
    *,
    device: str | Machine = "generic",
    link: str | None = None,
    host: str | None = None,
    software: str = "eager",
    batch: int = 8,
    precision: str | None = None,
    state_dtypes: Sequence[str] = ("fp32", "bf16", "int8"),
    stashes: Sequence[str] = ("device", "host"),
    slots: Sequence[int] = (1, 2, 3),
    loss_scale: str | float = "dynamic",
    clip_grad_norm: float | None = None,
    host_memory: int | str | None = None,
    capacity: int | str | None = None,
    sequence: int = 1024,
    **shape: Any,
) -> Plan:
    """The best way to run a model, given by name or by `layers`, `hidden` and so on as `relay.simulate` takes them.

    `batch` sequences make a step; they are cut into as many pieces as powers of two give, and into single ones. Raises
    NoFeasiblePlan where nothing fits.
    """
    refuse_unknown("plan", shape, _KEYWORDS)
    state_dtypes, stashes, slots = (
        several("plan", name, values)
        for name, values in (("state_dtypes", state_dtypes), ("stashes", stashes), ("slots", slots))
    )
    meant = describe(model, **shape)
    described = device if isinstance(device, Machine) else machine(device, link, host, software)
    precision = precision or default_precision(described)
    check_precision(described, precision)
    fixed: dict[str, Any] = {
        "device": described, "precision": precision, "loss_scale": loss_scale, "clip_grad_norm": clip_grad_norm,
        "batch": batch, "sequence": sequence, "host_memory": host_memory, "capacity": capacity, "must_fit": None,
    }  # fmt: skip
    search = _Search(meant.shape, batch, fixed)
    for microbatches in _counts(batch):
        for stash in stashes:
            for count in slots:
                for state_dtype in state_dtypes:
                    search.try_one(microbatches=microbatches, stash=stash, slots=count, state_dtype=state_dtype)
    plain = search.found
    if not plain:
        refused = search.refused
        closest = min(refused, key=_excess)
        hint = ""
        if precision == "fp16" and loss_scale == "dynamic":
            hint = " A fixed loss scale (loss_scale='fixed') would hold no gradients on the host."
        raise NoFeasiblePlan(
            f"Nothing of {len(refused)} combinations fits. The closest ({_name(closest)}) still lacks: "
            + " ".join(closest.shortfalls)
            + hint
        )
    fastest = max(map(_speed, plain))
    for stash in stashes:
        starts = [one for one in plain if one.run.stash == stash and _speed(one) >= fastest * (1 - PROMISING)]
        if starts:
            search.refine(_chosen(starts))
    allowed: dict[str, Sequence[Any]] = {
        "state_dtype": state_dtypes, "stash": stashes, "slots": slots, "microbatches": _counts(batch),
    }  # fmt: skip
    chosen, changed = search.settle(allowed)
    chosen = replace(chosen, notes=meant.notes_at(sequence))
    options = {name: getattr(chosen.run, name) for name in _OPTIONS}
    if precision == "fp16":
        options["loss_scale"] = loss_scale if loss_scale == "dynamic" else fixed_scale(loss_scale)
    if clip_grad_norm is not None:
        options["clip_grad_norm"] = clip_grad_norm
    if capacity is not None:
        options["capacity"] = parse_size(capacity)
    return Plan(options, chosen, tuple(_reasons(chosen, changed, search)), len(search.tried))


_KEYWORDS = (
    *(name for name in signature(plan).parameters if name != "shape"),
    *(name for name in signature(describe).parameters if name != "model"),
)


class _Search:
    """What was tried, of one model on one machine."""

    def __init__(self, shape: ModelShape | MetaModel, batch: int, fixed: Mapping[str, Any]) -> None:
        self.tried: dict[str, Simulation] = {}
        self._shape = shape
        self._batch = batch
        self._fixed = fixed
        self._sides = HostSides()

    @property
    def found(self) -> list[Simulation]:
        """Those that fit."""
        return [one for one in self.tried.values() if one.fits]

    @property
    def refused(self) -> list[Simulation]:
        """Those that do not."""
        return [one for one in self.tried.values() if not one.fits]

    def try_one(self, **options: Any) -> Simulation:
        """Simulate a choice, once."""
        key = repr(sorted(options.items()))
        if key not in self.tried:
            self.tried[key] = simulate(self._shape, sides=self._sides, **self._fixed, **options)
        return self.tried[key]

    def refine(self, start: Simulation) -> None:
        """Go on from a choice with what it keeps and how many layers share a slot."""
        best = self._with_less_recompute(start)
        layers = 2
        while layers <= self._layers():
            more = self._with_less_recompute(self._changed(best, layers_per_slot=layers, recompute=True))
            if not more.fits or _speed(more) < _speed(best) * (1 + TIE):
                break
            best, layers = more, 2 * layers
        if best is start:
            return
        counts = _counts(self._batch)
        place = counts.index(best.run.microbatches)
        for microbatches in counts[max(0, place - 1) : place + 2]:
            other = self._changed(best, microbatches=microbatches, recompute=True)
            self._with_less_recompute(other, best.run.recompute)

    def settle(self, allowed: Mapping[str, Sequence[Any]]) -> tuple[Simulation, list[tuple[str, Any, Simulation]]]:
        """The choice that no change of one option alone betters, and each such change with what it gives.

        The values are those `allowed`, and for what is kept and how many layers share a slot those tried so far (and
        that all is kept).
        """
        values = dict(allowed)
        for option, further in (("recompute", [False]), ("layers_per_slot", [])):
            found = [*(getattr(one.run, option) for one in self.tried.values()), *further]
            values[option] = list({repr(value): value for value in found}.values())  # as keys 1 and True are one
        while True:
            chosen = _chosen(self.found)
            changes = [
                (option, value, self._changed(chosen, **{option: value}))
                for option in _REASONED
                for value in values[option]
                if repr(value) != repr(getattr(chosen.run, option))
            ]
            if _chosen(self.found) is chosen:
                return chosen, changes

    def _changed(self, one: Simulation, **changes: Any) -> Simulation:
        names = ("microbatches", "stash", "slots", "state_dtype", "layers_per_slot", "recompute")
        options = {name: getattr(one.run, name) for name in names} | changes
        # What is as usual is not said, so that a choice is tried once only.
        if options["layers_per_slot"] == 1:
            del options["layers_per_slot"]
        if options["recompute"] is True:
            del options["recompute"]
        return self.try_one(**options)

    def _with_less_recompute(self, one: Simulation, wanted: bool | int = False) -> Simulation:
        """The fastest of: everything recomputed; as many as fit (or are wanted) keeping; half of these."""
        if not one.fits or wanted is True:
            return one
        segments = -(-self._layers() // one.run.layers_per_slot) + 1
        least, most = int(wanted), segments
        while least < most:
            middle = (least + most) // 2
            if self._fits(replace(one.run, recompute=middle), one):
                most = middle
            else:
                least = middle + 1
        if least >= segments:
            return one
        choices = [one, self._changed(one, recompute=least or False)]
        if segments - least > 1:
            choices.append(self._changed(one, recompute=(least + segments) // 2))
        best = max((choice for choice in choices if choice.fits), key=_speed)
        return best if _speed(best) > _speed(one) * (1 + TIE) else one

    def _fits(self, run: RunShape, like: Simulation) -> bool:
        prepared = SimulatedRun(self._shape, run, like.machine, self._sides)
        memory = prepared.memory()
        prepared.close()
        return not shortfalls(memory, like.device_capacity, like.host_capacity, like.machine.device.unified)

    def _layers(self) -> int:
        assert isinstance(self._shape, ModelShape)
        return self._shape.layers


def _speed(one: Simulation) -> float:
    return one.tokens_per_second if one.fits else 0.0


def _chosen(found: Sequence[Simulation]) -> Simulation:
    """The plainest of the fastest."""
    best = max(one.tokens_per_second for one in found)
    return min(
        (one for one in found if one.tokens_per_second >= best * (1 - TIE)),
        key=lambda one: (
            _PLAINNESS[one.run.state_dtype],
            _PLAINNESS[one.run.stash],
            one.run.recompute is not True,
            one.run.layers_per_slot,
            one.run.slots == 1,  # in which nothing loads while one computes
            one.run.slots,
            -one.tokens_per_second,
        ),
    )


def _counts(batch: int) -> list[int]:
    """Numbers of pieces, each as it comes out: six sequences in four pieces of equal size are three pieces."""
    wanted = [1]
    while wanted[-1] * 2 < batch:
        wanted.append(wanted[-1] * 2)
    return list(dict.fromkeys(len(RunShape(batch=batch, microbatches=count).pieces()) for count in [*wanted, batch]))


def _excess(one: Simulation) -> float:
    """By how much a choice passes what there is, the worse of device and host."""
    device = one.memory.device_total / one.device_capacity
    return max(device, one.memory.host_total / one.host_capacity)


def _name(one: Simulation) -> str:
    run = one.run
    kept = ""
    if run.recompute is not True:
        kept = f", {run.recompute} segments recomputing" if run.recompute else ", none recomputing"
    layers = f" of {run.layers_per_slot} layers" if run.layers_per_slot > 1 else ""
    pieces = f"{run.microbatches} micro-batch{'es' if run.microbatches > 1 else ''}"
    places = f"{run.slots} slot{'s' if run.slots > 1 else ''}"
    return f"{pieces}, {places}{layers}, stash on the {run.stash}, {run.state_dtype} states{kept}"


def _reasons(chosen: Simulation, changes: Sequence[tuple[str, Any, Simulation]], search: _Search) -> list[str]:
    reasons = [
        f"{_name(chosen)}: {chosen.tokens_per_second:,.1f} tokens/s, {format_size(chosen.memory.device_total)} of the "
        f"device and {format_size(chosen.memory.host_total)} of the host; bottleneck {chosen.bottleneck}",
        f"{len(search.found)} of {len(search.tried)} combinations fit; the plainest within {TIE:.0%} of the fastest is "
        f"chosen, so a change may give up to {TIE:+.0%}; with one option changed and the others as chosen:",
    ]
    for option, value, other in changes:
        if other.fits:
            gain = round(other.tokens_per_second / chosen.tokens_per_second - 1, 3) + 0.0  # -0.0 + 0.0 is 0.0
            reasons.append(f"{option}={value} would give {gain:+.1%}")
        else:
            reasons.append(f"{option}={value} does not fit")
    return reasons
