"""From data files to the batches of a run: fields, tokens, the held-out rows, and the report.

Each part is a module of its own; this one puts them together. Invariant: the rows that are held out depend on the data
and the seed alone, and are never trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from relay.finetuning.data.batches import Batches
from relay.finetuning.data.chat import set_template
from relay.finetuning.data.data_error import DataError
from relay.finetuning.data.data_files import DataFile, read_files
from relay.finetuning.data.data_report import data_report
from relay.finetuning.data.fields import Fields, find_fields
from relay.finetuning.data.labels import Classes, find_classes, task_of_labels
from relay.finetuning.data.tokenise import Tokenised, Tokeniser, tokenise
from relay.finetuning.model_folder import ModelFolder
from relay.finetuning.options import FinetuneOptions, Settings

LABELLED = ("classification", "regression", "token-classification")


class Labelling(NamedTuple):
    """What is learned, from which fields, and the classes; `new_head` if the folder has no head for it."""

    task: str
    fields: Fields
    classes: Classes
    new_head: bool


class PreparedData(NamedTuple):
    """The batches of a run, the held-out ones, and the report."""

    training: Batches
    held_out: Batches | None
    lines: list[str]
    figures: dict[str, Any]


def find_labelling(files: Sequence[DataFile], model: ModelFolder, settings: Settings) -> Labelling:
    """What the model learns from these files. Raises DataError."""
    own = settings.own
    task: str | None = own.task
    if task is None and own.label is None:
        task = model.own_task
    if task is None:
        fields = find_fields(files, own, labelled=True)
        task = model.own_task if model.own_task in LABELLED else task_of_labels(files, fields.label)
    else:
        if task not in LABELLED and own.label is not None:
            raise DataError(f"A label is given, and task={task!r} learns from text alone.", field=own.label)
        fields = find_fields(files, own, labelled=task in LABELLED)
    if own.pack and task != "causal":
        raise DataError(f"--pack is for causal models, and {model.given} is trained for {task}. Leave it out.")
    for name in ("samples", "sample_tokens"):
        if task in LABELLED and name in settings.own_given and own.samples:
            flag = name.replace("_", "-")
            raise DataError(f"--{flag} is of models that write text, and {model.given} learns {task}. Leave it out.")
    new_head = task in LABELLED and model.stored_task != task
    classes = Classes((), {})
    if task in LABELLED:
        saved = model.config.id2label if task == model.own_task != "regression" else None
        classes = find_classes(files, fields.label, task, saved)
    return Labelling(task, fields, classes, new_head)


def prepare_data(
    files: Sequence[DataFile],
    found: Labelling,
    tokenizer: Any,
    longest: int,
    vocabulary: int,
    padding: int,
    settings: Settings,
) -> PreparedData:
    """The batches of the files, held-out ones apart, and the report. Raises DataError."""
    own = settings.own
    if found.fields.kind == "messages" or (own.chat_template is not None and _holds_messages(files[0], found.fields)):
        set_template(tokenizer, own.chat_template)
    elif own.chat_template is not None:
        raise DataError(f"--chat-template is for conversations, and the fields are {found.fields}. Leave it out.")
    tokeniser = Tokeniser(tokenizer, found.task, found.fields, longest, vocabulary, found.classes)
    scalar = {"classification": int, "regression": float}.get(found.task)
    tokenised = tokenise(files, tokeniser, scalar, own.cache)
    seed = settings.trainer["seed"]
    kept, apart = _split(tokenised, own.held_out, seed)
    rows = tokenised.rows

    def batches(numbers: list[int], buckets: int) -> Batches:
        return Batches(rows.select(numbers), found.task, settings.batch, longest, buckets, own.pack, padding, seed)

    training = batches(kept, own.length_buckets)
    held_out = batches(apart, 1) if apart else None
    names = [file.name for file in files]
    lines, figures = data_report(tokenised, training, held_out, found.fields, found.classes, tokenizer, names)
    if held_out is None:
        _check_without_held_out(own, sum(len(file.rows) for file in files))
    unused = sorted({name for file in files for name in file.rows.column_names} - set(found.fields[1:]))
    if unused:
        lines.insert(1, f"not used        fields {', '.join(unused)}")
    return PreparedData(training, held_out, lines, {"task": found.task, "sequence": longest, **figures})


def _holds_messages(file: DataFile, fields: Fields) -> bool:
    """Whether prompts and completions are lists of messages."""
    return fields.kind == "pair" and isinstance(file.rows[0][fields.prompt], (list, tuple))


def _check_without_held_out(own: FinetuneOptions, count: int) -> None:
    """Raise DataError for options of evaluations where there are no rows to hold out."""
    for name in ("keep_best", "patience", "eval_every"):
        if getattr(own, name):
            flag = name.replace("_", "-")
            raise DataError(f"--{flag} needs held-out rows, and {count} row gives none. Leave it out, or add rows.")


def read(paths: Sequence[str], cache: str | None) -> list[DataFile]:
    """The data files. Raises DataError."""
    return read_files(paths, cache)


def _split(found: Tokenised, share: float, seed: int) -> tuple[list[int], list[int]]:
    """The numbers of the rows to train on, and of those that are held out."""
    count = len(found.rows)
    if not share or count < 2:
        return list(range(count)), []
    origins = list(zip(found.rows["file"], found.rows["row"], strict=True))
    groups = list(dict.fromkeys(origins))
    if len(groups) * share < 1:  # few long texts: parts of them are held out
        origins = [(number, 0) for number in range(count)]
        groups = origins
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed % 2**63)).tolist()
    most = min(max(1, round(len(groups) * share)), len(groups) - 1)
    apart = {groups[at] for at in order[:most]}
    return (
        [number for number, origin in enumerate(origins) if origin not in apart],
        [number for number, origin in enumerate(origins) if origin in apart],
    )
