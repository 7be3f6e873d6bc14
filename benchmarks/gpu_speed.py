"""Sections of `benchmarks/gpu.py` about what is fast: medians of steps, in turn with what they are compared with."""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_settings import Setting, make_model, plain_gradients, random_batches, real_peak, synchronize
from torch.utils.checkpoint import checkpoint

import relay
from hal import registry, spec
from relay.simulation.calibrate import calibrate
from relay.simulation.described.transformer_shape import ModelShape


def copies(setting: Setting) -> dict[str, Any]:
    """GB/s of 256 MB copies: page-locked and pageable, each way, and both ways at once."""
    opened = registry.open(setting.device)
    host = opened.host()
    size = setting.pick(256 * 10**6, 10**6)
    locked, pageable = host.alloc(size, torch.uint8, "probe", crosses=True), torch.empty(size, dtype=torch.uint8)
    other = host.alloc(size, torch.uint8, "probe", crosses=True)
    down, up = opened.queue("load"), opened.queue("drain")
    first, second = (opened.alloc(size).view(0, (size,), torch.uint8) for _ in range(2))
    figures: dict[str, Any] = {"page-locked bytes": host.page_locked}

    def rate(name: str, submit: Callable[[], list[Any]], count: int) -> None:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for event in submit():
                event.wait()
            times.append(time.perf_counter() - start)
        figures[name] = count * size / statistics.median(times[1:]) / 1e9

    rate("down, page-locked", lambda: [down.write(first, locked)], 1)
    rate("down, pageable", lambda: [down.write(first, pageable)], 1)
    rate("up, page-locked", lambda: [up.read(other, second)], 1)
    rate("up, pageable", lambda: [up.read(pageable, second)], 1)
    rate("both at once", lambda: [down.write(first, locked), up.read(other, second)], 2)
    host.close()
    opened.close()
    return figures


def figures_of(metrics: list[relay.Metrics], torch_device: torch.device) -> dict[str, Any]:
    """Medians of steps: seconds by kind, and how much of the longest kind's time the step took."""
    kinds = ("seconds", "compute_seconds", "transfer_seconds", "optimizer_seconds", "tokens_per_second")
    found = {kind: statistics.median(getattr(one, kind) for one in metrics) for kind in kinds}
    longest = max(found["compute_seconds"], found["transfer_seconds"] / 2, found["optimizer_seconds"])
    return {
        **found,
        "overlap efficiency": longest / found["seconds"],  # both directions of the link at once: half their sum
        "device peak, accounted": metrics[-1].device_peak_bytes,
        "device peak, held by the allocator": real_peak(torch_device),
        "host bytes": metrics[-1].host_bytes,
    }


def step_against_plain(setting: Setting) -> dict[str, Any]:
    """A GPT of 12 layers of width 2048 in bf16: the relay against plain PyTorch with checkpointing, in turn."""
    layers, hidden, sequence, samples = setting.pick((12, 2048, 1024, 32), (2, 64, 32, 8))
    model, torch_device = make_model(layers, hidden, sequence), setting.torch_device
    plain = copy.deepcopy(model).to(torch_device)
    for block in plain.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01, fused=torch_device.type == "cuda")
    times: list[float] = []
    metrics = []
    losses: dict[str, list[float]] = {"plain": [], "relay": []}
    batches = random_batches(setting.pick(6, 3), samples, sequence)
    options: dict[str, Any] = {"precision": "bf16", "stash": "host"}
    with relay.Trainer(model, device=setting.device, microbatches=4, **options) as trainer:
        for number, batch in enumerate(batches):
            recorded = trainer.start_trace() if number == len(batches) - 1 and setting.trace is not None else None
            start = time.perf_counter()
            losses["plain"].append(plain_gradients(plain, batch, 4, torch_device, torch.bfloat16))
            optimizer.step()
            optimizer.zero_grad()
            synchronize(torch_device)
            times.append(time.perf_counter() - start)
            metrics.append(trainer.step(batch))
            losses["relay"].append(metrics[-1].loss)
            if recorded is not None and setting.trace is not None:
                recorded.write(setting.trace)
        baseline_device_bytes = trainer.baseline_device_bytes
    ratios = [ours.seconds / theirs for ours, theirs in zip(metrics, times, strict=True)][1:]
    return {
        "ratio to plain": statistics.median(ratios),
        "ratios": ratios,
        "plain seconds": statistics.median(times[1:]),
        "losses": losses,
        "baseline device bytes": baseline_device_bytes,
        **figures_of(metrics[1:], torch_device),
    }


