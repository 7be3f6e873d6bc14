"""The sparse rows of one session: which tables are sent by rows, and their rows from pass to pass.

Programs and indices are made in the other modules of this folder; the memory is the store's, and the whole gradients
are the server's. Invariant: results are those of whole tables, to the bit.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
import weakref
from collections.abc import Sequence

import torch

from hal.device import DeviceInfo
from hal.event import Event
from hal.host import Host, HostWork
from relay.capture import Lowering, graphs_for
from relay.eps.rows import TableRows
from relay.eps.store import LayerStore
from relay.runtime.sparse_rows.passes import rows_of_pass
from relay.runtime.sparse_rows.table import Table
from relay.runtime.sparse_rows.tables import choose_counts, find_tables, with_rows
from relay.runtime.stages import CompiledModel

logger = logging.getLogger("relay")


HALF = 2
"""With "auto" a table is sent by rows where that is at most one half of it."""


def least_saving(info: DeviceInfo, option: bool | str) -> int:
    """How many times as many rows a table must have as are sent; 0 for no sparse rows at all.

    Devices that take core graphs get whole tables, and "auto" sends whole what does not cross a link.
    """
    if graphs_for(info)[0] is not Lowering.NATIVE:
        return 0
    if isinstance(option, bool):
        return int(option)
    return 0 if info.unified else HALF


def row_counts(compiled: Sequence[CompiledModel], info: DeviceInfo, option: bool | str) -> dict[str, int]:
    """How many rows a first pass would send, of each table that is not sent whole."""
    tables = [find_tables(model, ())[0] for model in compiled] if least_saving(info, option) else [{}]
    return choose_counts(tables, least_saving(info, option), {})


class SparseRows:
    """Chooses tables and rows.

    Args:
        info: the device.
        host: runs the tasks that gather rows.
        store: the tables.
        option: the trainer's `sparse_rows`. A table that stays whole is a warning with True, a message with "auto".
    """

    def __init__(self, info: DeviceInfo, host: Host, store: LayerStore, option: bool | str) -> None:
        self._host = host
        self._store = store
        self._least_saving = least_saving(info, option)
        self._warns = option is True
        self._tables: weakref.WeakKeyDictionary[CompiledModel, dict[str, Table]] = weakref.WeakKeyDictionary()
        self._counts: dict[tuple[bool, str], int] = {}
        self._rows: dict[str, TableRows] = {}
        self._told: set[str] = set()

    def over_rows(self, compiled: Sequence[CompiledModel], training: bool) -> list[CompiledModel]:
        """The models of a pass's micro-batches, over rows of the tables for which that pays."""
        if not self._least_saving or compiled[0].tables:
            return list(compiled)
        if compiled[0].head is not None:
            self._tell("All rows of all embeddings are sent: the head runs over the whole batch.")
            return list(compiled)
        tables = [self._tables_of(model) for model in compiled]
        before = {name: count for (trains, name), count in self._counts.items() if trains == training}
        counts = choose_counts(tables, self._least_saving, before)
        if not counts:
            return list(compiled)
        self._counts.update({(training, name): count for name, count in counts.items()})
        key = tuple(sorted(counts.items()))
        for model, own in zip(compiled, tables, strict=True):
            if key not in model.over_rows:
                model.over_rows[key] = with_rows(model, own, counts)
        return [model.over_rows[key] for model in compiled]

    def rows_of(self, table: Table) -> TableRows:
        """The rows of a table with that room."""
        rows = self._rows.setdefault(table.key, TableRows(table.name, table.count, table.dtype))
        rows.gradient = rows.gradient or table.gradient  # an evaluation has none
        return rows

    def choose(
        self, compiled: Sequence[CompiledModel], inputs: Sequence[Sequence[torch.Tensor]]
    ) -> Sequence[Sequence[torch.Tensor]]:
        """Find the rows of a pass. Returns the tensors of its micro-batches with the new indices after them.

        Raises IndexOutOfRange.
        """
        if not compiled[0].tables:
            return inputs
        # After the micro-batches may stand the whole batch, for a head that runs over it and has no such tables.
        extended, used = rows_of_pass(compiled, inputs[: len(compiled)])
        for table, rows in zip(compiled[0].tables, used, strict=True):
            self.rows_of(table).used = rows
        return [*extended, *inputs[len(compiled) :]]

    def gather(self, compiled: CompiledModel) -> list[Event]:
        """Submit the tasks that copy the chosen rows to where they are sent from. Loads wait for them."""
        events = []
        for table in compiled.tables:
            rows = self.rows_of(table)
            self._store.changed([rows.key])  # even if the weights are those of the pass before
            source, memory = self._store[table.name], self._store.add_rows(rows)
            count = table.count if rows.used is None else len(rows.used)
            moved = count * math.prod(source.shape[1:]) * (source.dtype.itemsize + memory.dtype.itemsize)
            before = self._store.updates_of([table.name])
            task = functools.partial(self._gather, rows, memory)
            event = self._host.run(task, before, f"rows of {table.name}", HostWork(moved))
            self._store.updated[rows.key] = event
            events.append(event)
        return events

    def _gather(self, rows: TableRows, memory: torch.Tensor) -> None:
        table = self._store[rows.name]  # of a split master the half that the device takes
        if rows.name in self._store.split and table.dtype != memory.dtype:
            table = self._store.read(rows.name)
        rows.gather(table, memory)

    def clear(self) -> None:
        """Forget the rows, after the model has changed."""
        self._rows.clear()
        self._counts.clear()

    def _tables_of(self, compiled: CompiledModel) -> dict[str, Table]:
        found = self._tables.get(compiled)
        if found is None:
            aliases = self._store.aliases
            found, refused = find_tables(compiled, {*aliases, *(alias.owner for alias in aliases.values())})
            self._tables[compiled] = found
            for name, reason in refused.items():
                self._tell(f"All rows of {name!r} are sent in every pass: {reason}.")
        return found

    def _tell(self, message: str) -> None:
        """Say something, once."""
        if message in self._told:
            return
        self._told.add(message)
        if self._warns:
            warnings.warn(f"sparse_rows=True: {message}", stacklevel=2)
        else:
            logger.info(message)
