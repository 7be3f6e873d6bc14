"""A fine-tuning by transformers and torch.optim, the whole model in memory, on the batches of `relay finetune`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from relay.finetuning.data.prepare import find_labelling, prepare_data, read
from relay.finetuning.model_folder import AUTO, open_folder
from relay.finetuning.options import settings_of
from tests.support import reference

QUICK: dict[str, Any] = {"fit": False, "samples": 0, "device": "cpu", "batch": 4, "microbatches": 2, "lr": 1e-2}
"""Options of runs that end in seconds."""


def plain(
    folder: Path, data: Path, cache: Path, steps: int, model: Any = None, **options: Any
) -> tuple[list[float], torch.nn.Module]:
    """The losses of the steps and the model after them. `model` is trained if it is given, else that of the folder.

    AdamW with a decay of 0.01 but for vectors, clipping to 1, a cosine after a rise over 3 % of the steps.
    """
    import transformers

    settings = settings_of({"cache": str(cache), **QUICK, **options})
    source, files = open_folder(str(folder)), read([str(data)], str(cache))
    labelling = find_labelling(files, source, settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batches = prepare_data(files, labelling, tokenizer, 256, source.vocabulary, 0, settings).training
    if model is None:
        model = getattr(transformers, AUTO[labelling.task]).from_pretrained(folder, dtype=torch.float32)
    model.train()
    model.config.use_cache = False
    trained = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in trained if one.ndim > 1], "weight_decay": 0.01},
        {"params": [one for one in trained if one.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.0, fused=True)
    rising = math.ceil(0.03 * steps)
    shift = int(labelling.task == "causal")
    found = []
    for step in range(steps):
        falling = 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
        for group in optimizer.param_groups:
            group["lr"] = QUICK["lr"] * ((step + 1) / rising if step < rising else falling)
        pieces = reference.cut(batches.batch(step), 2)
        counts = [len(piece["labels"]) for piece in pieces]
        if labelling.task != "regression":
            counts = [int(piece["labels"][..., shift:].ne(reference.IGNORED).sum()) for piece in pieces]
        total = 0.0
        for piece, count in zip(pieces, counts, strict=True):
            loss = model(**piece).loss * (count / sum(counts))
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return found, model
