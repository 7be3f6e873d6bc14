"""Rows of data as tokens with labels: tokenised once, and read from a cache by later runs of the same kind.

Tokens that are not trained have the label -100. Rows longer than the sequence are cut (plain text into several).
Invariant: every row that results has something to train, and tells which file and row it came from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relay.errors import RelayError
from relay.finetuning.data.chat import Trained, conversation, render, rendered_text, set_template, spans_trained
from relay.finetuning.data.data_error import DataError
from relay.finetuning.data.data_files import DataFile, require_datasets
from relay.finetuning.data.fields import Fields
from relay.finetuning.data.labels import Classes

IGNORED = -100
"""The label of what is not trained, as PyTorch's cross-entropy has it."""

FORMAT = 2
"""Changes when rows of the same data come out otherwise, so that an older cache is not read."""


class Row(NamedTuple):
    """One row: its tokens, its labels, and whether it was cut."""

    tokens: list[int]
    labels: Any
    cut: bool = False


class Tokenised(NamedTuple):
    """All rows, and how many were left out since nothing to train is within the sequence (with the first of them)."""

    rows: Any
    dropped: int
    first_dropped: str
    sources: int


class Tokeniser:
    """Turns rows of data into tokens and labels.

    `length` is the most tokens of a row. Raises DataError for a row that cannot be used.
    """

    def __init__(
        self, tokenizer: Any, task: str, fields: Fields, length: int, vocabulary: int, classes: Classes
    ) -> None:
        self._tokenizer = tokenizer
        self._task = task
        self._fields = fields
        self._length = length
        self._vocabulary = vocabulary
        self._classes = classes
        by_kind: dict[str, Callable[[Mapping[str, Any]], list[Row]]] = {
            "messages": self._conversation, "pair": self._pair, "text": self._text, "label": self._labelled,
        }  # fmt: skip
        self._rows_of = by_kind[fields.kind]
        if task == "seq2seq" and fields.kind == "pair":
            self._rows_of = self._source_and_target

    def key(self) -> str:
        """A key of all that decides the tokens, besides the data."""
        tokenizer = self._tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
        facts = [FORMAT, type(tokenizer).__name__, content, tokenizer.chat_template, tokenizer.eos_token]
        facts += [
            self._task,
            list(self._fields),
            self._length,
            self._vocabulary,
            sorted(map(str, self._classes.numbers.items())),
        ]
        return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()

    def rows(self, content: Mapping[str, Any], file: str, number: int) -> list[Row]:
        """The rows that one row of data gives: none if nothing to train is within the sequence."""
        fields = self._fields
        field = fields.messages or fields.completion or fields.text
        for name in fields[1:]:
            if name and content.get(name) is None:
                raise DataError("The field is empty.", file=file, row=number, field=name)
        try:
            rows = self._rows_of(content)
        except ValueError as wrong:
            raise DataError(str(wrong), file=file, row=number, field=field) from wrong
        for row in rows:
            if row.tokens and max(row.tokens) >= self._vocabulary:
                raise DataError(
                    f"The tokenizer gives the token {max(row.tokens)}, and the model's vocabulary has "
                    f"{self._vocabulary}: it is not this model's tokenizer.", file=file, row=number, field=field,
                )  # fmt: skip
            if not row.cut and self._masked(row):
                raise DataError(
                    "All tokens of the row are masked, so it trains nothing.", file=file, row=number, field=field
                )
        return [row for row in rows if not self._masked(row)]

    def _masked(self, row: Row) -> bool:
        if not row.tokens:
            return True
        if self._task == "causal":  # the first token is predicted from nothing
            return all(label == IGNORED for label in row.labels[1:])
        return isinstance(row.labels, list) and all(label == IGNORED for label in row.labels)

    def _cut(self, found: Trained) -> list[Row]:
        labels = [token if trained else IGNORED for token, trained in zip(*found, strict=True)]
        cut = len(labels) > self._length
        return [Row(found.tokens[: self._length], labels[: self._length], cut)]

    def _ended(self, found: Trained) -> Trained:
        """With the token that ends a text."""
        end = self._tokenizer.eos_token_id
        if end is None or (found.tokens and found.tokens[-1] == end):
            return found
        return Trained([*found.tokens, end], [*found.trained, True])

    def _conversation(self, content: Mapping[str, Any]) -> list[Row]:
        messages = conversation(content[self._fields.messages])
        if self._task == "seq2seq":
            if messages[-1]["role"] != "assistant":
                raise ValueError("The last message must be the assistant's: it is what is learned.")
            before = rendered_text(self._tokenizer, messages[:-1], ask=True)
            return self._two(before, str(messages[-1]["content"]))
        return self._cut(render(self._tokenizer, messages))

    def _pair(self, content: Mapping[str, Any]) -> list[Row]:
        prompt, completion = content[self._fields.prompt], content[self._fields.completion]
        if isinstance(prompt, (list, tuple)) and isinstance(completion, (list, tuple)):
            if not getattr(self._tokenizer, "chat_template", None):
                set_template(self._tokenizer, None)
            given = conversation(prompt)
            return self._cut(render(self._tokenizer, [*given, *conversation(completion)], first=len(given)))
        if isinstance(prompt, (list, tuple)) != isinstance(completion, (list, tuple)):
            names = f"{self._fields.prompt!r} and {self._fields.completion!r}"
            raise ValueError(f"Of {names} one is a list of messages, and both must be, or both be texts.")
        prompt, completion = self._string(prompt), self._string(completion)
        whole = prompt + completion
        if not completion.strip():
            return [Row([0], [IGNORED])]
        return self._cut(self._ended(spans_trained(self._tokenizer, whole, [(len(prompt), len(whole))], special=True)))

    def _text(self, content: Mapping[str, Any]) -> list[Row]:
        if self._task == "seq2seq":
            raise ValueError("A sequence-to-sequence model learns from --prompt and --completion, not from plain text.")
        text = self._string(content[self._fields.text])
        tokens = list(self._tokenizer(text)["input_ids"]) if text.strip() else []
        tokens, _ = self._ended(Trained(tokens, [True] * len(tokens)))
        if len(tokens) < 2:
            return [Row([0], [IGNORED])]
        parts = [tokens[at : at + self._length] for at in range(0, len(tokens), self._length)]
        return [Row(part, list(part)) for part in parts if len(part) > 1]

    def _source_and_target(self, content: Mapping[str, Any]) -> list[Row]:
        return self._two(self._string(content[self._fields.prompt]), self._string(content[self._fields.completion]))

    def _two(self, source: str, target: str) -> list[Row]:
        tokens = list(self._tokenizer(source)["input_ids"])
        labels = list(self._tokenizer(text_target=target)["input_ids"]) if target.strip() else [IGNORED]
        cut = max(len(tokens), len(labels)) > self._length
        return [Row(tokens[: self._length], labels[: self._length], cut)]

    def _labelled(self, content: Mapping[str, Any]) -> list[Row]:
        text, label = content[self._fields.text], content[self._fields.label]
        if self._task == "token-classification":
            if not isinstance(text, (list, tuple)) or len(text) != len(label):
                raise ValueError(
                    f"A token classifier takes a list of words with as many labels; received {text!r:.60}."
                )
            found = self._tokenizer([self._string(word) for word in text], is_split_into_words=True)
            tokens, labels, before = list(found["input_ids"]), [], None
            for word in found.word_ids():
                labels.append(IGNORED if word is None or word == before else self._classes.numbers[label[word]])
                before = word
        else:
            tokens = list(self._tokenizer(self._string(text))["input_ids"])
            value = float(label) if self._task == "regression" else self._classes.numbers[label]
            return [Row(tokens[: self._length], value, len(tokens) > self._length)]
        return [Row(tokens[: self._length], labels[: self._length], len(tokens) > self._length)]

    @staticmethod
    def _string(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"The field must be a text; received {type(value).__name__}: {value!r:.60}.")
        return value


