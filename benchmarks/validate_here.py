"""Predicted against measured step times on this machine's CPU device, over shapes that the calibration did not see.

The device is calibrated in the same run and in turn with the steps, since machines drift: a round times every kernel
once and makes one real training step of each shape; medians over the rounds are compared. Where others keep the
machine busy, `--clock cpu` compares processor seconds of one thread, which their load does not stretch. Memory is
compared byte for byte.

    python benchmarks/validate_here.py [--rounds 7] [--clock cpu] [--quick] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import relay
from hal import spec
from relay.models import GPT
from relay.simulation.calibrate import calibrate
from relay.simulation.described.transformer_shape import ModelShape

Shape = tuple[int, int, int, int, int, str, int, bool | int]

SHAPES: list[Shape] = [
    # layers, hidden, micro-batches, sequences, sequence, stash, layers a slot, recompute
    (4, 128, 2, 8, 128, "device", 1, True),
    (12, 128, 4, 8, 128, "device", 1, True),
    (6, 160, 4, 8, 128, "host", 1, True),
    (4, 256, 2, 8, 128, "device", 1, True),
    (8, 256, 4, 8, 128, "host", 1, True),
    (6, 320, 2, 4, 128, "device", 1, True),
    (4, 320, 4, 8, 128, "host", 1, True),
    (3, 512, 2, 4, 128, "device", 1, True),
    (4, 512, 4, 8, 128, "host", 1, True),
    (6, 192, 8, 16, 128, "device", 1, True),
    (10, 192, 2, 8, 64, "device", 1, True),
    (4, 384, 1, 4, 128, "device", 1, True),
    (16, 128, 2, 4, 128, "host", 1, True),
    (8, 128, 4, 8, 128, "host", 2, True),
    (6, 256, 2, 8, 128, "device", 3, True),
    (8, 128, 4, 8, 128, "device", 1, False),
    (4, 320, 2, 8, 128, "host", 1, False),
    (6, 256, 4, 8, 128, "device", 2, 2),
]

QUICK_SHAPES: list[Shape] = [(2, 32, 2, 2, 16, "device", 1, True), (2, 32, 2, 2, 16, "host", 2, False)]


class Real:
    """A real run of a shape, a step at a time."""

    def __init__(self, shape: Shape, clock: Callable[[], float]) -> None:
        self.clock = clock
        layers, hidden, pieces, sequences, sequence, stash, together, recompute = shape
        torch.manual_seed(0)
        model = GPT(layers=layers, hidden=hidden, heads=hidden // 32, sequence=sequence, tied=False)
        ids = torch.randint(0, 256, (sequences, sequence))
        self.batch = {"input_ids": ids, "labels": ids}
        self.trainer = relay.Trainer(
            model, microbatches=pieces, stash=stash, layers_per_slot=together, recompute=recompute
        )
        self.metrics = self.trainer.step(self.batch)
        self.seconds: list[float] = []

    def step(self) -> None:
        start = self.clock()
        self.trainer.step(self.batch)
        self.seconds.append(self.clock() - start)

    def figures(self) -> dict[str, float]:
        return {
            "seconds": statistics.median(self.seconds),
            "device_bytes": self.metrics.device_peak_bytes,
            "host_bytes": self.metrics.host_bytes,
        }


def predicted(shape: Shape, machine: spec.Machine) -> dict[str, float]:
    """The simulator's step of the same shape."""
    layers, hidden, pieces, sequences, sequence, stash, together, recompute = shape
    found = relay.simulate(
        ModelShape(layers, hidden, hidden // 32, 256), device=machine, batch=sequences, microbatches=pieces,
        seq=sequence, precision="fp32", stash=stash, layers_per_slot=together, recompute=recompute,
    )  # fmt: skip
    return {
        "seconds": found.step_seconds,
        "device_bytes": found.memory.device_total,
        "host_bytes": found.memory.host_total,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="steps of each shape, in turn with the calibration")
    parser.add_argument("--threads", type=int, default=1, help="of torch; several on busy cores measure the others")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="wall", help="cpu: leaves out what others take")
    parser.add_argument("--quick", action="store_true", help="two small shapes and one round: tries the script")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    shapes = QUICK_SHAPES if options.quick else SHAPES
    rounds = 1 if options.quick else options.rounds
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    runs = [Real(shape, clock) for shape in shapes]

    def between() -> None:
        for run in runs:
            run.step()
        print(".", end="", file=sys.stderr, flush=True)

    tables = calibrate("cpu", rounds=rounds, between=between, clock=clock)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cpu.json"
        path.write_text(json.dumps(tables), encoding="utf-8")
        machine = spec.machine(str(path))
    rows: list[dict[str, Any]] = []
    for shape, run in zip(shapes, runs, strict=True):
        real, simulated = run.figures(), predicted(shape, machine)
        run.trainer.close()
        error = simulated["seconds"] / real["seconds"] - 1
        rows.append({"shape": shape, "measured": real, "predicted": simulated, "error": error})
        print(
            f"{shape!s:<46} measured {real['seconds'] * 1e3:8.1f} ms, predicted {simulated['seconds'] * 1e3:8.1f} ms"
            f" ({error:+.1%}); device {real['device_bytes']:,} / {simulated['device_bytes']:,} bytes, host "
            f"{real['host_bytes']:,} / {simulated['host_bytes']:,} bytes"
        )
    errors = [abs(row["error"]) for row in rows]
    kinds = ("device_bytes", "host_bytes")
    memory = [abs(row["predicted"][kind] / row["measured"][kind] - 1) for row in rows for kind in kinds]
    print(f"step time: mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}; memory: {max(memory):.2%}")
    if options.json:
        figures = {"mean_error": statistics.mean(errors), "worst_error": max(errors), "memory_error": max(memory)}
        options.json.write_text(json.dumps({**figures, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
