"""A thousand steps take no more memory, files or threads than ten."""

import gc
import os
import threading
from pathlib import Path

import pytest
import reference  # noqa: F401  (sets torch to one thread)
import torch
from torch import nn

import relay

PROCESS = Path("/proc/self")


def resident() -> int:
    """Bytes of this process in memory."""
    return int((PROCESS / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not PROCESS.exists(), reason="needs /proc")
@pytest.mark.parametrize("options", [{}, {"device": "cpu:discrete", "stash": "host", "clip_grad_norm": 1.0}])
def test_a_thousand_steps_with_checkpoints_stay_as_they_began(tmp_path: Path, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 2)]
    batch = torch.randn(8, 8), torch.randn(8, 2)
    figures = []
    with relay.Trainer(layers, nn.functional.mse_loss, microbatches=2, **options) as trainer:
        checkpoints = relay.Checkpoints(tmp_path, trainer, every=50)
        with checkpoints:
            for step in range(1000):
                trainer.step(batch)
                checkpoints.after_step()
                if step in (199, 999):
                    checkpoints.save()  # none is being written when it is counted
                    gc.collect()
                    files = len(list((PROCESS / "fd").iterdir()))
                    figures.append((resident(), files, threading.active_count(), trainer.ledger.total))
    (memory, files, threads, ledger), after = figures
    assert after[1:] == (files, threads, ledger)
    assert after[0] - memory < 2 * 2**20, f"{after[0] - memory:,} bytes more"