def tokenise(files: Sequence[DataFile], tokeniser: Tokeniser, scalar: type | None, cache: str | None) -> Tokenised:
    """All files as one dataset of `input_ids`, `labels`, `source` (file and row) and `cut`.

    `scalar` is the type of a label that is one number. Raises DataError where no row is left.
    """
    datasets = require_datasets()
    parts, dropped, first = [], 0, ""
    label = datasets.Value("float32" if scalar is float else "int32")
    features = datasets.Features(
        input_ids=datasets.Sequence(datasets.Value("int32")), labels=label if scalar else datasets.Sequence(label),
        file=datasets.Value("int32"), row=datasets.Value("int64"), cut=datasets.Value("bool"),
        kept=datasets.Value("bool"),
    )  # fmt: skip
    for number, file in enumerate(files):
        key = hashlib.sha256(f"{tokeniser.key()} {file.key} {number}".encode()).hexdigest()[:32]
        where = _cache_file(cache, file, key)

        def rows_of(
            batch: dict[str, list[Any]], indices: list[int], file: DataFile = file, number: int = number
        ) -> Any:
            found: dict[str, list[Any]] = {name: [] for name in features}
            for at, index in enumerate(indices):
                rows = tokeniser.rows({name: column[at] for name, column in batch.items()}, file.name, index + 1)
                nothing = [] if scalar is None else scalar(0)
                for row in rows or [Row([], nothing, True)]:
                    values = (row.tokens, row.labels, number, index + 1, row.cut, bool(rows))
                    for name, value in zip(features, values, strict=True):
                        found[name].append(value)
            return found

        part = file.rows.map(
            rows_of, batched=True, with_indices=True, remove_columns=file.rows.column_names, features=features,
            cache_file_name=where, new_fingerprint=key,
        )  # fmt: skip
        kept = part["kept"]
        left = [index for index, keep in enumerate(kept) if keep]
        if len(left) < len(part):
            lost = next(index for index, keep in enumerate(kept) if not keep)
            first = first or f"{file.name}, row {part[lost]['row']}"
            dropped += len(part) - len(left)
            part = part.select(left)
        parts.append(part)
    rows = datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    if not len(rows):
        raise DataError("Nothing to train is within the sequence in any row. Give a larger --seq.", file=files[0].name)
    return Tokenised(rows, dropped, first, sum(len(file.rows) for file in files))


def _cache_file(cache: str | None, file: DataFile, key: str) -> str:
    """Where the tokenised rows of a file are kept."""
    datasets = require_datasets()
    folder = Path(cache) if cache is not None else Path(datasets.config.HF_DATASETS_CACHE) / "relay"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as wrong:
        raise RelayError(
            f"The cache {folder} for tokenised data cannot be made: {wrong.strerror}. Give --cache."
        ) from wrong
    return str(folder / f"{Path(file.name).stem}-{key}.arrow")
