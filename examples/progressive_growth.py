"""Progressive stacking (Gong et al. 2019): train a few layers, double them by copying, and again, and compare with
training the full depth from the start.

Both runs see the same batches and take turns step by step, so that other load on the machine slows both alike. The
steps of the growing model take less time, since most of them have fewer layers; it then continues until it has trained
for as long as the model of full depth. The held-out loss is compared after as many steps and after as much time. Device
memory is that of one layer, so it is the same at every depth.

    python examples/progressive_growth.py --layers 16 --steps 240
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

import relay
from relay.models import GPT

Batch = dict[str, torch.Tensor]


def text_batches(text: bytes, count: int, rows: int, length: int, seed: int) -> list[Batch]:
    """Windows of bytes from a text, with the next byte as the label of each."""
    data = torch.tensor(list(text))
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        starts = torch.randint(len(data) - length - 1, (rows,), generator=generator)
        windows = torch.stack([data[start : start + length + 1] for start in starts.tolist()])
        found.append({"input_ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()})
    return found


@dataclass
class Run:
    """A model in training: seconds of steps and doublings, held-out losses as (step, seconds, loss), device peaks."""

    model: GPT
    trainer: relay.Trainer
    grow_at: frozenset[int]
    steps: int = 0
    seconds: float = 0.0
    peaks: set[int] = field(default_factory=set)
    held_out: list[tuple[int, float, float]] = field(default_factory=list)

    def step(self, batch: Batch) -> None:
        """One step, after doubling the layers where that is due. The time includes compiling the new depth."""
        start = perf_counter()
        if self.steps in self.grow_at:
            for layer in [copy.deepcopy(one) for one in self.model.blocks]:
                self.trainer.insert(len(self.model.blocks), layer)
        metrics = self.trainer.step(batch)
        self.steps += 1
        self.seconds += perf_counter() - start
        self.peaks.add(metrics.device_peak_bytes)

    def look(self, batches: Sequence[Batch]) -> float:
        """The current held-out loss."""
        loss = sum(self.trainer.evaluate(batch).loss for batch in batches) / len(batches)
        self.held_out.append((self.steps, self.seconds, loss))
        return loss


def begin(layers: int, grow_at: frozenset[int], options: argparse.Namespace, example: Batch) -> Run:
    """A run of a GPT that starts with that many layers."""
    torch.manual_seed(0)
    model = GPT(
        vocabulary=256, layers=layers, hidden=options.hidden, heads=4, sequence=options.length, tied=False, dropout=0.0
    )
    optimizer = relay.AdamW(lr=options.lr)
    trainer = relay.Trainer(model, device=options.device, microbatches=2, stash="host", optimizer=optimizer)
    trainer.prepare(example)
    return Run(model, trainer, grow_at)


def compare(options: argparse.Namespace) -> tuple[Run, Run]:
    """Train the growing model and the one of full depth, printing the progress, and return both runs."""
    text = Path(argparse.__file__).read_bytes()
    cut = len(text) * 9 // 10
    batches = text_batches(text[:cut], 4 * options.steps, options.rows, options.length, seed=0)
    held_out = text_batches(text[cut:], options.held_out, options.rows, options.length, seed=1)
    stages = options.doublings + 1
    grow_at = frozenset(options.steps * number // stages for number in range(1, stages))
    with begin(1, frozenset(), options, batches[0]).trainer as warming:
        warming.step(batches[0])  # what is compiled once for a process counts for neither
    growing = begin(options.layers >> options.doublings, grow_at, options, batches[0])
    full = begin(options.layers, frozenset(), options, batches[0])
    every = max(1, options.steps // 12)
    print("          growing                       full depth")
    print("  step    layers  seconds  held out     seconds  held out")
    try:
        for step in range(options.steps):
            growing.step(batches[step])
            full.step(batches[step])
            if (step + 1) % every == 0 or step + 1 == options.steps:
                ours, theirs = growing.look(held_out), full.look(held_out)
                print(
                    f"  {step + 1:4d}    {len(growing.model.blocks):6d}  {growing.seconds:7.1f}  {ours:8.3f}     "
                    f"{full.seconds:7.1f}  {theirs:8.3f}"
                )
        # As much time for both: whichever has had less goes on with batches that it has not seen.
        behind, ahead = sorted((growing, full), key=lambda run: run.seconds)
        while behind.seconds < ahead.seconds and behind.steps < len(batches):
            behind.step(batches[behind.steps])
            if behind.steps % every == 0:
                behind.look(held_out)
        behind.look(held_out)
    finally:
        growing.trainer.close()
        full.trainer.close()
    return growing, full


def seconds_to(run: Run, loss: float) -> float | None:
    """The seconds after which the held-out loss of a run was first that low; None where it never was."""
    return next((seconds for _, seconds, found in run.held_out if found <= loss), None)


def main(arguments: Sequence[str] | None = None) -> tuple[Run, Run]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, help="the full depth")
    parser.add_argument("--doublings", type=int, default=2, help="how often the depth is doubled on the way there")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rows", type=int, default=8, help="sequences a batch")
    parser.add_argument("--length", type=int, default=64, help="bytes a sequence")
    parser.add_argument("--steps", type=int, default=240, help="steps that both runs make")
    parser.add_argument("--held-out", type=int, default=8, help="batches of held-out text")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.hidden, options.steps, options.length, options.held_out = 4, 16, 12, 16, 1
    if options.doublings < 1 or options.layers % (1 << options.doublings):
        parser.error("--layers must be a multiple of 2 to the power of --doublings, and that at least 1")
    growing, full = compare(options)
    at_equal_steps = [next(one for one in run.held_out if one[0] == options.steps) for run in (growing, full)]
    for name, (steps, seconds, loss) in zip(("growing", "full depth"), at_equal_steps, strict=True):
        print(f"{name:10s} after {steps} steps: {seconds:6.1f} s, held-out loss {loss:.3f}")
    print(f"time of growing / full depth for as many steps: {at_equal_steps[0][1] / at_equal_steps[1][1]:.2f}")
    for name, run in (("growing", growing), ("full depth", full)):
        steps, seconds, loss = run.held_out[-1]
        print(f"{name:10s} in equal time: {steps} steps, {seconds:6.1f} s, held-out loss {loss:.3f}")
    target = at_equal_steps[1][2]
    sooner = seconds_to(growing, target)
    print(
        f"growing reached the full depth's loss of {target:.3f} "
        + (f"after {sooner:.1f} s, {sooner / at_equal_steps[1][1]:.2f} of its time" if sooner else "never")
    )
    print(f"device peak: growing {sorted(growing.peaks)}, full depth {sorted(full.peaks)} bytes")
    return growing, full


if __name__ == "__main__":
    main()
