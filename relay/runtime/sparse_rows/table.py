"""What a table is: a parameter that one segment uses by lookups of the batch's indices alone.

Tables are found and chosen in `relay.runtime.sparse_rows.tables`. Plain data; nothing is computed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from relay.capture.native.embedding_rows import IndexExpression


@dataclass(frozen=True, eq=False)
class Table:
    """A parameter that is a table.

    Attributes:
        name: the parameter.
        stage: the number of the segment that uses it; `parameter` is its number there.
        dtype: what the kernels take it in; `gradient` is the dtype of its gradient, if it has one.
        length: how many rows it has.
        expressions: the indices that are looked up in it.
        padding: the row that gets no gradient, or -1.
        count: the rows that there is room for; 0 while that is not decided.
    """

    name: str
    stage: int
    parameter: int
    dtype: torch.dtype
    gradient: torch.dtype | None
    length: int
    expressions: tuple[IndexExpression, ...]
    padding: int
    count: int = 0

    @property
    def key(self) -> str:
        """The name of its rows in the store."""
        return f"{self.name}[{self.count} rows]"
