"""Texts that the model in training writes: a few held-out prompts, continued greedily through the relay.

Each new token is one pass through the model, on inputs of one length, so one program is compiled.
Invariant: nothing of the run changes.
"""

from __future__ import annotations

from typing import Any

import torch

from relay.finetuning.data.batches import MULTIPLE
from relay.finetuning.data.tokenise import IGNORED
from relay.trainer import Trainer

SHORT = 8
"""Tokens of a prompt taken from plain text, which has no masked part."""


class Sampler:
    """Continues prompts that are taken from rows of data.

    `rows` are the rows, `count` how many prompts to take, and `tokens` the most tokens of a continuation.
    """

    def __init__(
        self,
        rows: Any,
        task: str,
        tokenizer: Any,
        count: int,
        tokens: int,
        longest: int,
        padding: int,
        start: int | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._task = task
        self._padding = padding
        self._start = padding if start is None else start
        self._prompts = [self._prompt(rows[number], longest, tokens) for number in range(min(count, len(rows)))]
        self._tokens = min(tokens, longest - (0 if task == "seq2seq" else max(map(len, self._prompts))))

    def _prompt(self, row: dict[str, Any], longest: int, tokens: int) -> list[int]:
        ids, labels = row["input_ids"], row["labels"]
        if self._task == "seq2seq":
            return list(ids)
        first = next((at for at, label in enumerate(labels) if label != IGNORED), len(ids))
        first = first or min(SHORT, len(ids))
        return list(ids[:first][-max(1, longest - tokens) :])

    def write(self, trainer: Trainer) -> list[str]:
        """Each prompt with its continuation."""
        rows = [
            self._prompts[at % len(self._prompts)]
            for at in range(max(len(self._prompts), trainer.options.microbatches))
        ]
        written: list[list[int]] = [[] for _ in rows]
        longest = max(map(len, rows)) + (0 if self._task == "seq2seq" else self._tokens)
        longest = -(-longest // MULTIPLE) * MULTIPLE
        end = self._tokenizer.eos_token_id
        for _ in range(self._tokens):
            logits = trainer.predict(self._batch(rows, written, longest)).logits
            for at, (prompt, found) in enumerate(zip(rows, written, strict=True)):
                if end is None or not found or found[-1] != end:
                    last = len(found) if self._task == "seq2seq" else len(prompt) + len(found) - 1
                    found.append(int(logits[at, last].argmax()))
            if end is not None and all(found[-1] == end for found in written):
                break
        shown = zip(self._prompts, written, strict=False)
        return [self._tokenizer.decode(prompt) + " => " + self._tokenizer.decode(found) for prompt, found in shown]

    def _batch(self, rows: list[list[int]], written: list[list[int]], longest: int) -> dict[str, torch.Tensor]:
        if self._task == "seq2seq":
            inputs = torch.full((len(rows), longest), self._padding)
            mask = torch.zeros(len(rows), longest, dtype=torch.long)
            decoder = torch.full((len(rows), self._tokens), self._padding)
            for at, (prompt, found) in enumerate(zip(rows, written, strict=True)):
                inputs[at, : len(prompt)] = torch.tensor(prompt)
                mask[at, : len(prompt)] = 1
                decoder[at, : len(found) + 1] = torch.tensor([self._start, *found])
            return {"input_ids": inputs, "attention_mask": mask, "decoder_input_ids": decoder}
        inputs = torch.full((len(rows), longest), self._padding)
        for at, (prompt, found) in enumerate(zip(rows, written, strict=True)):
            inputs[at, : len(prompt) + len(found)] = torch.tensor([*prompt, *found])
        return {"input_ids": inputs}
