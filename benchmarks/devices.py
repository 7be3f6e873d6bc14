"""Two `cpu:discrete` devices on two cores beside one on one core: how much faster several devices are.

`python benchmarks/devices.py` runs both as whole processes, in pairs, and prints the median of their ratios; with
`--quick` one small pair, whose ratio means nothing. The batch is large beside the layers, so that the optimizer takes
little of the step. Needs two idle cores and `taskset`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="One small pair.")
    parser.add_argument("--pairs", type=int, help="How many pairs.  [default: 9, or 1 with --quick]")
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        print(json.dumps(step_seconds(options.worker, options.quick)))
        return
    ratios, shares = [], []
    for _ in range(options.pairs or (1 if options.quick else 9)):
        one, two = (measured(devices, options.quick) for devices in (1, 2))
        ratios.append(one["seconds"] / two["seconds"])
        shares.append(one["optimizer"] / one["seconds"])
    found = {"speed_up": statistics.median(ratios), "ratios": ratios, "optimizer_share": statistics.median(shares)}
    print(
        f"two devices on two cores are {found['speed_up']:.2f} times as fast as one on one core "
        f"(median of {len(ratios)}: {', '.join(f'{ratio:.2f}' for ratio in ratios)}); "
        f"the optimizer takes {found['optimizer_share']:.1%} of a step"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(found))


def measured(devices: int, quick: bool) -> dict[str, float]:
    """The seconds of a step in a process of its own, with a core for each device."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:devices]))
    command = ["taskset", "-c", cores, sys.executable, __file__, "--worker", str(devices)]
    command += ["--quick"] if quick else []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    answer: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def step_seconds(devices: int, quick: bool) -> dict[str, float]:
    """The fastest of a few steps on so many devices."""
    import torch
    from torch import nn

    import relay

    torch.manual_seed(0)
    width, layers, rows = (256, 7, 2048) if quick else (1024, 9, 8192)
    model = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    batch = torch.randn(rows, width), torch.randn(rows, width)
    with relay.Trainer(
        model, nn.functional.mse_loss, device=["cpu:discrete"] * devices, microbatches=8, optimizer=relay.SGD(lr=0.01)
    ) as trainer:
        found = []
        for _ in range(3):
            start = time.perf_counter()
            metrics = trainer.step(batch)
            found.append((time.perf_counter() - start, metrics.optimizer_seconds))
    seconds, optimizer = min(found)
    return {"seconds": seconds, "optimizer": optimizer}


if __name__ == "__main__":
    main()
