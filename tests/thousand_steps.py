"""Trains a thousand steps with checkpoints; `test_endurance` runs it in a process that holds nothing else.

Prints, as JSON, what the process holds after 200 steps and after all: resident bytes, open files, threads, and the
bytes of the ledger.
"""

import gc
import json
import os
import sys
import threading
from pathlib import Path

import torch
from torch import nn

import relay

PROCESS = Path("/proc/self")


def resident() -> int:
    """Bytes of this process in memory."""
    return int((PROCESS / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(folder: Path, options: dict[str, object]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 2)]
    batch = torch.randn(8, 8), torch.randn(8, 2)
    figures = []
    with relay.Trainer(layers, nn.functional.mse_loss, microbatches=2, **options) as trainer:
        checkpoints = relay.Checkpoints(folder, trainer, every=50)
        with checkpoints:
            for step in range(1000):
                trainer.step(batch)
                checkpoints.after_step()
                if step in (199, 999):
                    checkpoints.save()  # none is being written when it is counted
                    gc.collect()
                    files = len(list((PROCESS / "fd").iterdir()))
                    figures.append((resident(), files, threading.active_count(), trainer.ledger.total))
    print(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
