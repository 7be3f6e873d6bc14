"""The batches of a run: which rows each step takes, and their tensors.

Rows are grouped by length, so that few lengths have to be compiled, or packed. Invariant: the batch of a step depends
on the data, the seed and the step's number alone, so a run that is resumed goes on with the same batches, whatever
workers prepare them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from relay.finetuning.data.packing import pack, packed_row
from relay.finetuning.data.tokenise import IGNORED

MULTIPLE = 8
"""Lengths are rounded up to multiples of it."""

WORTHWHILE = 0.75
"""A length is worth its compilation if it is at most this part of the next longer one."""


class Shape(NamedTuple):
    """The lengths to which a batch is padded: of its inputs and, for sequence-to-sequence models, of its labels."""

    inputs: int
    labels: int


class Batches:
    """The batches of one set of rows.

    Args:
        rows: a dataset with `input_ids` and `labels`.
        task: what is learned.
        size: rows of a batch. Where rows are missing at the end of an epoch, the batch is filled with rows that train
            nothing; a regression, whose loss has no such rows, takes rows of the epoch's beginning again.
        longest: the most tokens of a row.
        buckets: how many lengths there are.
        packed: whether documents share rows.
        padding: the token that fills rows.
        seed: sets the order of each epoch.
    """

    def __init__(
        self, rows: Any, task: str, size: int, longest: int, buckets: int, packed: bool, padding: int, seed: int
    ) -> None:
        self.task = task
        self.size = size
        self.packed = packed
        self.rows = rows
        self._rows = rows.with_format("numpy")
        self._padding = padding
        self._seed = seed
        self._order: tuple[int, list[tuple[int, list[int]]]] = (-1, [])
        lengths = lengths_of(rows, "input_ids")
        targets = lengths_of(rows, "labels") if task == "seq2seq" else lengths
        self.tokens = sum(lengths) + (sum(targets) if task == "seq2seq" else 0)
        if packed:
            self._units = pack(lengths, longest)
            fullest = max(sum(lengths[one] for one in unit) for unit in self._units)
            self.shapes = [Shape(*[_rounded(fullest, longest)] * 2)]
            self._levels = [list(range(len(self._units)))]
        else:
            self._units = [[number] for number in range(len(lengths))]
            self.shapes = _bucket_shapes(lengths, targets, buckets, longest)
            self._levels = [[] for _ in self.shapes]
            for number, (inputs, labels) in enumerate(zip(lengths, targets, strict=True)):
                level = next(
                    at for at, shape in enumerate(self.shapes) if inputs <= shape.inputs and labels <= shape.labels
                )
                self._levels[level].append(number)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self._units) // self.size)

    @property
    def padded_share(self) -> float:
        """The share of positions that are padding, over an epoch."""
        whole = sum(
            self.size * sum(self.shapes[level][: 2 if self.task == "seq2seq" else 1]) for level, _ in self.epoch(0)
        )
        return 1 - self.tokens / whole

    def digest(self) -> str:
        """A key of the tokens and labels of all rows, in order."""
        found = hashlib.sha256()
        columns = self.rows.select_columns(["input_ids", "labels"]).with_format("arrow")
        for part in columns.iter(batch_size=10_000):
            for column in part.columns:
                values = column.combine_chunks()
                if hasattr(values, "value_lengths"):
                    found.update(values.value_lengths().to_numpy(zero_copy_only=False).tobytes())
                    values = values.flatten()
                found.update(values.to_numpy(zero_copy_only=False).tobytes())
        return found.hexdigest()[:16]

    def epoch(self, number: int, shuffled: bool = True) -> list[tuple[int, list[int]]]:
        """The batches of an epoch, each as the number of its shape and its rows."""
        mixed = (self._seed * 0x9E3779B97F4A7C15 + number * 0xD1342543DE82EF95) % 2**63
        generator = torch.Generator().manual_seed(mixed)

        def order(count: int) -> list[int]:
            return torch.randperm(count, generator=generator).tolist() if shuffled else list(range(count))

        found: list[tuple[int, list[int]]] = []
        rest: list[int] = []
        for level, members in enumerate(self._levels):
            mixed_members = [members[at] for at in order(len(members))]
            members = rest + mixed_members
            full = len(members) // self.size * self.size
            found += [(level, members[at : at + self.size]) for at in range(0, full, self.size)]
            rest = members[full:]
        if rest:
            found.append((len(self._levels) - 1, rest))
        return [found[at] for at in order(len(found))]

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """The batch of a step."""
        epoch, at = divmod(step, len(self))
        if self._order[0] != epoch:
            self._order = epoch, self.epoch(epoch)
        level, units = self._order[1][at]
        if self.task == "regression":
            again = [unit for _, others in self._order[1] for unit in others]
            units = [*units, *(again * self.size)[: self.size - len(units)]]
        return self._tensors(units, self.shapes[level])

    def steps(self, begin: int, end: int, workers: int) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of the steps from `begin` to `end`, prepared by so many processes."""
        return iter(DataLoader(_Steps(self), batch_size=None, sampler=range(begin, end), num_workers=workers))

    def in_order(self) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
        """All rows once, for evaluation: batches, and how many rows of each are not filled in."""
        for level, units in self.epoch(0, shuffled=False):
            filled = [*units, *[units[0]] * (self.size - len(units))] if self.task == "regression" else units
            yield self._tensors(filled, self.shapes[level]), len(units)

    def largest(self) -> dict[str, torch.Tensor]:
        """A batch of the largest shape that occurs, for planning."""
        level, units = max(self.epoch(0, shuffled=False))
        return self._tensors(units, self.shapes[level])

    def _tensors(self, units: Sequence[int], shape: Shape) -> dict[str, torch.Tensor]:
        found = [self._unit(unit, shape) for unit in units]
        nothing = dict(found[0])
        if not nothing["labels"].is_floating_point():
            nothing["labels"] = torch.full_like(nothing["labels"], IGNORED)
        found += [nothing] * (self.size - len(found))
        return {name: torch.stack([row[name] for row in found]) for name in found[0]}

    def _unit(self, unit: int, shape: Shape) -> dict[str, torch.Tensor]:
        rows = [self._rows[document] for document in self._units[unit]]
        if self.packed:
            documents = [(row["input_ids"].tolist(), row["labels"].tolist()) for row in rows]
            return packed_row(documents, shape.inputs, self._padding)
        tokens = rows[0]["input_ids"].tolist()
        row = {"input_ids": _padded(tokens, shape.inputs, self._padding)}
        if self.task != "causal":  # causal attention does not look at what follows, and padding follows
            row["attention_mask"] = (torch.arange(shape.inputs) < len(tokens)).long()
        if self.task == "regression":
            row["labels"] = torch.tensor(float(rows[0]["labels"]))
        elif self.task == "classification":
            row["labels"] = torch.tensor(int(rows[0]["labels"]))
        else:
            row["labels"] = _padded(rows[0]["labels"].tolist(), shape.labels, IGNORED)
        return row


