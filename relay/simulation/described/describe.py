"""The model that a simulation or a plan is asked for: by name, by `config.json`, or by sizes.

It finds the model and the notes that belong to it. What the model costs is worked out elsewhere.

Invariant: exactly one model is meant, and no argument is ignored: arguments that contradict each other are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relay.options import STEP_OPTIONS
from relay.simulation.described.adapted import adapter_options
from relay.simulation.described.configuration import configured_model
from relay.simulation.described.diffusion import DIFFUSION_MODELS, diffusion_model
from relay.simulation.described.meta_model import MetaModel
from relay.simulation.described.transformer_shape import (
    BYTES,
    LEARNED_POSITIONS,
    MODELS,
    VOCABULARY,
    ModelShape,
    ShapeError,
    default_heads,
)


@dataclass(frozen=True)
class DescribedModel:
    """A model, the length of its table of learned positions (0 for none), and the assumptions made about it."""

    shape: ModelShape | MetaModel
    positions: int = 0
    notes: tuple[str, ...] = ()

    def notes_at(self, sequence: int) -> tuple[str, ...]:
        """The notes for sequences of that many tokens."""
        if not 0 < self.positions < sequence:
            return self.notes
        longer = (
            f"The model has {self.positions} learned positions and cannot run sequences of {sequence} as it is. The "
            "simulated model has a table of positions that is long enough."
        )
        return (*self.notes, longer)


def describe(
    model: str | ModelShape | MetaModel | None = None,
    config: str | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    vocabulary: int | None = None,
    ffn: int | None = None,
    tied: bool | None = None,
    batch: int | None = None,
    seq: int | None = None,
    seconds: float | None = None,
    half: bool = False,
    **adapters: Any,
) -> DescribedModel:
    """The model of that name (`model`), of a Hugging Face `config.json` (`config`), or of these sizes.

    Defaults of the sizes: heads of about 128 that divide `hidden`, a vocabulary of 50257, a feed-forward network of
    4 x `hidden`, and one matrix for embedding and head (`tied`) with a vocabulary of 256, which is the model of
    `relay train`, and two with any other.

    `batch` samples of `seq` tokens or `seconds` of audio are the example batch of a configuration, with the usual
    lengths where none is given. Of a diffusion transformer `seq` is the number of patches in a sample. Models described
    otherwise take batches of any length.

    `adapters` are options of `AdapterOptions` for a configuration, for a run in `half` precision or not.

    Raises ShapeError where no model or more than one is meant, and where sizes are given beside a model that has its
    own; TypeError for a `model` of another type.
    """
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary, "ffn": ffn, "tied": tied}
    _refuse_clashes({"model": model, "config": config}, sizes)
    if seconds is not None and config is None:
        raise ShapeError(f"seconds={seconds:g} is the length of audio of a model given by a config.json. Leave it out.")
    own = adapter_options(adapters)
    if adapters and config is None:
        raise ShapeError(
            f"{' and '.join(adapters)}: adapters are for a model given by a config.json. A module can be given with "
            "adapters in it."
        )
    if isinstance(model, (ModelShape, MetaModel)):
        return DescribedModel(model, notes=getattr(model, "notes", ()))
    if model is not None:
        if not isinstance(model, str):
            expected = "a name, a ModelShape, or an nn.Module with an example= of a batch"
            raise TypeError(f"model should be {expected}; received {model!r:.100}.")
        if model in DIFFUSION_MODELS:
            diffused = diffusion_model(model, STEP_OPTIONS["batch"].default if batch is None else batch, seq)
            return DescribedModel(diffused, notes=diffused.notes)
        if model not in MODELS:
            known = ", ".join((*MODELS, *DIFFUSION_MODELS))
            raise ShapeError(f"There is no model {model!r} here. Known: {known}; or give layers and hidden.")
        return DescribedModel(MODELS[model], LEARNED_POSITIONS.get(model, 0))
    if config is not None:
        samples = STEP_OPTIONS["batch"].default if batch is None else batch
        built = configured_model(config, samples, seq, seconds, own, half)
        return DescribedModel(built, notes=built.notes)
    if layers is None or hidden is None:
        raise ShapeError("A model by shape needs both layers and hidden.")
    vocabulary = VOCABULARY if vocabulary is None else vocabulary
    tied = vocabulary == BYTES if tied is None else tied
    heads = default_heads(hidden) if heads is None else heads
    return DescribedModel(ModelShape(layers, hidden, heads, vocabulary, 0 if ffn is None else ffn, tied=tied))


def loss_scale_notes(loss_scale: str | float, precision: str) -> tuple[str, ...]:
    """The note for a loss scale that has no effect."""
    if precision == "fp16" or loss_scale == "dynamic":
        return ()
    return (f"loss_scale={loss_scale!r} has no effect in {precision}: only fp16 scales its loss.",)


def _refuse_clashes(whole: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Raise ShapeError unless exactly one model is meant."""
    given = [name for name, value in whole.items() if value is not None]
    beside = [name for name, value in sizes.items() if value is not None]
    if len(given) > 1:
        raise ShapeError(f"{' and '.join(given)} both name a model. Leave one out.")
    if given and beside:
        raise ShapeError(
            f"{given[0]} names a model with sizes of its own, and {' and '.join(beside)} would change them. Leave "
            f"{given[0]} out, or {' and '.join(beside)}."
        )
    if not given and sizes["layers"] is None and sizes["hidden"] is None:
        names = ", ".join((*MODELS, *DIFFUSION_MODELS))
        raise ShapeError(f"Which model? Give one of a name ({names}), a config.json, or layers and hidden.")
