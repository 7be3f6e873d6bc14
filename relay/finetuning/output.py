"""What a fine-tuning leaves: a Hugging Face folder (or a folder of adapters), its tokenizer and a model card.

Weights are written by `Trainer.save_pretrained`. Invariant: the card states the data, the settings and the figures of
the run as they were.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from relay.checkpoint.atomic_file import write_whole
from relay.errors import RelayError
from relay.finetuning.model_folder import ModelFolder
from relay.models.save_pretrained import save_pretrained
from relay.trainer import Trainer

ADAPTERS = "adapter_config.json"
"""The file by which peft and transformers know a folder of adapters."""


def save_model(trainer: Trainer, tokenizer: Any, folder: Path, config: Any = None) -> None:
    """Write the model as it is now (its adapters, if it has any) with the tokenizer.

    `config` is written beside adapters for classes, whose names no other file of adapters has.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trainer.save_pretrained(folder)
    if config is not None:
        config.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))


def check_out(out: Path, source: ModelFolder, adapted: bool, plot: str | None) -> None:
    """Raise RelayError for places where a result cannot be written, or would be read as another one."""
    if out.exists() and not out.is_dir():
        raise RelayError(f"--out {out} is a file, and the result is a folder. Give another name.")
    for folder in (source.folder, source.adapter):
        if folder is not None and out.resolve() == folder.resolve():
            raise RelayError(f"--out {out} is the folder of MODEL, which would be overwritten. Give another --out.")
    if adapted != (out / ADAPTERS).is_file() and any((out / name).is_file() for name in (ADAPTERS, "config.json")):
        there, here = ("a whole model", "adapters") if adapted else ("adapters", "a whole model")
        raise RelayError(
            f"--out {out} holds {there} of an earlier run, and this run writes {here}: one would be read for the "
            "other. Give another --out, or remove that folder."
        )
    if plot is not None:
        try:
            Path(plot).parent.mkdir(parents=True, exist_ok=True)
            new = not Path(plot).exists()
            with Path(plot).open("ab"):
                pass
            if new:
                Path(plot).unlink()
        except OSError as wrong:
            raise RelayError(f"--plot {plot} cannot be written: {wrong.strerror}. Give another name.") from wrong


def save_merged(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write a model without adapters with the tokenizer."""
    save_pretrained(model, model.state_dict(), folder)
    tokenizer.save_pretrained(str(folder))


def write_card(folder: Path, base: str, adapters: bool, facts: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Write the model card, README.md. `facts` are the settings and figures, `lines` the report of the data."""
    head = ["---", f"base_model: {json.dumps(base)}", f"library_name: {'peft' if adapters else 'transformers'}"]
    tags = ["relay", "fine-tuned", *(["lora"] if adapters else [])]
    head += [f"tags: [{', '.join(tags)}]", "---", "", f"# {folder.resolve().name}", ""]
    what = "Adapters for" if adapters else "A fine-tuning of"
    text = [*head, f"{what} `{base}`, trained by `relay finetune`.", "", "## Data", "", "```text", *lines, "```", ""]
    for title, table in facts.items():
        text += [f"## {title}", "", "| | |", "| --- | --- |"]
        text += [f"| {name} | {_cell(value)} |" for name, value in table.items() if value is not None]
        text.append("")
    write_whole(folder / "README.md", "\n".join(text))


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
