"""Trains 1,200 steps, saving on the way where it is given a folder; `test_endurance` runs it in a process of its own.

What other tests leave behind would be counted too. Prints, as JSON, what the process holds after 200 steps and at the
end: resident bytes, open files, Python's threads and the system's, and the bytes of the ledger.
"""

import contextlib
import gc
import json
import os
import sys
import threading
from typing import Any

import torch
from torch import nn

import relay


def measured(trainer: relay.Trainer) -> tuple[int, ...]:
    """The figures."""
    trainer.synchronize()
    gc.collect()
    with open("/proc/self/statm", encoding="ascii") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    return resident, files, threading.active_count(), threads, trainer.ledger.total


def main(options: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)), nn.Linear(8, 2)]
    batch = torch.randn(8, 8), torch.randn(8, 2)
    figures = []
    with relay.Trainer(layers, nn.functional.mse_loss, microbatches=2, **options) as trainer:
        checkpoints = relay.Checkpoints(folder, trainer, every=50) if folder else None
        with checkpoints or contextlib.nullcontext():
            for step in range(1, 1201):
                trainer.step(batch)
                if checkpoints is not None:
                    checkpoints.after_step()
                if step in (200, 1200):
                    if checkpoints is not None:
                        checkpoints.save()  # none is being written when it is counted
                    figures.append(measured(trainer))
    print(json.dumps(figures))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
