"""The model that a plan was made for, as data in its run file, held against the one that `relay train` builds.

A plan's speeds and bytes are those of one model. `relay train` builds a GPT over bytes; where that is another model, or
options on its command line make it one, whoever runs the file is told. It plans nothing and reads no files.
Invariant: what `relay plan` says of a file and what `relay train` says when it is given that file is one text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from relay.simulation.transformer_shape import BYTES, ModelShape

TABLE = "planned"
"""The table of a run file that holds the model."""


def as_table(shape: ModelShape) -> dict[str, Any]:
    """The model as the table's rows."""
    return asdict(shape)


def from_table(table: Any) -> ModelShape:
    """The model again. Raises ValueError for a table that was not made by `as_table`."""
    kinds = {one.name: {"int": int, "bool": bool}[str(one.type)] for one in fields(ModelShape)}
    if not isinstance(table, Mapping) or {key: type(value) for key, value in table.items()} != kinds:
        expected = ", ".join(f"{name} ({kind.__name__})" for name, kind in kinds.items())
        raise ValueError(f"[{TABLE}] should hold {expected}, as `relay plan` writes it; received {table!r:.200}")
    return ModelShape(**table)


def caution(planned: ModelShape, layers: int, hidden: int, heads: int) -> str | None:
    """What `relay train` with these sizes would train otherwise than it was planned; None for the planned model."""
    differs = []
    if planned.vocabulary != BYTES or not planned.tied:
        head = "an embedding that the head shares" if planned.tied else "a head of its own"
        differs += [f"a vocabulary of {planned.vocabulary}", head]
    if planned.gated:
        differs.append("layers with gates, as Llama has them")
    if not planned.causal:
        differs.append("positions that see those after them")
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
        f"{heads} heads, for which neither speed nor memory holds. Give the options to relay.Trainer for the model "
        f"that was meant; or plan with --layers, --hidden, --heads and --vocab {BYTES} for `relay train`."
    )
