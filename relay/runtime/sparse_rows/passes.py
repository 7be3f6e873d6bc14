"""Which rows of its tables a pass uses, found on the host before it: each row once, and the indices renumbered.

The rows of a step are those of all its micro-batches together. Invariant: an index that its table does not have is
refused before anything is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from relay.capture.memory_order import stored
from relay.errors import IndexOutOfRange
from relay.runtime.sparse_rows.table import Table
from relay.runtime.stages import CompiledModel


def rows_of_pass(
    models: Sequence[CompiledModel], inputs: Sequence[Sequence[torch.Tensor]]
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor | None]]:
    """The tensors of each micro-batch with the renumbered indices after them, and the rows of each table.

    `inputs` are the tensors of each micro-batch; `models` its compiled model. The rows are None where tensors have no
    numbers. Raises IndexOutOfRange.
    """
    extended = [list(tensors) for tensors in inputs]
    used: list[torch.Tensor | None] = []
    for number, table in enumerate(models[0].tables):
        found = [_indices(model, model.tables[number], tensors) for model, tensors in zip(models, inputs, strict=True)]
        everything = [indices for row in found for indices in row]
        if any(indices.is_meta for indices in everything):
            used.append(None)
            renumbered = [[torch.empty(one.shape, dtype=torch.int64, device="meta") for one in row] for row in found]
        else:
            distinct = torch.unique(torch.cat([indices.reshape(-1) for indices in everything]))
            _check(table, distinct)
            if table.padding >= 0:  # it is row 0 of the device's, whether it is looked up or not
                distinct = distinct[distinct != table.padding]
            first = torch.tensor([table.padding] if table.padding >= 0 else [], dtype=torch.int64)
            used.append(torch.cat([first, distinct]))
            renumbered = [[_renumbered(table, distinct, indices) for indices in row] for row in found]
        for tensors, row in zip(extended, renumbered, strict=True):
            tensors += row
    return extended, used


def _indices(model: CompiledModel, table: Table, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What is looked up in a table for one micro-batch."""
    segment, values = model.stages[table.stage].segment, model.partition.values
    given = dict(zip(model.partition.inputs, tensors, strict=False))

    def stored_input(number: int) -> torch.Tensor:
        value = segment.inputs[number]
        return stored(given[value].detach(), values[value].order)

    return [
        expression.compute({number: stored_input(number) for number in expression.values}).to(torch.int64)
        for expression in table.expressions
    ]


def _renumbered(table: Table, distinct: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    places = torch.searchsorted(distinct, indices)
    if table.padding >= 0:
        places = torch.where(indices == table.padding, 0, places + 1)
    return places.contiguous()


def _check(table: Table, distinct: torch.Tensor) -> None:
    if len(distinct) and not 0 <= int(distinct[0]) <= int(distinct[-1]) < table.length:
        wrong = int(distinct[0]) if int(distinct[0]) < 0 else int(distinct[-1])
        raise IndexOutOfRange(
            f"The batch looks up row {wrong} of {table.name!r}. The index must be from 0 to {table.length - 1}. "
            "Correct the batch, or enlarge the embedding. Nothing was changed."
        )
