"""The planned model as a table in a run file, and how it differs from the model that `relay train` builds.

The speeds and bytes of a plan hold for one model. `relay train` builds a GPT over bytes with the sizes on its command
line; where that is another model, `relay plan` and `relay train` print a caution. Nothing is planned and no file is
read here. Invariant: both commands print the same text.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, get_type_hints

import msgspec

from hal import schema
from relay.simulation.described.transformer_shape import BYTES, ModelShape

TABLE = "planned"
"""The name of the table that holds the model in a run file."""


_SIZES = {name: kind for name, kind in get_type_hints(ModelShape).items() if name != "dtype"}
_Planned = msgspec.defstruct("Planned", list(_SIZES.items()), forbid_unknown_fields=True)
"""The schema of the table: every size of the model must be there."""


def as_table(shape: ModelShape) -> dict[str, Any]:
    """The rows of the table for that model."""
    return {name: value for name, value in asdict(shape).items() if name in _SIZES}


def from_table(table: Any) -> ModelShape:
    """The model in a table. Raises ValueError for a table that `as_table` did not make."""

    def refuse(field: str, message: str) -> ValueError:
        return ValueError(f"{TABLE}{field and '.'}{field}: {message}. `relay plan` writes this table.")

    return ModelShape(**msgspec.structs.asdict(schema.read(table, _Planned, refuse)))


def caution(planned: ModelShape, layers: int, hidden: int, heads: int) -> str | None:
    """How the planned model differs from the one that `relay train` builds with these sizes; None where it does not."""
    differs = []
    if planned.vocabulary != BYTES or not planned.tied:
        head = "an embedding that the head shares" if planned.tied else "a head of its own"
        differs += [f"a vocabulary of {planned.vocabulary}", head]
    if planned.gated:
        differs.append("layers with gates, like those of Llama")
    if not planned.causal:
        differs.append("attention to positions after each one")
    if planned.wide != 4 * planned.hidden:
        differs.append(f"feed-forward networks of {planned.wide}")
    if planned.key_heads != planned.heads:
        differs.append(f"{planned.key_heads} heads of keys and values")
    if planned.depth * planned.heads != planned.hidden:
        differs.append(f"heads of {planned.depth}")
    if (planned.layers, planned.hidden, planned.heads) != (layers, hidden, heads):
        differs.append(f"{planned.layers} layers x hidden {planned.hidden} in {planned.heads} heads")
    if not differs:
        return None
    return (
        f"This plan is for a model with {', '.join(differs)}. `relay train` would train another one with it: a GPT "
        f"over bytes (a vocabulary of {BYTES}, embedding and head shared) of {layers} layers x hidden {hidden} in "
        f"{heads} heads, for which the predicted speed and memory do not hold. Give the options to relay.Trainer with "
        f"the planned model, or plan with --layers, --hidden, --heads and --vocab {BYTES} for `relay train`."
    )
