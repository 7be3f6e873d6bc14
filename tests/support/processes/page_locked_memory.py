"""Trains with page-locked memory and prints, as JSON, what the kernel counts as locked; `test_host_memory` runs it.

The kernel counts for a whole process, so it is measured in one where nothing else locks memory. Takes the options of a
trainer as JSON. Prints, for each of three trainers made one after another: the bytes locked before it, what the trainer
counts itself, the number of its pieces, the bytes of what crosses the link, the bytes locked after a step, and those
locked once it is closed.
"""

import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import relay
from relay.models import GPT
from tests.support import reference

CROSSING = {
    "rounded weights", "buffers", "gradients", "gradients in transit", "stash of boundary activations",
    "tied gradients of each micro-batch",
}  # fmt: skip
BATCH = reference.text_batches(1)[0]


def locked_bytes() -> int:
    """What the kernel counts as locked in this process."""
    gc.collect()
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmLck:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmLck")


def crossing_bytes(trainer: relay.Trainer) -> int:
    """Whole states, and of the weights those that a kernel takes as they are: a rounded one's master does not cross."""
    compiled = trainer._compiler.prepare(BATCH).compiled[0]
    taken = {
        item
        for stage in compiled.stages
        for item in zip((*stage.parameters, *stage.buffers), stage.dtypes, strict=True)
    }
    weights = [tensor for name, tensor in trainer._model.named_parameters() if (name, tensor.dtype) in taken]
    whole = sum(size for state, _, size in trainer.ledger.rows() if state in CROSSING)
    return whole + sum(-(-tensor.nbytes // 64) * 64 for tensor in weights)


def measure(options: dict[str, Any]) -> dict[str, int]:
    """The figures of one trainer."""
    before = locked_bytes()
    with relay.Trainer(
        GPT(vocabulary=64, layers=3, hidden=16, heads=2, sequence=12), device="cpu:discrete", **options
    ) as trainer:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.step(BATCH)
        host = trainer._session.host
        pieces = host._locked._pieces
        assert sum(size for _, size in pieces.values()) == host.page_locked
        figures = {
            "before": before,
            "counted": host.page_locked,
            "pieces": len(pieces),
            "crossing": crossing_bytes(trainer),
            "during": locked_bytes(),
        }
        del pieces, host
    del trainer
    return {**figures, "after": locked_bytes()}


if __name__ == "__main__":
    print(json.dumps([measure(json.loads(sys.argv[1])) for _ in range(3)]))
