"""The model that a simulation or a plan is asked for: a name, a configuration, or numbers, and what to say of it.

It finds out which model is meant and how long its positions reach; what it costs is worked out elsewhere. Invariant:
one model is meant, and nothing that was given is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relay.simulation.hf_config import read_configuration
from relay.simulation.meta_model import MetaModel
from relay.simulation.transformer_shape import BYTES, LEARNED_POSITIONS, MODELS, VOCABULARY, ModelShape, ShapeError


@dataclass(frozen=True)
class DescribedModel:
    """A model, the length of its table of learned positions (0 where it has none or any), and what was guessed."""

    shape: ModelShape | MetaModel
    positions: int = 0
    notes: tuple[str, ...] = ()

    def notes_at(self, sequence: int) -> tuple[str, ...]:
        """What is to be said of it in sequences of that many tokens."""
        if not 0 < self.positions < sequence:
            return self.notes
        longer = (
            f"The model has {self.positions} learned positions and is given sequences of {sequence}: as it is it "
            "cannot run these. What is counted is one with a table as long as that."
        )
        return (*self.notes, longer)


def describe(
    model: str | ModelShape | MetaModel | None = None,
    config: str | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    vocabulary: int = VOCABULARY,
    ffn: int = 0,
    tied: bool | None = None,
) -> DescribedModel:
    """The model meant: a name, a Hugging Face `config.json`, or numbers. ShapeError for none or several of these, and
    for numbers beside a model that has its own; TypeError for what is none of these.

    `tied` (of numbers) says whether embedding and head are one matrix; where it is not given they are with a vocabulary
    of 256, which is the model of `relay train`, and are two with any other.
    """
    numbers = {"layers": layers, "hidden": hidden, "heads": heads, "ffn": ffn or None, "tied": tied}
    numbers["vocabulary"] = None if vocabulary == VOCABULARY else vocabulary
    _refuse_clashes({"model": model, "config": config}, numbers)
    if isinstance(model, (ModelShape, MetaModel)):
        return DescribedModel(model)
    if model is not None:
        if not isinstance(model, str):
            expected = "a name, a ModelShape, or an nn.Module with an example= of a batch"
            raise TypeError(f"model should be {expected}; received {model!r:.100}.")
        if model not in MODELS:
            known = ", ".join(MODELS)
            raise ShapeError(f"There is no model {model!r} here. Known: {known}; or give layers and hidden.")
        return DescribedModel(MODELS[model], LEARNED_POSITIONS.get(model, 0))
    if config is not None:
        read = read_configuration(config)
        return DescribedModel(read.shape, read.positions, read.notes)
    if layers is None or hidden is None:
        raise ShapeError("A model by shape needs both layers and hidden.")
    tied = vocabulary == BYTES if tied is None else tied
    if heads is None:
        heads = max(1, hidden // 128) if isinstance(hidden, int) else 1
    return DescribedModel(ModelShape(layers, hidden, heads, vocabulary, ffn, tied=tied))


def _refuse_clashes(whole: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Raise ShapeError unless one model is meant."""
    given = [name for name, value in whole.items() if value is not None]
    beside = [name for name, value in numbers.items() if value is not None]
    if len(given) > 1:
        raise ShapeError(f"{' and '.join(given)} both say which model is meant. Leave one out.")
    if given and beside:
        raise ShapeError(
            f"{given[0]} says which model is meant, and {' and '.join(beside)} would make it another. Leave "
            f"{given[0]} out, or {' and '.join(beside)}."
        )
    if not given and numbers["layers"] is None and numbers["hidden"] is None:
        raise ShapeError(
            f"Say which model: one of a name ({', '.join(MODELS)}), a config.json, or layers and hidden."
        )
