"""Rows of a parameter in place of the whole: what of a table crosses the link, and its gradient on the host.

A pass that looks few rows up in a table sends those rows alone, and their gradients alone come back. On the host the
gradient is whole again, with zeros where no row was used, so that sums, norms and updates are those of a parameter like
any other, to the bit. Which rows a pass uses is not decided here. Invariant: outside the rows of the last pass the
whole gradient is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from hal.host import Host
from hal.slot.layout import Field, lay_out
from relay.eps.regions import GRADIENTS

ROWS = "rows in transit"

_PIECE = 1 << 20
"""Elements that are gathered at a time where rows are rounded on their way."""


class Shapes(Protocol):
    """Where the tables are found by name."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """The table of that name."""


class TableRows:
    """The rows of one parameter that a pass uses.

    Args:
        name: the parameter.
        count: rows that there is room for, on the device and on the way to it.
        dtype: what the device takes them in.

    Attributes:
        gradient: the dtype of their gradients, if they have any.
        used: the rows of the pass at hand, each once, in the order in which the device has them. None where tensors
            have no numbers (a simulation).
    """

    def __init__(self, name: str, count: int, dtype: torch.dtype) -> None:
        self.name = name
        self.count = count
        self.dtype = dtype
        self.gradient: torch.dtype | None = None
        self.used: torch.Tensor | None = None

    @property
    def key(self) -> str:
        """The name of the rows in the store."""
        return f"{self.name}[{self.count} rows]"

    def gather(self, table: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy the used rows of a table, rounded to the dtype of `rows`."""
        if self.used is None:
            return
        used = self.used
        if table.dtype == rows.dtype:
            torch.index_select(table, 0, used, out=rows[: len(used)])
            return
        step = max(1, _PIECE // max(1, table[0].numel()))
        for start in range(0, len(used), step):
            part = used[start : start + step]
            rows[start : start + len(part)].copy_(table.index_select(0, part))


class WholeGradient:
    """The gradient of a table in the shape of the table, filled anew by each pass."""

    def __init__(self, memory: torch.Tensor, clears_all: bool) -> None:
        """`memory` has the table's shape. With `clears_all` all of it is cleared first, not only what was filled."""
        self.memory = memory
        self._clears_all = clears_all
        self._filled: torch.Tensor | None = None
        if not clears_all:
            memory.zero_()

    @property
    def cleared(self) -> int:
        """Bytes that are cleared before it is filled, beyond those of some rows."""
        return self.memory.numel() * self.memory.dtype.itemsize if self._clears_all else 0

    def fill(self, rows: TableRows, gradient: torch.Tensor) -> torch.Tensor:
        """Put the gradients of the used rows in their places. Returns the whole gradient."""
        if rows.used is not None:
            if self._clears_all:
                self.memory.zero_()
            elif self._filled is not None:
                self.memory.index_fill_(0, self._filled, 0)
            self.memory.index_copy_(0, rows.used, gradient[: len(rows.used)])
            self._filled = rows.used
        return self.memory


class WholeGradients:
    """The whole gradients of all tables: in memory of their own, or in memory that is free when they are needed."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._own: dict[str, WholeGradient] = {}

    def allocate(self, tables: Mapping[int, TableRows], store: Shapes, room: int, clears_all: bool) -> None:
        """Allocate the gradients of a segment's tables, unless they fit in `room` bytes that can be borrowed."""
        fields, size = _lay_out(tables, store)
        if size > room:
            for rows, field in zip(tables.values(), fields, strict=True):
                if rows.name not in self._own:
                    flat = self._host.alloc(field.size // field.dtype.itemsize, field.dtype, GRADIENTS)
                    self._own[rows.name] = WholeGradient(flat.view(field.shape), clears_all)

    def of(
        self, tables: Mapping[int, TableRows], store: Shapes, borrowed: torch.Tensor | None
    ) -> dict[int, WholeGradient]:
        """The gradients of a segment's tables, by number: their own memory, or a part of `borrowed` (bytes)."""
        fields, _ = _lay_out(tables, store)
        found = {}
        for (index, rows), field in zip(tables.items(), fields, strict=True):
            if rows.name in self._own:
                found[index] = self._own[rows.name]
            else:
                assert borrowed is not None
                part = borrowed[field.offset : field.offset + field.size].view(field.dtype).view(field.shape)
                found[index] = WholeGradient(part, clears_all=True)
        return found

    def free(self) -> None:
        """Free the memory."""
        for gradient in self._own.values():
            self._host.free(gradient.memory.view(-1), GRADIENTS)
        self._own.clear()


def _lay_out(tables: Mapping[int, TableRows], store: Shapes) -> tuple[tuple[Field, ...], int]:
    shapes = [(rows, store[rows.name]) for rows in tables.values()]
    return lay_out([(tuple(table.shape), rows.gradient or table.dtype) for rows, table in shapes])