def recorded_launches(setting: Setting) -> dict[str, Any]:
    """Steps with launches recorded as CUDA graphs and without, in turn: a small GPT, where launches are what costs."""
    device = registry.open(setting.device)
    records = "records-launches" in device.info.tags
    device.close()
    if not records:
        return {"not here": f"{setting.device} records no launches"}
    model = make_model(*setting.pick((12, 256, 128), (2, 64, 16)))
    batches = random_batches(setting.pick(30, 6), 8, setting.pick(128, 16))
    names = {"recorded": setting.device, "plain": f"{setting.device},plain"}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    trainers = {
        name: relay.Trainer(copy.deepcopy(model), device=device_name, microbatches=4, precision="bf16")
        for name, device_name in names.items()
    }
    for batch, (name, trainer) in itertools.product(batches, trainers.items()):
        metrics = trainer.step(batch)
        seconds[name].append(metrics.seconds)
        losses[name].append(metrics.loss)
    for trainer in trainers.values():
        trainer.close()
    if losses["recorded"] != losses["plain"]:
        raise AssertionError(f"recorded launches compute something else: {losses}")
    medians = {f"{name}, seconds": statistics.median(times[5:]) for name, times in seconds.items()}
    return {**medians, "ratio": medians["recorded, seconds"] / medians["plain, seconds"]}


def large_layers(setting: Setting) -> dict[str, Any]:
    """Layers of a 7B model (width 4096) in bf16 with AdamW on the host: seconds and FLOP/s of a step."""
    layers, hidden, sequence, samples = setting.pick((4, 4096, 2048, 16), (2, 64, 32, 4))
    model, torch_device = make_model(layers, hidden, sequence), setting.torch_device
    numbers = sum(parameter.numel() for parameter in model.parameters())
    metrics = []
    with relay.Trainer(
        model, device=setting.device, microbatches=4, precision="bf16", stash="host", optimizer=relay.AdamW(lr=1e-4)
    ) as trainer:
        metrics = [trainer.step(batch) for batch in random_batches(setting.pick(4, 2), samples, sequence)]
    found = figures_of(metrics[1:], torch_device)
    products = 6 * layers * 12 * hidden**2 + 12 * layers * hidden * sequence  # a token, forward and backward
    return {
        "parameters": numbers,
        "losses": [one.loss for one in metrics],
        "model FLOP/s": products * samples * sequence / found["seconds"],
        "seconds a layer": found["seconds"] / layers,
        **found,
    }


def predictions(setting: Setting) -> dict[str, Any]:
    """The simulator calibrated on the device: predicted steps against measured ones, and memory byte for byte."""
    tables = calibrate(setting.device, setting.pick("bf16", "fp32"), rounds=setting.pick(3, 1))
    precision = setting.pick("bf16", "fp32")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calibrated.json"
        path.write_text(json.dumps(tables), encoding="utf-8")
        machine = spec.machine(str(path))
    rows = []
    shapes = [(8, 1024, 16, 512), (12, 768, 16, 512), (6, 2048, 8, 1024)]
    for layers, hidden, samples, sequence in setting.pick(shapes, [(2, 64, 4, 16)]):
        model = make_model(layers, hidden, sequence)
        options: dict[str, Any] = {"microbatches": 4, "precision": precision, "stash": "host"}
        with relay.Trainer(model, device=setting.device, **options) as trainer:
            metrics = [trainer.step(batch) for batch in random_batches(4, samples, sequence)]
        shape = ModelShape(layers, hidden, max(1, hidden // 64), 256)
        expected = relay.simulate(shape, device=machine, batch=samples, seq=sequence, **options)
        measured = statistics.median(one.seconds for one in metrics[1:])
        rows.append(
            {
                "shape": (layers, hidden, samples, sequence),
                "measured": measured,
                "predicted": expected.step_seconds,
                "error": expected.step_seconds / measured - 1,
                "device bytes": (metrics[-1].device_peak_bytes, expected.memory.device_total),
                "host bytes": (metrics[-1].host_bytes, expected.memory.host_total),
            }
        )
    return {"rows": rows, "kernels off by": tables["kernels_mean_error"], "calibration": tables}