class _Steps(Dataset[dict[str, torch.Tensor]]):
    """The batches of a run by the number of the step."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        return self._batches.batch(step)


def lengths_of(rows: Any, column: str) -> list[int]:
    """The length of each list in a column, read in parts."""
    import pyarrow.compute

    found: list[int] = []
    for part in rows.with_format("arrow").iter(batch_size=10_000):
        found += pyarrow.compute.list_value_length(part[column]).to_pylist()
    return found


def _rounded(length: int, longest: int) -> int:
    return min(max(-(-length // MULTIPLE) * MULTIPLE, MULTIPLE), max(longest, length))


def _bucket_shapes(lengths: Sequence[int], targets: Sequence[int], count: int, longest: int) -> list[Shape]:
    """The shapes below which equal shares of the rows are, rounded up; without those that would save little padding."""
    inputs, labels = sorted(lengths), sorted(targets)
    shapes: list[Shape] = []
    for part in range(count, 0, -1):
        at = -(-len(inputs) * part // count) - 1
        shape = Shape(_rounded(inputs[at], longest), _rounded(labels[at], longest))
        if not shapes or sum(shape) <= WORTHWHILE * sum(shapes[0]):
            shapes.insert(0, shape)
    return shapes


def trained_targets(batch: dict[str, torch.Tensor], task: str) -> int:
    """How many targets of a batch count in its loss."""
    labels = batch["labels"]
    if task == "regression":
        return int(labels.shape[0])
    return int((labels[:, 1:] if task == "causal" else labels).ne(IGNORED).sum())


def _padded(tokens: Sequence[int], length: int, filler: int) -> torch.Tensor:
    return torch.tensor([*tokens, *[filler] * (length - len(tokens))])
