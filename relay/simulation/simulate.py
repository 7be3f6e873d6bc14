"""`relay.simulate`: what a training run needs and costs on hardware that is not present.

It describes the model and the machine, checks the options, simulates one step of the real schedule on a virtual clock
(`relay.simulation.simulated_step`), and says what would help. The figures are worked out in `relay.simulation.figures`
and written down by `relay.simulation.report`.

Invariant: every figure follows from the machine's description (specification sheets, presets or a calibration); nothing
is measured here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any

import torch
from torch import nn

from hal.spec import Machine, SpecError, machine
from hal.spec.units import parse_size
from relay.adapter_options import ADAPTER_OPTIONS
from relay.errors import RelayError
from relay.options import refuse_unknown
from relay.runtime.grad_mode import as_if_alone
from relay.simulation.calibrated_machine import calibrated, check_measured
from relay.simulation.described.describe import describe, loss_scale_notes
from relay.simulation.described.meta_model import MetaModel
from relay.simulation.described.transformer_shape import ModelShape, ShapeError
from relay.simulation.figures import SimulationFigures
from relay.simulation.host_cache import HostCache
from relay.simulation.report import as_text
from relay.simulation.shortfall import shortfalls, suggestions
from relay.simulation.simulated_step import RunShape, SimulatedRun, Step

SENSITIVE = {
    "device compute": ("device", ("achieved_fp32", "achieved_fp16", "achieved_bf16")),
    "device memory bandwidth": ("device", ("bandwidth_achieved",)),
    "link down": ("link", ("down", "both")),
    "link up": ("link", ("up", "both")),
    "host memory bandwidth": ("host", ("bandwidth_achieved", "optimizer_bandwidth")),
}
"""The figures that `sensitivity` makes ten per cent better, one row at a time; `LAUNCH` comes last."""

LAUNCH = ("launch", "call")
"""Seconds that the device spends on each op and each program beside arithmetic and memory traffic."""


MOST_DEVICES = 256
MOST_VISITS = 5_000_000
"""Layers times micro-batches of a simulated step. A visit takes about 20 microseconds of simulation."""


class DoesNotFit(RelayError):
    """The run does not fit. `simulation` holds both ledgers and the changes that would fit.

    What to do: make one of these changes, or take a machine with more memory.
    """

    def __init__(self, message: str, simulation: Simulation) -> None:
        super().__init__(message)
        self.simulation = simulation


@dataclass(frozen=True, repr=False)
class Simulation(SimulationFigures):
    """The result of `relay.simulate`. `print` shows it as a report."""

    def __str__(self) -> str:
        return as_text(self, None)

    def __repr__(self) -> str:
        speed = f"{self.speed.text('{:,.1f}'.format)} {self.unit}/s" if self.fits else "does not fit"
        return f"<Simulation of {self.shape.title} on {self.machine.device.title}: {speed}>"


def default_precision(described: Machine) -> str:
    """bf16 where the device has it, else fp16, else fp32."""
    devices = [one.device for one in described.each]
    return next(
        precision
        for precision in ("bf16", "fp16", "fp32")
        if precision == "fp32" or all(device.computes(precision) for device in devices)
    )


@as_if_alone()
def simulate(
    model: str | ModelShape | MetaModel | nn.Module | None = None,
    *,
    example: Mapping[str, torch.Tensor] | None = None,
    config: str | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    vocabulary: int | None = None,
    ffn: int | None = None,
    tied: bool | None = None,
    seconds: float | None = None,
    device: str | Machine | Sequence[str] = "generic",
    count: int = 1,
    one_link: bool = False,
    link: str | None = None,
    host: str | None = None,
    software: str = "eager",
    calibration: str | None = None,
    host_memory: int | str | None = None,
    capacity: int | str | None = None,
    sensitivity: bool = False,
    record: bool = False,
    precision: str | None = None,
    must_fit: bool | None = True,
    host_cache: HostCache | None = None,
    **run: Any,
) -> Simulation:
    """Simulate one training step.

    Arguments:
        model: The name of a model (`relay simulate --presets` lists them) or an `nn.Module`, which may be on torch's
            meta device. Instead of it: `config`, or `layers` and `hidden`.
        example: A step's batch for an `nn.Module`, called as `module(**example)`. Only shapes and dtypes count.
        config: The path of a Hugging Face `config.json`, whose model transformers builds.
        layers, hidden, heads, vocabulary, ffn, tied: The sizes of a model that has no name, as `describe` takes them.
        seconds: The length of the audio in a sample, for a `config` whose model takes audio.
        device: A preset, a TOML or JSON file of the same form, or a whole `Machine`. Several, as a list or joined by
            commas, work together on the host of the first.
        count: So many of the device, which work together.
        one_link: Put several devices behind one link, that of the first. Otherwise each has its own.
        link, host: Presets or files. By default those of the device.
        software: "eager", "compiled" or "fused": how much of the traffic of pointwise ops reaches memory.
        calibration: The file that `relay calibrate` wrote for the device. Its rates replace those of the description,
            and the range narrows. Without `device` the machine is the one that was measured.
        host_memory, capacity: Bytes of the host and the device to use at most, as a number or such as "512GB".
        sensitivity: Simulate also with each part of the machine ten per cent better.
        record: Keep a span of every call, for `relay.simulation.report.write_trace`.
        precision: "fp32", "bf16" or "fp16". By default the first of bf16, fp16 and fp32 that the device has.
        must_fit: True raises DoesNotFit for a run that does not fit; False returns it with suggestions; None returns
            it without.
        host_cache: Shares the host state between simulations of one model, which saves time.
        run: `seq`, `batch`, `microbatches` (by default one per sequence), `state_dtype`, `stash`, `slots`,
            `layers_per_slot`, `resident_layers`, `recompute`, `head_chunk_tokens`, `mlp_chunk_tokens`, `loss_over`,
            `layers_per_visit`, `sparse_rows`, `clip_grad_norm`, `loss_scale`, `exact_ties`, `master_weights` and
            `optimizer`, as in `RunShape`; `lora`, `quantize_frozen` and the other options of `AdapterOptions`, for a
            `config`.

    Raises DoesNotFit for a run that does not fit, SpecError for arithmetic that the device does not have, ShapeError
    for an impossible model or batch, ValueError for a value that `relay.Trainer` refuses too, and TypeError for an
    unknown option.
    """
    refuse_unknown("simulate", run, _KEYWORDS)
    if isinstance(model, nn.Module):
        if example is None:
            raise ShapeError("A module needs an example= of a step's batch, for its shapes.")
        model = MetaModel(model, example)
    elif example is not None:
        raise ShapeError("example= is for an nn.Module; this model was not given as one. Leave example= out.")
    described = machine_of(device, link, host, software, count, one_link, calibration)
    precision = precision or default_precision(described)
    adapters = {name: run.pop(name) for name in ADAPTER_OPTIONS if name in run}
    description = describe(
        model, config, layers, hidden, heads, vocabulary, ffn, tied, run.get("batch"), run.get("seq"), seconds,
        precision != "fp32", **adapters,
    )  # fmt: skip
    shape = description.shape
    run = with_lengths(shape, run, config is not None or isinstance(model, str))
    run.setdefault("microbatches", run.get("batch", RunShape.batch))
    wanted = RunShape(precision=precision, **run)
    check_precision(described, wanted.precision)
    if calibration is not None:
        check_measured(described, wanted.precision, calibration)
    _refuse_endless(shape, wanted)
    limits = _capacities(described, capacity, host_memory)
    host_cache = HostCache() if host_cache is None else host_cache
    # Without a limit of its own a unified device has nothing to gain from layers that stay.
    room = None if capacity is None and described.device.unified else limits[0]
    prepared = SimulatedRun(shape, wanted, described, host_cache, room)
    wanted = prepared.run
    memory = prepared.memory()
    missing = shortfalls(memory, *limits, described.device.unified)
    step: Step | None = None
    if not missing:
        if record:
            prepared.record()
        if sensitivity:
            prepared.keep_calls()
        step = prepared.step()
    suggests = bool(missing) and must_fit is not None
    would_fit = suggestions(prepared, shape, described, *limits, host_cache) if suggests else ()
    gains: dict[str, float] = {}
    if step is not None and sensitivity:
        gains = _sensitivity(prepared, described, step.timeline.now)
    prepared.close()
    notes = (
        *description.notes_at(wanted.seq), *loss_scale_notes(wanted.loss_scale, wanted.precision), *prepared.notes
    )  # fmt: skip
    result = Simulation(shape, wanted, described, memory, *limits, missing, would_fit, step, gains, notes)
    if missing and must_fit:
        advice = f" What would fit: {'; '.join(would_fit)}." if would_fit else " No smaller setting fits either."
        raise DoesNotFit(" ".join(missing) + advice, result)
    return result


def options_of(found: Simulation) -> dict[str, Any]:
    """The arguments with which `simulate` runs the same again on its machine, but for the model and the limits."""
    return {"device": found.machine, **{each.name: getattr(found.run, each.name) for each in fields(found.run)}}


def machine_of(
    device: str | Machine | Sequence[str],
    link: str | None,
    host: str | None,
    software: str,
    count: int = 1,
    one_link: bool = False,
    calibration: str | None = None,
) -> Machine:
    """The machine with those parts, and with further devices where several are named or `count` is more than 1.

    With a `calibration` its rates are the measured ones; see `relay.simulation.calibrated_machine`.

    Raises SpecError for parts given beside a whole machine, and ValueError for devices that cannot work together.
    """
    if calibration is not None:
        if link is not None or host is not None:
            raise ValueError("A calibration has the link and the host that were measured. Leave link and host out.")
        if not calibration.endswith(".json"):
            raise ValueError(f"calibration={calibration!r} is no file of `relay calibrate`, whose name ends in .json.")
        device = calibration if device == "generic" else device
        measured = None if isinstance(device, Machine) else calibration
        return calibrated(machine_of(device, measured, measured, software, count, one_link), calibration)
    if isinstance(device, Machine):
        if link is not None or host is not None or software != "eager":
            raise SpecError(
                "device= is a whole Machine, with a link, a host and software of its own. Leave link=, host= and "
                "software= out, or change the Machine with with_values()."
            )
        found = [device]
    else:
        names = [name.strip() for name in device.split(",")] if isinstance(device, str) else list(device)
        if not all(names):
            raise ValueError(f"device={device!r} has an empty name. Name each device, joined by single commas.")
        found = [machine(name, link, host, software) for name in names]
    if count > MOST_DEVICES:
        raise ValueError(f"count={count!r} devices are more than are simulated together: at most {MOST_DEVICES}.")
    if count < 1 or (count > 1 and (len(found) > 1 or found[0].others)):
        raise ValueError(
            f"count={count!r} is how many of one device work together, at least 1. Name one device, or leave count out."
        )
    found *= count
    if len(found) == 1:
        if one_link and not found[0].others:
            raise ValueError("one_link=True puts several devices behind one link, and there is one device.")
        return found[0]
    unified = next((one.device.title for one in found if one.device.unified), None)
    if unified is not None:
        raise ValueError(
            f"{unified} works in host memory, so it cannot take layers in turn with other devices. Simulate it alone."
        )
    return replace(found[0], others=tuple(found[1:]), one_link=one_link)


def with_lengths(shape: ModelShape | MetaModel, run: dict[str, Any], made: bool = False) -> dict[str, Any]:
    """The options with the length of a module's example, and its number of samples if `batch` is not given.

    `made` says that the example was made for the options. Raises ShapeError for another length.
    """
    if not isinstance(shape, MetaModel):
        return run
    given = run.get("seq", shape.sequence)
    if given != shape.sequence and not made:
        raise ShapeError(
            f"seq={given}, and a sample of the example= has {shape.sequence} tokens. Leave seq out, or give an example "
            "of that length."
        )
    return {"batch": shape.sequences, **run, "seq": shape.sequence}


def check_precision(described: Machine, precision: str) -> None:
    """Raise SpecError where a device has no arithmetic of that precision."""
    for device in (one.device for one in described.each):
        if not device.computes(precision):
            here = ", ".join(other for other in ("fp32", "fp16", "bf16") if device.computes(other))
            notes = f" {device.notes}" if device.notes else ""
            raise SpecError(
                f"{device.title} does not compute in {precision}; it has {here}.{notes} Choose one of these."
            )


def _capacities(described: Machine, capacity: int | str | None, host_memory: int | str | None) -> tuple[int, int]:
    host = described.host
    usable = min(int(one.device["memory"] - one.device["reserved"]) for one in described.each)
    if usable <= 0:
        title = described.device.title
        raise SpecError(f"{title} reserves as much memory as it has, so that nothing is left. Give it less reserved=.")
    limit = usable if capacity is None else min(parse_size(capacity), usable)
    return limit, int(host["memory"]) if host_memory is None else parse_size(host_memory)


def _refuse_endless(shape: ModelShape | MetaModel, run: RunShape) -> None:
    """Raise ShapeError for a step that would take minutes to simulate."""
    visits = shape.layers * min(run.microbatches, run.batch)
    if visits > MOST_VISITS:
        raise ShapeError(
            f"A step of {run.microbatches:,} micro-batches through {shape.layers:,} layers has {visits:,} visits of "
            f"layers, and at most {MOST_VISITS:,} are simulated. Give fewer micro-batches."
        )


def _sensitivity(prepared: SimulatedRun, described: Machine, seconds: float) -> dict[str, float]:
    """The share of the step that is saved when one part of the machine gets ten per cent better."""
    return {label: 1 - prepared.retimed(better) / seconds for label, better in _improved(described)}


def _improved(described: Machine) -> Iterator[tuple[str, Machine]]:
    for label, (part, figures) in SENSITIVE.items():
        spec = getattr(described, part)
        known = {name: 1.1 for name in figures if not name.startswith("achieved") or spec.computes(name[9:])}
        yield label, described.scaled(part, **known)
    yield "launch", described.scaled("device", **dict.fromkeys(LAUNCH, 0.9))


_KEYWORDS = (
    *(name for name in signature(simulate).parameters if name != "run"),
    *(field.name for field in fields(RunShape) if field.name != "precision"),
    *ADAPTER_OPTIONS,
)
