"""Time and memory of the head over chunks of positions, beside the whole head, on this machine's CPU.

`python benchmarks/head_chunks.py [--quick] [--json out.json]` prints one row for each vocabulary and size of chunk. A
time is the median ratio of pairs of steps, one with chunks and one without, so that a machine that others use disturbs
both alike. `--quick` shows that it runs; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay

HIDDEN = 256


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trainer_for(classes: int, size: int | None) -> relay.Trainer:
    """A trainer of an embedding, a layer and a head."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, classes, bias=False))
    modules = [nn.Embedding(256, HIDDEN), nn.Linear(HIDDEN, HIDDEN), head]
    return relay.Trainer(
        modules, cross_entropy, optimizer=relay.SGD(lr=0.1), microbatches=1, head_chunk_tokens=size, recompute=False
    )


def compared(classes: int, size: int, positions: int, pairs: int) -> tuple[float, int, int]:
    """The ratio of times, and the device's peak with chunks and without."""
    ids = torch.randint(0, 256, (1, positions))
    with trainer_for(classes, size) as chunked, trainer_for(classes, None) as whole:
        peaks = [one.step((ids, ids)).device_peak_bytes for one in (chunked, whole)]
        ratios = []
        for _ in range(pairs):
            seconds = []
            for one in (chunked, whole):
                start = perf_counter()
                one.step((ids, ids))
                seconds.append(perf_counter() - start)
            ratios.append(seconds[0] / seconds[1])
    return statistics.median(ratios), peaks[0], peaks[1]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one small vocabulary and one size of chunk")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    figures = []
    cases = [(4096, 128)] if options.quick else [(32768, 512), (32768, 128), (131072, 512), (131072, 128)]
    print(f"{'classes':>8} {'chunk':>6} {'time':>6} {'peak':>9} {'whole':>9}")
    for classes, size in cases:
        ratio, peak, whole = compared(classes, size, 256 if options.quick else 2048, 1 if options.quick else 7)
        print(f"{classes:>8} {size:>6} {ratio:>6.2f} {peak / 2**20:>6.0f} MB {whole / 2**20:>6.0f} MB")
        names = ("classes", "chunk_tokens", "time_ratio", "chunked_peak_bytes", "whole_peak_bytes")
        figures.append(dict(zip(names, (classes, size, ratio, peak, whole), strict=True)))
    if options.json:
        options.json.write_text(json.dumps({"head_chunks": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
