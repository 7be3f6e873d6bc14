"""The report of a simulation: as text, as JSON, and as a Perfetto trace.

The figures come from `relay.simulation.figures`; nothing is worked out here.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hal.spec import Machine
from hal.spec.timeline import LANES
from hal.spec.units import format_binary_size, format_count, format_seconds, format_size
from relay.checkpoint.atomic_file import write_whole
from relay.simulation.energy import power
from relay.simulation.figures import SimulationFigures
from relay.simulation.ranges.software_factors import decisive, is_calibrated, kind_of
from relay.simulation.simulated_step import RunShape

_FEWER_LAUNCHES = (
    "launch (fewer, larger micro-batches launch less often; so do fused kernels, of which --software counts only the "
    "memory traffic that they save)"
)
_SINGLE = {
    "tokens": "token", "images": "image", "videos": "video", "seconds of audio": "second of audio", "samples": "sample",
}  # fmt: skip
_MASTERS = {"fp32": "", "split": ", split masters", "as_given": ", weights as given"}
_TRACKS = {"down": "link down", "up": "link up", "compute": "compute", "host": "host optimizer"}
_RUN = (
    "seq", "batch", "microbatches", "precision", "state_dtype", "stash", "slots", "layers_per_slot", "resident_layers",
    "layers_per_visit", "recompute", "head_chunk_tokens", "mlp_chunk_tokens", "loss_over", "sparse_rows", "loss_scale",
    "clip_grad_norm", "master_weights", "exact_ties",
)  # fmt: skip


def as_json(found: SimulationFigures, tokens: float | None) -> dict[str, Any]:
    """Every figure by name, in SI units."""
    shape, run, memory = found.shape, found.run, found.memory
    answer: dict[str, Any] = {
        "fits": found.fits,
        "shortfalls": list(found.shortfalls),
        "would_fit": list(found.suggestions),
        "notes": list(found.notes),
        "parameters": memory.parameters,
        "active_parameters": found.active_parameters,
        "model": shape.described(),
        "run": {key: getattr(run, key) for key in _RUN},
        "device": {
            "name": found.machine.device.name,
            "names": [one.device.name for one in found.machine.each],
            "resident_layers": memory.resident_layers,
            "capacity_bytes": found.device_capacity,
            "needed_bytes": memory.device_total,
            "ledger": memory.device,
        },
        "host": {
            "name": found.machine.host.name,
            "capacity_bytes": found.host_capacity,
            "needed_bytes": memory.host_total,
            "page_locked_bytes": memory.page_locked,
            "ledger": [{"state": state, "dtype": dtype, "bytes": size} for state, dtype, size in memory.host],
        },
        "link": found.machine.link.name,
        "tier": tier(found),
    }
    if found.experts is not None:
        answer["experts_touched"] = found.experts.touched(found.units)
    if found.step is None:
        return answer
    answer |= {
        "step_seconds": found.step_time.as_json(),
        "waterfall_seconds": found.expected_waterfall,
        "busy_seconds": {lane: seconds.as_json() for lane, seconds in found.busy_seconds.items()},
        "link_bytes": found.timeline.link_bytes,
        "overlap_efficiency": found.overlap_efficiency,
        "unit": found.unit,
        f"{_key(found.unit)}_per_step": found.units,
        f"{_key(found.unit)}_per_second": found.speed.as_json(),
        "range": _range(found),
        "mfu": found.mfu.as_json(),
        "hardware_utilisation": found.hardware_utilisation.as_json(),
        f"joules_per_{_key(_SINGLE[found.unit])}": found.joules_per_token.as_json(),
        "flops_per_watt": found.flops_per_watt.as_json(),
        "energy_wasted_waiting": found.wasted_energy,
        "bottleneck": found.bottleneck,
        "break_even_tokens": found.break_even,
        "sensitivity_to_ten_per_cent": found.sensitivity,
    }
    if tokens is not None:
        answer |= {
            _key(found.unit): tokens,
            "days": found.days(tokens).as_json(),
            "kilowatt_hours": found.kilowatt_hours(tokens).as_json(),
        }
    return answer


def _range(found: SimulationFigures) -> dict[str, Any]:
    """What the ranges follow from."""
    software = found.software
    return {
        "software": kind_of(found.machine, found.run.precision),
        "compute_factor": software.compute.as_json(),
        "others_factor": software.others.as_json(),
        "source": software.source,
        "step_width": found.step_time.width,
        "step_width_without_calibration": found.narrowing[0] if found.narrowing is not None else None,
    }


def _key(unit: str) -> str:
    """A unit as part of a key in JSON."""
    return unit.replace(" ", "_")


def _batch(found: SimulationFigures) -> str:
    """What a step has, in words."""
    run, counted = found.run, f"{found.units:,.0f} {found.unit} a step"
    if found.unit != "tokens":
        return f"{counted}: {run.batch} samples"
    return f"{counted}: {run.batch} sequences of {found.units / run.batch:.0f}"


def tier(found: SimulationFigures) -> str:
    """The weakest source among the figures that decide the speed: calibrated, preset, or preset with assumptions."""
    machine, precision = found.machine, found.run.precision
    if is_calibrated(machine, precision):
        return "calibrated"
    assumed = [
        f"{spec.name}: {name}"
        for spec, name in decisive(machine, precision)
        if not spec.has(name) or not spec.cells[name].verified
    ]
    return f"preset, with assumptions ({', '.join(dict.fromkeys(assumed))})" if assumed else "preset"


def _of_segments(run: RunShape, resident: int) -> str:
    """Layers a slot, resident layers and recomputing as text, where they are not the defaults."""
    text = f" of {run.layers_per_slot} layers" if run.layers_per_slot > 1 else ""
    if run.resident_layers:
        text += f", {resident} layers resident"
    if run.recompute is not True:
        text += f", {run.recompute} segments recompute" if run.recompute else ", nothing recomputed"
    if run.head_chunk_tokens is not None:
        text += f", the head over chunks of {run.head_chunk_tokens} tokens"
    if not isinstance(run.layers_per_visit, str) and run.layers_per_visit not in (1, (1, 1)):
        text += f", visits of up to {run.layers_per_visit[0]} layers forward and {run.layers_per_visit[1]} backward"
    if run.mlp_chunk_tokens is not None:
        text += f", wide pieces of layers over chunks of {run.mlp_chunk_tokens}"
    if run.loss_over == "batch":
        text += ", head over the whole batch"
    return text


def _devices(machine: Machine) -> str:
    """The devices of a machine in words, alike ones counted."""
    counts = Counter(one.device.title for one in machine.each)
    return " and ".join(f"{count} x {title}" if count > 1 else title for title, count in counts.items())


def as_text(found: SimulationFigures, tokens: float | None) -> str:
    """The report as text: whether it fits, the ledgers, then time and energy."""
    machine, run, memory = found.machine, found.run, found.memory
    shape = found.shape
    lines = [
        f"{format_count(memory.parameters)} parameters: {shape.title}, {run.precision}, AdamW with {run.state_dtype} "
        f"states{_MASTERS[run.master_weights]}",
        f"{_devices(machine)}, {'one ' if machine.one_link else ''}{machine.link.title}, {machine.host.title}",
        f"{_batch(found)} in {run.microbatches} micro-batches, "
        f"stash on the {run.stash}, {run.slots} slots{_of_segments(run, memory.resident_layers)}",
        "",
        f"verdict         {'it fits' if found.fits else 'it does not fit'}",
    ]
    if found.experts is not None:
        share = found.experts.touched(found.units)
        lines.insert(
            1,
            f"{format_count(found.active_parameters)} of them active for a token ({found.experts.chosen} of "
            f"{found.experts.experts} experts); a step's tokens touch {share:.1%} of the experts, if all are as likely",
        )
    lines += [f"                {text}" for text in found.shortfalls]
    lines += [f"note            {text}" for text in found.notes]
    if found.suggestions:
        lines += [f"                would fit: {text}" for text in found.suggestions]
    elif not found.fits:
        lines.append("                no smaller state, micro-batch or stash fits either")
    lines += ["", f"device memory   {_of(memory.device_total, found.device_capacity)}"]
    lines += [f"  {what:<38} {format_size(size):>10}" for what, size in memory.device.items()]
    lines += ["", f"host memory     {_of(memory.host_total, found.host_capacity)}"]
    for state, dtype, size in memory.host:
        if size >= 1e6 or size * 1000 > memory.host_total:
            lines.append(f"  {state:<32} {dtype:<9} {format_size(size):>10} {format_binary_size(size):>13}")
    if memory.page_locked:
        lines.append(f"  of which page-locked {'':<17} {format_size(memory.page_locked):>10}")
    if run.precision == "fp16" and run.loss_scale != "dynamic":
        deferred = 4 * memory.parameters
        lines.append(f"  (a dynamic loss scale would keep all gradients on the host: {format_size(deferred)} more)")
    if found.step is None:
        return "\n".join(lines)
    software = found.software
    lines += ["", f"step            {found.step_time.text(format_seconds)}"]
    for what, seconds in found.expected_waterfall.items():
        share = seconds / found.step_time.middle
        lines.append(f"  {what:<28} {format_seconds(seconds):>10}  {share:6.1%}  {'#' * round(40 * share)}")
    lines += [
        f"speed           {found.speed.text('{:,.1f}'.format)} {found.unit}/s",
        f"utilisation     MFU {found.mfu.text('{:.1%}'.format)}, hardware"
        f" {found.hardware_utilisation.text('{:.1%}'.format)}, overlap {found.overlap_efficiency:.1%}",
        f"energy          {found.joules_per_token.text('{:.3g}'.format)} J a {_SINGLE[found.unit]},"
        f" {found.flops_per_watt.scaled(1e-12).text('{:.3f}'.format)} TFLOPS/W,"
        f" {found.wasted_energy:.0%} of it while compute waits",
    ]
    if tokens is not None:
        lines.append(
            f"{f'{format_count(tokens)} {found.unit}':<15} {found.days(tokens).text('{:,.1f}'.format)} days,"
            f" {found.kilowatt_hours(tokens).text('{:,.0f}'.format)} kWh"
        )
    lines.append(
        f"ranges          {kind_of(machine, run.precision)} software computes at {software.compute.low:.2f} to"
        f" {software.compute.high:.2f} of the simulated speed: {software.source}"
    )
    if found.narrowing is not None:
        before, after = found.narrowing
        lines.append(
            f"calibration     narrows the range of the step from a factor of {before:.2f} to one of {after:.2f}"
        )
    even = ", ".join(f"{what} {count:,.0f}" for what, count in found.break_even.items())
    bottleneck = _FEWER_LAUNCHES if found.bottleneck == "launch" else found.bottleneck
    lines.append(f"bottleneck      {bottleneck}")
    if even:
        lines.append(f"break-even      tokens a layer visit: {even}")
    if found.sensitivity:
        gains = ", ".join(f"{what} {gain:.1%}" for what, gain in found.sensitivity.items())
        lines.append(f"10 % faster     shortens the step by: {gains}")
    lines.append(f"figures         {tier(found)}")
    return "\n".join(lines)


def write_trace(found: SimulationFigures, path: str | Path) -> None:
    """Write the step as trace-event JSON for https://ui.perfetto.dev.

    Each lane is a track; bytes in flight and watts are counters. Time starts with the step, and the integral of the
    watts over the step is the energy of the report.
    """
    assert found.step is not None
    timelines = found.step.timelines
    names = [f"{number}: " if len(timelines) > 1 else "" for number in range(len(timelines))]
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": 4 * device + number, "name": "thread_name", "args": {"name": name + _TRACKS[lane]}}
        for device, name in enumerate(names)
        for number, lane in enumerate(LANES)
        if device == 0 or lane != "host"
    ]
    spans = [
        (4 * device + LANES.index(span.lane), span)
        for device, timeline in enumerate(timelines)
        for span in (*timeline.spans, *timeline.unfinished)
    ]
    crossing: dict[float, int] = {}
    for track, span in spans:
        start, length = span.start * 1e6, (span.end - span.start) * 1e6
        event = {"ph": "X", "pid": 0, "tid": track, "name": span.label, "ts": start, "dur": length}
        events.append({**event, "args": {"bytes": span.moved}})
        if span.lane in ("down", "up"):
            for time, change in ((span.start, span.moved), (span.end, -span.moved)):
                crossing[time] = crossing.get(time, 0) + change
    moving = 0
    for time in sorted(crossing):
        moving += crossing[time]
        events.append({"ph": "C", "pid": 0, "name": "bytes in flight", "ts": time * 1e6, "args": {"bytes": moving}})
    for time, watts in power(found.machine, found.timeline):
        events.append({"ph": "C", "pid": 0, "name": "watts", "ts": time * 1e6, "args": {"watts": watts}})
    write_whole(path, json.dumps({"traceEvents": events}))


def _of(needed: int, capacity: int) -> str:
    return f"{format_size(needed)} of {format_size(capacity)}"
