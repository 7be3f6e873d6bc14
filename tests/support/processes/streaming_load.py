"""Loads a checkpoint; prints, as JSON, its bytes and the most memory that took. `test_streaming_load` runs it.

Memory is that of the process, so nothing else runs in it. Counted are pages that belong to no file: those of a mapped
checkpoint are the system's to drop.
"""

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import relay


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    return int(Path("/proc/self/status").read_text(encoding="utf-8").split("RssAnon:")[1].split()[0]) * 1024


def peak_during(work: Callable[[], object]) -> int:
    """The most bytes, beyond those before, while `work` runs."""
    before, most, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):
            most = max(most, anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return max(most, anonymous()) - before


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024) for _ in range(8)]
    batch = torch.randn(4, 1024), torch.randn(4, 1024)
    with relay.Trainer(layers, nn.functional.mse_loss, microbatches=1) as trainer:
        trainer.step(batch)
        trainer.save(folder / "checkpoint").wait()
        size = sum(file.stat().st_size for file in (folder / "checkpoint").iterdir())
        peak = peak_during(lambda: trainer.load(folder / "checkpoint"))
    print(json.dumps({"size": size, "peak": peak}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
