"""The sections of `benchmarks/gpu.py`: what each checks or measures. A section raises where something is wrong.

Equality is with plain PyTorch doing the same micro-batches on the same device, its gradients brought to the host and
applied there by torch.optim, as the relay's are: then every bit must agree, with deterministic kernels. Times are
medians of steps in turn with what they are compared with.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import relay
from hal import registry, spec
from hal.device import Device
from hal.errors import Unavailable
from hal.kernel import Kernel, Program
from hal.ops import calls, name_of
from relay.calibration import calibrate
from relay.capture import autocast
from relay.models import GPT
from relay.shapes import ModelShape

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Setting:
    """What is asked for on the command line."""

    device: str
    small: bool
    trace: Path | None

    @property
    def place(self) -> torch.device:
        """PyTorch's own name of the device."""
        device = registry.open(self.device)
        place = torch.device(device.info.traced_for)
        device.close()
        return place

    def pick(self, full: Any, small: Any) -> Any:
        """A size for a GPU, or for trying the script."""
        return small if self.small else full


@dataclass(frozen=True)
class Section:
    """`seconds` is its budget."""

    run: Callable[[Setting], dict[str, Any]]
    seconds: float


def synchronize(place: torch.device) -> None:
    """Wait for everything that plain PyTorch gave the device."""
    if place.type != "cpu":
        torch.get_device_module(place).synchronize(place)


def real_peak(place: torch.device) -> int:
    """The most bytes PyTorch's allocator held on the device in this process; 0 where it does not count."""
    return int(torch.cuda.max_memory_reserved(place)) if place.type == "cuda" else 0


def some_batches(count: int, samples: int, sequence: int) -> list[dict[str, torch.Tensor]]:
    """Random bytes; what is measured does not depend on them."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        ids = torch.randint(0, 256, (samples, sequence + 1), generator=generator)
        made.append({"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()})
    return made


def a_model(layers: int, hidden: int, sequence: int, dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    heads = max(1, hidden // 64)
    return GPT(layers=layers, hidden=hidden, heads=heads, sequence=sequence, tied=False, dropout=dropout)


def plain_gradients(
    model: GPT, batch: dict[str, torch.Tensor], pieces: int, place: torch.device, dtype: torch.dtype
) -> float:
    """Plain PyTorch's loss of a batch, its gradients left in the parameters."""
    total, size = 0.0, len(batch["input_ids"])
    for inputs, labels in zip(batch["input_ids"].chunk(pieces), batch["labels"].chunk(pieces), strict=True):
        with autocast(dtype, place.type):
            loss = model(input_ids=inputs.to(place), labels=labels.to(place)).loss
        weighted = loss * (len(inputs) / size)
        weighted.backward()
        total += weighted.item()
    return total


def devices(setting: Setting) -> dict[str, Any]:
    """What `relay devices` finds."""
    return {probe.name: probe.reason or f"{probe.description}, {probe.memory_bytes} B" for probe in registry.devices()}


# -- right ----------------------------------------------------------------------------------------------------------


def attention_used(setting: Setting) -> dict[str, Any]:
    """Which attention the programs of a GPT hold on this device: a fused kernel of the device's own."""
    names: set[str] = set()
    tags: set[str] = set()
    plain_open = registry.open

    def listening(name: str, capacity: int | None = None) -> Device:
        device = plain_open(name, capacity)
        compiled = device.compile

        def compile_and_note(program: Program) -> Kernel:
            names.update(name_of(node.target) for node in calls(program.graph))
            return compiled(program)

        device.compile = compile_and_note  # type: ignore[method-assign]
        tags.update(device.info.tags)
        return device

    registry.open = listening
    try:
        for precision in DTYPES:
            with relay.Trainer(a_model(2, 128, 64), device=setting.device, precision=precision) as trainer:
                trainer.prepare(some_batches(1, 4, 64)[0])
    finally:
        registry.open = plain_open
    attention = sorted(name for name in names if "dot_product" in name)
    if "native" in tags and not attention:
        raise AssertionError(f"no fused attention among {sorted(names)}")
    return {"attention": attention, "tags": sorted(tags)}


