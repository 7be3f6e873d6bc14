"""Which rows of tied embeddings a step's batch looks up, found on the host before the step.

Their number is fixed by the shapes: as many as the batch has indices. Where a batch looks up fewer, other rows take the
places left, which changes no result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from relay.capture.memory_order import stored
from relay.runtime.stages import CompiledModel
from relay.runtime.ties.touched_rows import TouchedRows


def with_touched_rows(
    models: Sequence[CompiledModel], inputs: Sequence[Sequence[torch.Tensor]]
) -> tuple[Sequence[Sequence[torch.Tensor]], dict[str, torch.Tensor]]:
    """The tensors of each micro-batch with the numbers of the kept rows among them, and those numbers by parameter.

    `models` are the compiled models of the micro-batches.
    """
    touched = [model.touched for model in models]
    if not touched[0]:
        return inputs, {}
    rows = [_rows(column, inputs) for column in zip(*touched, strict=True)]
    extended = []
    for model, tensors in zip(models, inputs, strict=True):
        known = {one.value: numbers for one, numbers in zip(model.touched, rows, strict=True)}
        others = iter(tensors)
        extended.append([known[value] if value in known else next(others) for value in model.partition.inputs])
    return extended, {one.name: numbers for one, numbers in zip(touched[0], rows, strict=True)}


def _rows(touched: Sequence[TouchedRows], inputs: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """The numbers of the rows of one parameter, each once. Indices are checked elsewhere."""
    one = touched[0]
    looked_up = torch.zeros(one.of, dtype=torch.bool)
    for own, tensors in zip(touched, inputs, strict=True):
        if any(tensor.is_meta for tensor in tensors):  # a simulation
            return torch.empty(one.kept, dtype=torch.int64, device="meta")
        for indices in own.indices:
            given = {
                number: stored(tensors[position].detach(), indices.orders[number])
                for number, position in indices.inputs.items()
            }
            looked_up[indices.expression.compute(given).reshape(-1).long()] = True
    rows = looked_up.nonzero().view(-1)
    others = (~looked_up).nonzero().view(-1)[: one.kept - len(rows)]
    return torch.cat([rows, others])
