"""A trained GPT in a folder: `model.safetensors` (the weights) and `config.json` (the arguments of `GPT`).

It is not a checkpoint: it holds no optimizer state, and training cannot resume from it. Invariant: each file is
replaced as a whole, so an interrupted write leaves the old file in place.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import safetensors
import safetensors.torch
import torch
from msgspec import UNSET, Meta, UnsetType

from hal import schema
from relay.checkpoint.atomic_file import put_in_place, write_whole
from relay.errors import RelayError
from relay.models import GPT
from relay.models.safetensors_file import check_whole

WEIGHTS = "model.safetensors"
CONFIGURATION = "config.json"


_Size = Annotated[int, Meta(ge=1)]


class Configuration(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The schema of `config.json`: arguments of `GPT`. Those that are not there have GPT's own defaults."""

    vocabulary: _Size | UnsetType = UNSET
    layers: Annotated[int, Meta(ge=0)] | UnsetType = UNSET
    hidden: _Size | UnsetType = UNSET
    heads: _Size | UnsetType = UNSET
    sequence: _Size | UnsetType = UNSET
    dropout: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
    tied: bool | UnsetType = UNSET


class RunFolderError(RelayError):
    """A folder that holds no trained model, or one that cannot be read.

    What to do: use the folder that `relay train --out` wrote, or train again.
    """


def prepare(folder: Path) -> None:
    """Create the folder, and raise OSError now if it cannot be written to, rather than after the training."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def save(folder: Path, state: Mapping[str, torch.Tensor], configuration: Mapping[str, Any]) -> None:
    """Write the weights of `state` and the arguments of `GPT`, each file under a temporary name first."""
    distinct: dict[str, torch.Tensor] = {}
    stored: set[tuple[int, torch.Size]] = set()
    for name, tensor in state.items():
        # safetensors refuses one tensor under two names. The first name of a tied matrix is enough to load it.
        storage = (tensor.data_ptr(), tensor.shape)
        if storage not in stored:
            stored.add(storage)
            distinct[name] = tensor.detach().cpu().contiguous()
    text = json.dumps(dict(configuration), indent=2) + "\n"
    write_whole(folder / CONFIGURATION, text)
    put_in_place(folder / WEIGHTS, lambda path: safetensors.torch.save_file(distinct, path))


def load(folder: Path) -> GPT:
    """The trained GPT on the CPU, in evaluation mode. Raises RunFolderError."""
    for name in (CONFIGURATION, WEIGHTS):
        if not (folder / name).is_file():
            raise RunFolderError(
                f"There is no trained model in '{folder}': {name} is missing. Train one with "
                f"`relay train --out {folder}`, or use the folder of an earlier run."
            )
    file = folder / CONFIGURATION
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        configuration = schema.read(raw, Configuration, lambda *where: ValueError(schema.located(*where)))
        model = GPT(**msgspec.to_builtins(configuration))
    except (ValueError, TypeError, RuntimeError) as wrong:
        raise RunFolderError(f"'{file}' does not describe a GPT: {wrong}") from wrong
    try:
        check_whole(folder / WEIGHTS)
        state = safetensors.torch.load_file(folder / WEIGHTS)
        missing, unexpected = model.load_state_dict(state, strict=False)
    except (safetensors.SafetensorError, RuntimeError) as wrong:
        raise RunFolderError(f"'{folder / WEIGHTS}' does not fit '{folder / CONFIGURATION}': {wrong}") from wrong
    # The second name of a tied matrix is not in the file.
    missing = sorted(set(missing) & {name for name, _ in model.named_parameters()})
    if missing or unexpected:
        raise RunFolderError(
            f"'{folder / WEIGHTS}' does not fit '{folder / CONFIGURATION}': "
            f"missing {missing or 'nothing'}, unexpected {sorted(unexpected) or 'nothing'}."
        )
    return model.eval()
