"""A trained model in a folder: `model.safetensors` (the weights) and `config.json` (how to build the GPT).

It is not a checkpoint: no optimizer state is kept and training cannot resume from it. Invariant: a file is
either the old one or the new one, whole; never half-written, whatever interrupts the writing.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from relay.checkpoint.atomic_file import put_in_place, write_whole
from relay.errors import RelayError
from relay.models import GPT

WEIGHTS = "model.safetensors"
CONFIGURATION = "config.json"


class RunFolderError(RelayError):
    """A folder that holds no trained model, or one that cannot be read.

    What to do: give the folder that `relay train --out` wrote, or train again.
    """


def prepare(folder: Path) -> None:
    """Make the folder and see that it can be written: better now than after the training."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def save(folder: Path, state: Mapping[str, torch.Tensor], configuration: Mapping[str, Any]) -> None:
    """Write both files, each under a temporary name first."""
    distinct: dict[str, torch.Tensor] = {}
    stored: set[tuple[int, torch.Size]] = set()
    for name, tensor in state.items():
        # A tied matrix appears under two names. The format refuses that; the first name is enough to load it.
        place = (tensor.data_ptr(), tensor.shape)
        if place not in stored:
            stored.add(place)
            distinct[name] = tensor.detach().cpu().contiguous()
    text = json.dumps(dict(configuration), indent=2) + "\n"
    write_whole(folder / CONFIGURATION, text)
    put_in_place(folder / WEIGHTS, lambda path: safetensors.torch.save_file(distinct, path))


def load(folder: Path) -> GPT:
    """The trained GPT, in plain PyTorch on the CPU, ready to be run."""
    for name in (CONFIGURATION, WEIGHTS):
        if not (folder / name).is_file():
            raise RunFolderError(
                f"There is no trained model in '{folder}': {name} is missing. Train one with "
                f"`relay train --out {folder}`, or give the folder of an earlier run."
            )
    try:
        model = GPT(**json.loads((folder / CONFIGURATION).read_text(encoding="utf-8")))
    except (ValueError, TypeError, RuntimeError) as wrong:
        raise RunFolderError(f"'{folder / CONFIGURATION}' does not describe a GPT: {wrong}") from wrong
    try:
        state = safetensors.torch.load_file(folder / WEIGHTS)
        missing, unexpected = model.load_state_dict(state, strict=False)
    except (safetensors.SafetensorError, RuntimeError) as wrong:
        raise RunFolderError(f"'{folder / WEIGHTS}' does not fit '{folder / CONFIGURATION}': {wrong}") from wrong
    # The second name of a tied matrix is no parameter of its own.
    missing = sorted(set(missing) & {name for name, _ in model.named_parameters()})
    if missing or unexpected:
        raise RunFolderError(
            f"'{folder / WEIGHTS}' does not fit '{folder / CONFIGURATION}': "
            f"missing {missing or 'nothing'}, unexpected {sorted(unexpected) or 'nothing'}."
        )
    return model.eval()
