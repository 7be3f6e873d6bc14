"""The relay against plain PyTorch with activation checkpointing: same model, same micro-batches, same optimizer.

Runs the two in turn, pair by pair, in one process, for the machine's speed drifts; prints each side's median and
the median of the paired ratios, checks that both give the same losses (a figure of a broken run is worth nothing),
and the Python cost of one (layer, micro-batch) visit: the time to submit and run a step whose kernels do nothing.

    python benchmarks/overhead.py [--pairs 9] [--quick] [--json out.json]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import relay
from backends.cpu import CpuDevice, CpuKernel
from hal import registry
from hal.program import Kernel, Program, Role
from relay.models import GPT


def plain_step(model: GPT, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor], pieces: int) -> float:
    """One step of plain PyTorch: every block checkpointed, gradients accumulated over the micro-batches."""
    total = 0.0
    size = len(batch["input_ids"])
    for inputs, labels in zip(batch["input_ids"].chunk(pieces), batch["labels"].chunk(pieces), strict=True):
        loss = model(input_ids=inputs, labels=labels).loss * (len(inputs) / size)
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def checkpointed(model: GPT) -> GPT:
    """The model with every block run under activation checkpointing."""
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)
    return model


class EmptyKernel(CpuKernel):
    """Does nothing but give a loss of zero, so that a step's time is the relay's own.

    While `device.warming_up`, it writes zeros to every output: nothing else initialises that memory, and what lies
    there by chance may be NaN, or denormal numbers with which the optimizer is slow.
    """

    def __init__(self, program: Program, device: EmptyDevice) -> None:
        super().__init__(program)
        self.device = device

    def function(self, accumulate: tuple[bool, ...]) -> Callable[..., Any]:
        first_output = len(self.program.inputs) + self.program.draws
        has_loss = self.program.outputs[0].role is Role.VALUE and self.program.outputs[0].shape == ()

        def run(*arguments: Any) -> None:
            if self.device.warming_up:
                for output in arguments[first_output:]:
                    output.zero_()
            elif has_loss:
                arguments[first_output].zero_()

        return run


class EmptyDevice(CpuDevice):
    """The CPU device with empty kernels."""

    warming_up = True

    def compile(self, program: Program) -> Kernel:
        return EmptyKernel(program, self)


def visit_cost(layers: int, microbatches: int, steps: int) -> float:
    """Seconds of Python for one visit: a tiny model on a device whose kernels are empty, updates included."""
    model = GPT(layers=layers, hidden=8, heads=1, sequence=8, tied=False)
    device = EmptyDevice("cpu", True, None)
    original_open, registry.open = registry.open, lambda name, capacity: device
    try:
        trainer = relay.Trainer(model, microbatches=microbatches)
    finally:
        registry.open = original_open
    ids = torch.randint(0, 256, (microbatches, 8))
    batch = {"input_ids": ids, "labels": ids}
    visits = microbatches * (2 * layers + 3)
    for _ in range(5):
        trainer.step(batch)
    device.warming_up = False
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        trainer.step(batch)
        times.append((time.perf_counter() - start) / visits)
    trainer.close()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--samples", type=int, default=4, help="samples a micro-batch")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--stash", default="device")
    parser.add_argument("--quick", action="store_true", help="a small model and few pairs: tries the script")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.hidden, options.sequence, options.pairs = 2, 64, 32, 2

    torch.manual_seed(0)
    model = GPT(
        layers=options.layers, hidden=options.hidden, heads=8, sequence=options.sequence, dropout=0.0, tied=False
    )
    plain = checkpointed(copy.deepcopy(model))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    trainer = relay.Trainer(
        model, optimizer=relay.AdamW(lr=1e-3), microbatches=options.microbatches, stash=options.stash
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 256, (options.samples * options.microbatches, options.sequence + 1), generator=generator)
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    ratios, plain_times, relay_times = [], [], []
    for pair in range(options.pairs + 2):
        start = time.perf_counter()
        plain_loss = plain_step(plain, optimizer, batch, options.microbatches)
        middle = time.perf_counter()
        metrics = trainer.step(batch)
        end = time.perf_counter()
        if metrics.loss != plain_loss:
            sys.exit(f"step {pair}: the relay's loss {metrics.loss} is not plain PyTorch's {plain_loss}")
        if pair >= 2:  # two to warm up
            plain_times.append(middle - start)
            relay_times.append(end - middle)
            ratios.append((end - middle) / (middle - start))
            print(f"pair {pair - 1}: plain {middle - start:.3f} s, relay {end - middle:.3f} s, {ratios[-1]:.3f}")
    visit = visit_cost(2, 2, 5) if options.quick else visit_cost(12, 8, 20)
    figures = {
        "model": f"{options.layers} layers, hidden {options.hidden}, sequence {options.sequence}, "
        f"{options.microbatches} micro-batches of {options.samples}",
        "pairs": options.pairs,
        "plain_seconds": statistics.median(plain_times),
        "relay_seconds": statistics.median(relay_times),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "visit_microseconds": visit * 1e6,
        "last_loss": metrics.loss,
        "compute_seconds": metrics.compute_seconds,
        "optimizer_seconds": metrics.optimizer_seconds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    trainer.close()
    print(f"plain with checkpointing {figures['plain_seconds']:.3f} s a step, relay {figures['relay_seconds']:.3f} s")
    print(f"median of paired ratios: {figures['ratio']:.3f} (losses equal, last {metrics.loss:.4f})")
    print(f"Python cost of a visit: {figures['visit_microseconds']:.0f} microseconds")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
