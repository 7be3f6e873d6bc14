"""What a checkpoint written behind the training costs: step times with and without one on its way.

    python benchmarks/checkpoint.py [--layers 12] [--hidden 384] [--every 100]

Prints the medians of both kinds of step, the time the writing took, and what it costs a run that saves every so many
steps. Plain steps and steps with a checkpoint alternate in blocks, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
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
    options = parser.parse_args()

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
        standing = perf_counter() - start
    usual, cost = statistics.median(plain), statistics.median(extra)
    print(f"{sum(one.numel() for one in model.parameters()):,} parameters, checkpoint of {format_size(size)}")
    print(f"a step without one under way   {usual:.3f} s (median of {len(plain)})")
    print(f"written behind the training in {statistics.median(writing):.2f} s, standing still in {standing:.2f} s")
    print(f"it costs the run               {cost:.3f} s: {cost / standing:.0%} of standing still")
    print(f"saving every {options.every} steps           {cost / (usual * options.every):.2%} of step time")


if __name__ == "__main__":
    main()
