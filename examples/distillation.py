"""Knowledge distillation: a small model learns from the outputs of a large one, and both are relayed.

The teacher is trained on text first. Then, for each batch, its logits are computed by `trainer.predict`, layer by
layer, and the student is trained on two terms: the divergence of its softened distribution from the teacher's, and the
usual cross-entropy. The text is the source of a module of Python's standard library, of which a tenth is held out. For
comparison another student is trained on the cross-entropy alone.

    python examples/distillation.py --steps 200
"""

from __future__ import annotations

import argparse
import inspect
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

import relay
from relay.models import GPT


class Student(nn.Module):
    """A GPT whose loss is that of distillation wherever the batch has the teacher's logits."""

    def __init__(self, model: GPT, temperature: float = 2.0, share: float = 0.7) -> None:
        super().__init__()
        self.model, self.temperature, self.share = model, temperature, share

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, teacher_logits: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        logits = self.model(input_ids).logits
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        if teacher_logits is not None:
            softened = log_softmax(logits / self.temperature, dim=-1).flatten(0, 1)
            target = softmax(teacher_logits / self.temperature, dim=-1).flatten(0, 1)
            divergence = kl_div(softened, target, reduction="batchmean") * self.temperature**2
            loss = self.share * divergence + (1 - self.share) * loss
        return {"loss": loss, "logits": logits}


@dataclass(frozen=True)
class Losses:
    """Held-out losses in nats a byte."""

    teacher: float
    distilled: float
    alone: float


class Text:
    """Batches of one text. A tenth of it, its end, is held out."""

    def __init__(self, rows: int, length: int) -> None:
        text = torch.frombuffer(bytearray(inspect.getsource(textwrap).encode()), dtype=torch.uint8).long()
        cut = len(text) - max(len(text) // 10, 2 * length)
        self.rows, self.length = rows, length
        self.parts = {"train": text[:cut], "held out": text[cut:]}

    def batch(self, part: str, number: int) -> dict[str, torch.Tensor]:
        """The batch of a step: it depends on its number alone."""
        text = self.parts[part]
        generator = torch.Generator().manual_seed(number)
        starts = torch.randint(len(text) - self.length - 1, (self.rows,), generator=generator)
        rows = torch.stack([text[start : start + self.length + 1] for start in starts])
        return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def main(arguments: Sequence[str] | None = None) -> Losses:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of the teacher and of each student")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few seconds: small models, few steps")
    options = parser.parse_args(arguments)
    steps = 12 if options.quick else options.steps
    layers, hidden, length = (3, 32, 16) if options.quick else (8, 128, 64)
    text = Text(rows=8, length=length)
    held_out = [text.batch("held out", number) for number in range(4)]

    def gpt(layers: int, hidden: int) -> GPT:
        torch.manual_seed(0)
        return GPT(layers=layers, hidden=hidden, heads=2, sequence=length)

    def trainer_of(model: nn.Module) -> relay.Trainer:
        return relay.Trainer(model, device=options.device, optimizer=relay.AdamW(lr=3e-3), microbatches=2)

    def held_out_loss(trainer: relay.Trainer) -> float:
        return sum(trainer.evaluate(batch).loss for batch in held_out) / len(held_out)

    teacher = trainer_of(gpt(layers, hidden))
    for step in range(steps):
        teacher.step(text.batch("train", step))
    found = {"teacher": held_out_loss(teacher)}
    for name in ("distilled", "alone"):
        student = trainer_of(Student(gpt(2, hidden // 2)))
        for step in range(steps):
            batch = text.batch("train", step)
            if name == "distilled":
                batch["teacher_logits"] = teacher.predict(batch).logits
            student.step(batch)
        found[name] = held_out_loss(student)
        student.close()
    teacher.close()
    losses = Losses(**found)
    print(f"held-out loss: teacher {losses.teacher:.3f}, student distilled {losses.distilled:.3f}, "
          f"student alone {losses.alone:.3f}")  # fmt: skip
    return losses


if __name__ == "__main__":
    main()
