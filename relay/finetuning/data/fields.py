"""Which fields of the data hold what: conversations, prompts and completions, plain text, labels.

Names that people use are found by themselves; those that are given are used instead. Nothing is tokenised here.
Invariant: all files of a run have the same fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from relay.finetuning.data.data_error import DataError
from relay.finetuning.data.data_files import DataFile
from relay.finetuning.options import FinetuneOptions

MESSAGES = ("messages", "conversations", "conversation", "chat")
PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response"),
    ("question", "answer"), ("input", "output"), ("source", "target"), ("document", "summary"),
    ("article", "highlights"), ("text", "summary"),
)  # fmt: skip
BESIDE = ("input", "context", "system", "system_prompt")
"""Fields that belong to what the model is given, beside a prompt or a conversation."""
TEXTS = ("text", "sentence", "content", "document", "tokens", "words")
LABELS = ("label", "labels", "score", "target", "ner_tags", "tags", "class")


class Fields(NamedTuple):
    """The names of the fields that are used. `kind` is "messages", "pair", "text" or "label"."""

    kind: str
    messages: str = ""
    prompt: str = ""
    completion: str = ""
    text: str = ""
    label: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._asdict().items() if name != "kind" and value)


def find_fields(files: Sequence[DataFile], own: FinetuneOptions, labelled: bool) -> Fields:
    """The fields of the data, those given first. `labelled` is whether the model learns labels.

    Raises DataError for a field that is not there, and for data in which none is recognised.
    """
    if labelled and (unused := [name for name in ("messages", "prompt") if getattr(own, name) is not None]):
        raise DataError(f"Labels are learned from --text, and --{unused[0]} is given. Leave one of them out.")
    columns = list(files[0].rows.column_names)
    found = _found(columns, own, labelled)
    if found is None:
        wanted = (
            "a label (--label) and a text (--text)" if labelled else "--messages, --prompt and --completion, or --text"
        )
        raise DataError(f"No field is recognised among {', '.join(columns)}. Name them: {wanted}.", file=files[0].name)
    for file in files:
        for name in found[1:]:
            if name and name not in file.rows.column_names:
                here = ", ".join(file.rows.column_names)
                raise DataError(f"There is no such field. The file has {here}.", file=file.name, field=name)
        _check_beside(file, found, own)
    return found


def _check_beside(file: DataFile, found: Fields, own: FinetuneOptions) -> None:
    """Raise DataError for a text that belongs to a prompt, where fields are found by themselves and none has it."""
    if found.kind not in ("pair", "messages") or own.prompt or own.messages:
        return
    for name in BESIDE:
        if name in found or name not in file.rows.column_names:
            continue
        row = next((row for row, value in enumerate(file.rows[name], 1) if value), None)
        if row is not None:
            used = found.messages or found.prompt
            flags = "--messages" if found.messages else "--prompt and --completion"
            raise DataError(
                f"The field belongs to what the model is given, and only {used!r} is. Write both as one field, or name "
                f"the fields by {flags} to leave it out.", file=file.name, row=row, field=name,
            )  # fmt: skip


def _found(columns: Sequence[str], own: FinetuneOptions, labelled: bool) -> Fields | None:
    here = set(columns)
    if labelled:
        label = own.label or next((name for name in LABELS if name in here), "")
        text = own.text or next((name for name in TEXTS if name in here and name != label), "")
        return Fields("label", text=text, label=label) if label and text else None
    if own.messages:
        return Fields("messages", messages=own.messages)
    if own.prompt and own.completion:
        return Fields("pair", prompt=own.prompt, completion=own.completion)
    if own.text:
        return Fields("text", text=own.text)
    for name in MESSAGES:
        if name in here:
            return Fields("messages", messages=name)
    for prompt, completion in PAIRS:
        if prompt in here and completion in here:
            return Fields("pair", prompt=prompt, completion=completion)
    text = next((name for name in TEXTS if name in here), "")
    return Fields("text", text=text) if text else None
