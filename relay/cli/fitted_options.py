"""The options of `relay train --fit`: those given, and for the others what `relay.fit` chooses for this machine.

A run that is resumed keeps what its checkpoint was trained with. Nothing is trained here. Invariant: an option that is
given, on the command line or in a file, is never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch

import relay
from relay.checkpoint_manager import newest
from relay.cli.shared_options import COMMAND_LINE
from relay.fitting.fit import FREE
from relay.models import GPT

CHOSEN = (*FREE, "microbatches")


def fitted(
    options: dict[str, Any], given: Collection[str], checkpoints: Path, log: Callable[[str], None]
) -> dict[str, Any]:
    """The options of a run with the free ones chosen. `log` receives the reasons."""
    with torch.device("meta"):
        sizes = {name: options[name] for name in ("layers", "hidden", "heads", "dropout")}
        model = GPT(vocabulary=256, sequence=options["seq"], tied=True, **sizes)
        tokens = torch.zeros(options["batch"], options["seq"], dtype=torch.long)
    fixed = {
        name: options[name]
        for name in COMMAND_LINE
        if name not in ("device", "capacity", "host_memory") and (name in given or name not in CHOSEN)
    }
    resume = newest(checkpoints) if options["resume"] else None
    found = relay.fit(
        model, {"input_ids": tokens, "labels": tokens}, device=options["device"], capacity=options["capacity"],
        host_memory=options["host_memory"], resume=resume, **fixed,
    )  # fmt: skip
    for reason in found.reasons:
        log(f"fit: {reason}")
    return options | {name: getattr(found.expected.run, name) for name in CHOSEN if name not in given}
