"""Trains in processes that are killed by SIGKILL at random moments, and goes on each time: for `test_chaos`.

    python chaos.py FOLDER KILLS SEED

First a run without kills; then runs whose processes are killed until there were KILLS kills. Whenever a run comes to
its end, its last checkpoint must hold the bytes of the first run's. Prints one JSON object. The processes are forked
from one that has imported everything, which is all that makes fifty of them affordable.
"""

import json
import os
import random
import select
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import torch
from torch import nn

import relay
from relay.data.resumable import ResumableBatches, ShuffleSampler
from relay.optim import fused

STEPS = 40


Data = torch.utils.data.TensorDataset


def build() -> tuple[relay.Trainer, Data]:
    """A small run, ready for its first step."""
    torch.manual_seed(0)
    middle = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2)]
    layers = [nn.Linear(4, 16), *middle, nn.Linear(16, 2)]
    data = Data(torch.randn(60, 4), torch.randn(60, 2))
    options = {"microbatches": 2, "clip_grad_norm": 1.0, "state_dtype": "int8", "seed": 3}
    trainer = relay.Trainer(layers, nn.functional.mse_loss, **options)
    trainer.prepare(data[:8])
    return trainer, data


def train(trainer: relay.Trainer, data: Data, folder: Path, begun: int) -> None:
    """One process's life: go on from what is there, to the end. Writes a byte into `begun` after each step."""
    loader = torch.utils.data.DataLoader(data, batch_size=8, drop_last=True, sampler=ShuffleSampler(len(data), seed=1))
    batches = ResumableBatches(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, STEPS)
    with trainer, relay.Checkpoints(folder, trainer, every=1, data=batches, schedule=schedule) as checkpoints:
        checkpoints.resume()
        for batch in batches:
            if trainer.steps >= STEPS:
                break
            trainer.step(tuple(batch))
            schedule.step()
            checkpoints.after_step()
            os.write(begun, b"s")


def start(folder: Path) -> tuple[int, int]:
    """Fork a process that trains. Its exit code is 0 when it came to the end, 1 for an exception.

    Returns its number, and the end of a pipe that has something to read from its first step on.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        # A checkpoint that a kill cut short has no name yet, so nothing damaged is ever found.
        warnings.simplefilter("error", RuntimeWarning)
        train(*build(), folder, writing)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def unfinished(run: Path) -> set[tuple[Path, int]]:
    """Files of checkpoints being written."""
    return {(file, file.stat().st_mtime_ns) for file in run.glob(".*.partial/*")} if run.is_dir() else set()


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a run's last checkpoint."""
    return {file.name: file.read_bytes() for file in (folder / f"step-{STEPS:09}").iterdir()}


def main() -> None:
    """Kill, and count."""
    folder, kills, rolls = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)
    fused.matches_torch()
    warm, _ = build()  # what is imported and compiled for it is there in every child
    warm.close()
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    began = time.perf_counter()
    child, pipe = start(folder / "calm")
    assert os.waitpid(child, 0)[1] == 0, "the run without kills failed"
    os.close(pipe)
    longest = time.perf_counter() - began
    expected = contents(folder / "calm")
    counted = {"kills": 0, "while_writing": 0, "runs": 0}
    run = folder / "chaos"
    while True:
        before = unfinished(run)
        child, pipe = start(run)
        if counted["kills"] < kills:
            # Some are killed anywhere, the beginning included, most once they have made a step.
            training = rolls.random() < 0.75
            if training:
                select.select([pipe], [], [])
            time.sleep(rolls.uniform(0, longest / 4))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        os.close(pipe)
        if os.WIFSIGNALED(status):
            counted["kills"] += 1
            counted["while_writing"] += not unfinished(run) <= before
            continue
        assert os.WEXITSTATUS(status) == 0, "a process failed to go on"
        assert contents(run) == expected, "a run that was killed ended elsewhere"
        counted["runs"] += 1
        shutil.rmtree(run)
        if counted["kills"] >= kills:
            break
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
