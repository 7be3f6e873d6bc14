"""A checkpoint is read tensor by tensor into what is there already: resuming needs no second copy of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support import reference  # noqa: F401  (sets torch to one thread)
from tests.support.zoo.plain_models import Build

PROCESS = Path("/proc/self/status")


def anonymous() -> int:
    """Bytes of this process that are no file's: pages of a mapped checkpoint are the system's to drop."""
    return int(PROCESS.read_text().split("RssAnon:")[1].split()[0]) * 1024


def peak_during(work: Callable[[], object]) -> int:
    """Bytes beyond those before, at most, while it works."""
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


@pytest.mark.skipif(not PROCESS.exists() or "RssAnon:" not in PROCESS.read_text(), reason="needs Linux's /proc")
def test_a_checkpoint_is_loaded_without_holding_it_a_second_time(build: Build, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024) for _ in range(8)]
    batch = torch.randn(4, 1024), torch.randn(4, 1024)
    trainer = build(layers, nn.functional.mse_loss, microbatches=1)
    trainer.step(batch)
    trainer.save(tmp_path / "checkpoint").wait()
    size = sum(file.stat().st_size for file in (tmp_path / "checkpoint").iterdir())
    assert size > 100_000_000
    assert peak_during(lambda: trainer.load(tmp_path / "checkpoint")) < size / 4
