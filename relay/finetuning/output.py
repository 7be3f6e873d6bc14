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
from relay.models.save_pretrained import save_pretrained
from relay.trainer import Trainer


def save_model(trainer: Trainer, tokenizer: Any, folder: Path) -> None:
    """Write the model as it is now (its adapters, if it has any) with the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    trainer.save_pretrained(folder)
    tokenizer.save_pretrained(str(folder))


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
