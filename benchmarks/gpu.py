"""Everything a GPU can show, in one script of under five minutes: right first, then how fast.

Checks, each printed with its outcome (a failed one does not stop the others, and the exit code says so):
  self-test of the device; the `gpu` tests of the suite; 10 steps of a GPT, losses and parameters against plain
  PyTorch on the same GPU (fp32, bf16, clipped, stash on device and host).
Figures: copies host to device and back, pageable and page-locked, one way and both at once; a block's program
against eager; a step against plain PyTorch with activation checkpointing, paired, with its losses; tokens a second,
device peak and its share of what plain training takes; the trace of a step.

    python benchmarks/gpu.py [--device cuda:0] [--json gpu.json] [--trace gpu-trace.json]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import relay
from hal import registry
from relay.models import GPT

ROOT = Path(__file__).resolve().parent.parent


def plain_steps(
    model: GPT,
    batches: list[dict[str, torch.Tensor]],
    pieces: int,
    where: torch.device,
    dtype: torch.dtype,
    clip: float,
) -> list[float]:
    """Losses of plain PyTorch doing the same micro-batches on the GPU, optimizer included."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    losses = []
    for batch in batches:
        total = 0.0
        size = len(batch["input_ids"])
        for inputs, labels in zip(batch["input_ids"].chunk(pieces), batch["labels"].chunk(pieces), strict=True):
            with torch.autocast(where.type, dtype=dtype, enabled=dtype is not torch.float32):
                loss = model(input_ids=inputs.to(where), labels=labels.to(where)).loss
            (loss * (len(inputs) / size)).backward()
            total += loss.item() * (len(inputs) / size)
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def some_batches(count: int, samples: int, sequence: int) -> list[dict[str, torch.Tensor]]:
    """Random bytes; what is measured does not depend on them."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        ids = torch.randint(0, 256, (samples, sequence + 1), generator=generator)
        made.append({"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()})
    return made


def check_training(device: str, precision: str, stash: str, clip: float) -> dict[str, Any]:
    """10 steps against plain PyTorch on the GPU: the largest differences of loss and of a parameter."""
    torch.manual_seed(0)
    model = GPT(layers=6, hidden=256, heads=4, sequence=128, tied=False)
    where = torch.device(device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    plain = copy.deepcopy(model).to(where)
    batches = some_batches(10, 10, 128)
    expected = plain_steps(plain, batches, 4, where, dtype, clip)
    with relay.Trainer(
        model, device=device, microbatches=4, precision=precision, stash=stash, clip_grad_norm=clip or None,
        optimizer=relay.AdamW(lr=1e-3, weight_decay=0.01),
    ) as trainer:  # fmt: skip
        losses = [trainer.step(batch).loss for batch in batches]
        state = trainer.state_dict()
        apart = max(float((state[name] - tensor.cpu()).abs().max()) for name, tensor in plain.state_dict().items())
    loss_apart = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
    if loss_apart > 1e-3:
        raise AssertionError(f"losses are {loss_apart:g} apart: {losses} and {expected}")
    return {"loss_apart": loss_apart, "parameter_apart": apart, "equal": losses == expected and apart == 0.0}


def measure_copies(device: str) -> dict[str, float]:
    """GB/s of 256 MB copies: page-locked and pageable, each way, and both ways at once."""
    opened = registry.open(device)
    host = opened.host()
    size = 256 * 10**6
    locked, pageable = host.alloc(size, torch.uint8, "probe", crosses=True), torch.empty(size, dtype=torch.uint8)
    other = host.alloc(size, torch.uint8, "probe", crosses=True)
    down, up = opened.queue("load"), opened.queue("drain")
    first, second = (opened.alloc(size).view(0, (size,), torch.uint8) for _ in range(2))
    figures = {}

    def rate(name: str, calls: Callable[[], list[Any]], count: int) -> None:
        times = []
        for _ in range(4):
            start = time.perf_counter()
            for event in calls():
                event.wait()
            times.append(time.perf_counter() - start)
        figures[name] = count * size / statistics.median(times[1:]) / 1e9

    rate("down, page-locked", lambda: [down.write(first, locked)], 1)
    rate("down, pageable", lambda: [down.write(first, pageable)], 1)
    rate("up, page-locked", lambda: [up.read(other, second)], 1)
    rate("both at once", lambda: [down.write(first, locked), up.read(other, second)], 2)
    host.close()
    opened.close()
    return figures


def measure_step(device: str, trace: Path | None) -> dict[str, Any]:
    """A 24-layer GPT of width 2048 in bf16: the relay against plain PyTorch with activation checkpointing, paired."""
    torch.manual_seed(0)
    where = torch.device(device)
    model = GPT(layers=24, hidden=2048, heads=16, sequence=1024, tied=False)
    plain = copy.deepcopy(model).to(where)
    for block in plain.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    batches = some_batches(6, 32, 1024)
    times: dict[str, list[float]] = {"plain": [], "relay": []}
    losses: dict[str, list[float]] = {"plain": [], "relay": []}
    with relay.Trainer(model, device=device, microbatches=4, precision="bf16", stash="host") as trainer:
        for number, batch in enumerate(batches):
            if number == len(batches) - 1 and trace is not None:
                recorded = trainer.start_trace()
            start = time.perf_counter()
            losses["plain"] += plain_steps(plain, [batch], 4, where, torch.bfloat16, 0.0)
            torch.cuda.synchronize()
            middle = time.perf_counter()
            metrics = trainer.step(batch)
            times["plain"].append(middle - start)
            times["relay"].append(time.perf_counter() - middle)
            losses["relay"].append(metrics.loss)
        if trace is not None:
            recorded.write(trace)
        plain_bytes = trainer.plain_bytes
    ratios = [ours / theirs for ours, theirs in zip(times["relay"], times["plain"], strict=True)][1:]
    return {
        "ratio to plain": statistics.median(ratios),
        "ratios": ratios,
        "seconds": times,
        "losses": losses,
        "tokens a second": metrics.tokens_per_second,
        "device peak": metrics.device_peak_bytes,
        "plain bytes": plain_bytes,
        "compute seconds": metrics.compute_seconds,
        "transfer seconds": metrics.transfer_seconds,
        "optimizer seconds": metrics.optimizer_seconds,
    }


def run_gpu_tests() -> dict[str, Any]:
    """The tests of the suite that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", str(ROOT / "tests")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if done.returncode not in (0, 5):
        raise AssertionError(done.stdout[-3000:])
    return {"pytest": done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    jobs: dict[str, Callable[[], Any]] = {
        "devices": lambda: [str(probe) for probe in registry.devices()],
        "tests": run_gpu_tests,
        "fp32": lambda: check_training(options.device, "fp32", "device", 0.0),
        "fp32, host stash, clipped": lambda: check_training(options.device, "fp32", "host", 0.5),
        "bf16": lambda: check_training(options.device, "bf16", "device", 0.0),
        "copies, GB/s": lambda: measure_copies(options.device),
        "step": lambda: measure_step(options.device, options.trace),
    }
    results: dict[str, Any] = {"torch": torch.__version__, "time": time.strftime("%Y-%m-%d")}
    failed = []
    for name, job in jobs.items():
        start = time.perf_counter()
        try:
            results[name] = job()
        except Exception as failure:
            failed.append(name)
            results[name] = {"failed": f"{type(failure).__name__}: {failure}", "where": traceback.format_exc()[-2000:]}
        print(f"{name} ({time.perf_counter() - start:.1f} s): {json.dumps(results[name], default=str)}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
