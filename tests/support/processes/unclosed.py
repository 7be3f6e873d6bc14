"""A script that trains on devices, has work queued on more, and closes nothing: `test_process_end` runs it.

For each way to end there is a child process, forked before any thread runs: what costs (imports, and what is made on
first use) is paid once, by a step on a device without threads. At its end every kind of queue is open. Prints, as JSON,
the exit code of each child by its way to end: negative where a signal ended it, as an alarm does with one that hangs.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading

import torch
from torch import nn

import relay
from hal import registry

PATIENCE = 240  # seconds until a child that hangs is ended
WAYS = ("end", "raise", "exit", "stored exception", "saving", "failing to save", "failing unseen")

folder, training, queueing = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
torch.set_num_threads(1)
batch = (torch.randn(4, 4), torch.randn(4, 3))
relay.Trainer([nn.Linear(4, 3)], nn.functional.mse_loss, device="sim", microbatches=1).step(batch)
assert threading.active_count() == 1
children = {}
for way in WAYS:
    child = os.fork()
    if not child:
        break
    children[child] = way
else:
    way = ""

if way:
    signal.alarm(PATIENCE)
    trainers = []
    for device in training:
        trainer = relay.Trainer([nn.Linear(4, 3)], nn.functional.mse_loss, device=device, microbatches=1)
        trainer.step(batch)
        trainers.append(trainer)
    opened = [registry.open(device) for device in queueing]
    views = [device.alloc(64).view(0, (16,), torch.float32) for device in opened]
    for _ in range(200):
        for device, view in zip(opened, views, strict=True):
            device.queue("compute").fill(view, 1.0)
    if way == "raise":
        raise RuntimeError("the script failed")
    if way == "exit":
        sys.exit(3)
    if way == "stored exception":
        try:
            trainer.step((torch.randn(4, 5), batch[1]))
        except Exception as failure:
            stored = failure
    if way == "saving":
        trainers[0].save(os.path.join(folder, "checkpoint"), background=True)
    if way.startswith("failing"):
        # As on a disk that fills up: the shards are there, the rest is not.
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, limit[1]))
        saving = trainers[0].save(os.path.join(folder, way), background=True)
        if way == "failing unseen":
            del trainers[0], saving, trainer
else:
    print(json.dumps({name: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, name in children.items()}))