def equal_to_plain(setting: Setting, precision: str) -> dict[str, Any]:
    """10 steps of SGD with momentum: losses and parameters against plain PyTorch on the device, to the bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    layers, hidden, sequence = setting.pick((6, 256, 128), (2, 64, 16))
    model, place = a_model(layers, hidden, sequence), setting.place
    batches = some_batches(setting.pick(10, 2), 10, sequence)
    plain, twin = copy.deepcopy(model).to(place), copy.deepcopy(model)
    rule = {"lr": 0.05, "momentum": 0.9}
    optimizer = torch.optim.SGD(twin.parameters(), **rule)
    expected = []
    for batch in batches:
        expected.append(plain_gradients(plain, batch, 4, place, DTYPES[precision]))
        for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is not None
            ours.grad, theirs.grad = theirs.grad.cpu(), None
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
                theirs.copy_(ours)
    with relay.Trainer(
        model, device=setting.device, microbatches=4, precision=precision, optimizer=relay.SGD(**rule)
    ) as trainer:
        losses = [trainer.step(batch).loss for batch in batches]
        state = trainer.state_dict()
    torch.use_deterministic_algorithms(False)
    apart = {name: float((state[name] - tensor).abs().max()) for name, tensor in twin.state_dict().items()}
    found = {
        "equal": all(torch.equal(state[name], tensor) for name, tensor in twin.state_dict().items()),
        "losses apart": max(abs(one - other) for one, other in zip(losses, expected, strict=True)),
        "parameters apart": max(apart.values()),
        "losses": losses,
    }
    if not found["equal"] or losses != expected:
        raise AssertionError(f"not equal: {json.dumps(found)}; apart in {[name for name in apart if apart[name]]}")
    return found


def close_to_plain(setting: Setting) -> dict[str, Any]:
    """Clipping with the stash on the host, and dropout: losses against plain PyTorch, and against the CPU's masks."""
    layers, hidden, sequence = setting.pick((6, 256, 128), (2, 64, 16))
    place, batches = setting.place, some_batches(setting.pick(10, 2), 10, sequence)
    model = a_model(layers, hidden, sequence)
    plain = copy.deepcopy(model).to(place)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    expected = []
    for batch in batches:
        expected.append(plain_gradients(plain, batch, 4, place, torch.float32))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    options: dict[str, Any] = {"microbatches": 4, "optimizer": relay.AdamW(lr=1e-3, weight_decay=0.01)}
    with relay.Trainer(model, device=setting.device, stash="host", clip_grad_norm=0.5, **options) as trainer:
        losses = [trainer.step(batch).loss for batch in batches]
    dropped = {}
    for device in (setting.device, "cpu"):
        with relay.Trainer(a_model(2, hidden, sequence, 0.2), device=device, seed=7, **options) as trainer:
            dropped[device] = [trainer.step(batch).loss for batch in batches[:3]]
    clipped_apart = max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True))
    dropout_apart = max(
        abs(one / other - 1) for one, other in zip(dropped[setting.device], dropped["cpu"], strict=True)
    )
    found = {"clipped, relative": clipped_apart, "dropout against the cpu's, relative": dropout_apart}
    if clipped_apart > 1e-3 or dropout_apart > 1e-3:
        raise AssertionError(f"too far apart: {found}")
    return found


def conformance(device: str) -> Callable[[Setting], dict[str, Any]]:
    """The conformance suite on a device (empty: the one that is asked for)."""

    def run(setting: Setting) -> dict[str, Any]:
        name = device or setting.device
        try:
            registry.open(name).close()
        except Unavailable as failure:
            return {"not here": str(failure)}
        words = [sys.executable, "-m", "relay", "conformance", name, "--json"]
        answer = json.loads(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout)
        if not answer["conforms"]:
            raise AssertionError(json.dumps(answer)[-3000:])
        return {key: value for key, value in answer.items() if isinstance(value, (bool, int, float, str))}

    return run


