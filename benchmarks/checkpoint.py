"""What a checkpoint written behind the training costs: step times with and without one on its way.

    python benchmarks/checkpoint.py [--layers 12] [--hidden 384] [--every 100] [--quick] [--json out.json]

Prints the medians of both kinds of step, the time the writing took, and what it costs a run that saves every so many
steps. Plain steps and steps with a checkpoint alternate in blocks, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from time import perf_counter

import torch

import relay
from hal.spec.units import format_size
from relay.models import GPT


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints, for the share of a run")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: the temporary folder)")
    parser.add_argument("--quick", action="store_true", help="a small model and one round: tries the script")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.hidden, options.rounds = 2, 64, 1

    torch.manual_seed(0)
    model = GPT(layers=options.layers, hidden=options.hidden, heads=options.hidden // 64, sequence=128)
    text = torch.randint(0, 256, (options.batch, 129))
    batch = {"input_ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}
    plain: list[float] = []
    extra: list[float] = []
    writing: list[float] = []
    with relay.Trainer(model, microbatches=4) as trainer, tempfile.TemporaryDirectory(dir=options.folder) as folder:

        def step() -> float:
            start = perf_counter()
            trainer.step(batch)
            return perf_counter() - start

        for _ in range(3):
            step()
        path = Path(folder) / "checkpoint"
        for _ in range(options.rounds):
            block = [step() for _ in range(5)]
            plain += block
            usual = statistics.median(block)
            start = perf_counter()
            saving = trainer.save(path, background=True)
            call = perf_counter() - start
            during = []
            while not saving.done():
                during.append(step())
            writing.append(perf_counter() - start)
            extra.append(call + sum(during) - usual * len(during))
        size = sum(file.stat().st_size for file in path.iterdir())
        start = perf_counter()
        trainer.save(path)
        foreground = perf_counter() - start
    usual, cost = statistics.median(plain), statistics.median(extra)
    figures = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "checkpoint_bytes": size,
        "step_seconds": usual,
        "background_seconds": statistics.median(writing),
        "foreground_seconds": foreground,
        "background_cost_seconds": cost,
        "share_of_steps": cost / (usual * options.every),
        "threads": torch.get_num_threads(),
    }
    print(f"{figures['parameters']:,} parameters, checkpoint of {format_size(size)}")
    print(f"a step while none is written      {usual:.3f} s (median of {len(plain)})")
    print(f"written in the background in      {figures['background_seconds']:.2f} s")
    print(f"written in the foreground in      {foreground:.2f} s")
    print(f"a background write costs the run  {cost:.3f} s: {cost / foreground:.0%} of a foreground write")
    print(f"saving every {options.every} steps              {figures['share_of_steps']:.2%} of step time")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
