"""The error of data that cannot be trained on. Nothing is read here.

Invariant: its text is one line that names the file, the row (counted from 1) and the field, as far as there are any.
"""

from __future__ import annotations

from relay.errors import RelayError


class DataError(RelayError, ValueError):
    """Data that cannot be trained on. `file`, `row` (from 1, 0 for the whole file) and `field` say where.

    What to do: correct the row, or name other fields.
    """

    def __init__(self, message: str, *, file: str = "", row: int = 0, field: str = "") -> None:
        where = [file] if file else []
        where += [f"row {row}"] if row else []
        where += [f"field {field!r}"] if field else []
        super().__init__(f"{', '.join(where)}: {message}" if where else message)
        self.file = file
        self.row = row
        self.field = field