def gpu_tests(setting: Setting) -> dict[str, Any]:
    """The tests of the suite that need a GPU."""
    marked = [str(path) for path in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", *marked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):
        raise AssertionError(done.stdout[-3000:])
    return {"pytest": done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""}


# -- fast -----------------------------------------------------------------------------------------------------------


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


def figures_of(metrics: list[relay.Metrics], place: torch.device) -> dict[str, Any]:
    """Medians of steps: seconds by kind, and how much of the longest kind's time the step took."""
    kinds = ("seconds", "compute_seconds", "transfer_seconds", "optimizer_seconds", "tokens_per_second")
    found = {kind: statistics.median(getattr(one, kind) for one in metrics) for kind in kinds}
    longest = max(found["compute_seconds"], found["transfer_seconds"] / 2, found["optimizer_seconds"])
    return {
        **found,
        "overlap efficiency": longest / found["seconds"],  # both directions of the link at once: half their sum
        "device peak, accounted": metrics[-1].device_peak_bytes,
        "device peak, held by the allocator": real_peak(place),
        "host bytes": metrics[-1].host_bytes,
    }


def step_against_plain(setting: Setting) -> dict[str, Any]:
    """A GPT of 12 layers of width 2048 in bf16: the relay against plain PyTorch with checkpointing, in turn."""
    layers, hidden, sequence, samples = setting.pick((12, 2048, 1024, 32), (2, 64, 32, 8))
    model, place = a_model(layers, hidden, sequence), setting.place
    plain = copy.deepcopy(model).to(place)
    for block in plain.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01, fused=place.type == "cuda")
    times: list[float] = []
    metrics = []
    losses: dict[str, list[float]] = {"plain": [], "relay": []}
    batches = some_batches(setting.pick(6, 3), samples, sequence)
    options: dict[str, Any] = {"precision": "bf16", "stash": "host"}
    with relay.Trainer(model, device=setting.device, microbatches=4, **options) as trainer:
        for number, batch in enumerate(batches):
            recorded = trainer.start_trace() if number == len(batches) - 1 and setting.trace is not None else None
            start = time.perf_counter()
            losses["plain"].append(plain_gradients(plain, batch, 4, place, torch.bfloat16))
            optimizer.step()
            optimizer.zero_grad()
            synchronize(place)
            times.append(time.perf_counter() - start)
            metrics.append(trainer.step(batch))
            losses["relay"].append(metrics[-1].loss)
            if recorded is not None and setting.trace is not None:
                recorded.write(setting.trace)
        plain_bytes = trainer.plain_bytes
    ratios = [ours.seconds / theirs for ours, theirs in zip(metrics, times, strict=True)][1:]
    return {
        "ratio to plain": statistics.median(ratios),
        "ratios": ratios,
        "plain seconds": statistics.median(times[1:]),
        "losses": losses,
        "plain bytes": plain_bytes,
        **figures_of(metrics[1:], place),
    }


def recorded_launches(setting: Setting) -> dict[str, Any]:
    """Steps with launches recorded as CUDA graphs and without, in turn: a small GPT, where launches are what costs."""
    device = registry.open(setting.device)
    records = "records-launches" in device.info.tags
    device.close()
    if not records:
        return {"not here": f"{setting.device} records no launches"}
    model = a_model(*setting.pick((12, 256, 128), (2, 64, 16)))
    batches = some_batches(setting.pick(30, 6), 8, setting.pick(128, 16))
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
    model, place = a_model(layers, hidden, sequence), setting.place
    numbers = sum(parameter.numel() for parameter in model.parameters())
    metrics = []
    with relay.Trainer(
        model, device=setting.device, microbatches=4, precision="bf16", stash="host", optimizer=relay.AdamW(lr=1e-4)
    ) as trainer:
        metrics = [trainer.step(batch) for batch in some_batches(setting.pick(4, 2), samples, sequence)]
    found = figures_of(metrics[1:], place)
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
        model = a_model(layers, hidden, sequence)
        options: dict[str, Any] = {"microbatches": 4, "precision": precision, "stash": "host"}
        with relay.Trainer(model, device=setting.device, **options) as trainer:
            metrics = [trainer.step(batch) for batch in some_batches(4, samples, sequence)]
        shape = ModelShape(layers, hidden, max(1, hidden // 64), 256)
        expected = relay.simulate(shape, device=machine, batch=samples, sequence=sequence, **options)
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


SECTIONS: dict[str, Section] = {
    "devices": Section(devices, 20),
    "attention": Section(attention_used, 25),
    "equal, fp32": Section(lambda setting: equal_to_plain(setting, "fp32"), 30),
    "equal, bf16": Section(lambda setting: equal_to_plain(setting, "bf16"), 30),
    "close": Section(close_to_plain, 35),
    "copies, GB/s": Section(copies, 20),
    "step": Section(step_against_plain, 60),
    "recorded launches": Section(recorded_launches, 35),
    "large layers": Section(large_layers, 60),
    "conformance": Section(conformance(""), 90),
    "tests": Section(gpu_tests, 60),
    "predictions": Section(predictions, 60),
    "conformance, cupy": Section(conformance("cupy:0"), 90),
}
"""In the order of what is missed most where the time does not suffice."""
