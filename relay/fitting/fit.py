"""`relay.fit`: the options with which a model trains fastest on a machine, without changing what it learns.

Free are the options that change no bit of any result: stash, slots, layers a slot, resident layers, recomputing, split
master weights. The number of micro-batches is free where none is given; results are then equal to rounding. States of
the optimizer are stored in fewer bits only where that is allowed. The head runs over chunks of positions only where no
size of these is given, and the same holds. Everything else is as given.

A model is traced once for each number of micro-batches that is tried, and all candidates are simulated on that trace.
Invariant: what is chosen was simulated and fits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hal.spec import Machine
from hal.spec.units import parse_size
from relay.checkpoint.format import Checkpoint
from relay.eps.bind_optimizer import as_spec
from relay.errors import BatchError
from relay.fitting.cures import cures
from relay.fitting.machine import FittedMachine, machine_for
from relay.optim.optimizers import AdamW
from relay.options import OPTIONS, checked, refuse_unknown
from relay.partition.module_list import list_of_modules
from relay.precision import COMPUTE
from relay.runtime.grad_mode import as_if_alone
from relay.simulation.described.describe import describe
from relay.simulation.described.master_weights import states_may_be_small
from relay.simulation.described.meta_list import MetaList
from relay.simulation.described.meta_model import MetaModel
from relay.simulation.described.transformer_shape import ModelShape, ShapeError
from relay.simulation.plan import NoFeasiblePlan
from relay.simulation.search import Search, excess, microbatch_counts, plainest, reasons_for, speed
from relay.simulation.simulate import Simulation
from relay.simulation.simulated_step import RunShape

LIKE = 0.02
"""A described shape is like a model whose number of parameters differs by at most this share."""

FREE: dict[str, tuple[Any, ...]] = {
    "stash": ("device", "host"),
    "slots": (1, 2, 3),
    "layers_per_slot": (1,),
    "recompute": (True,),
    "resident_layers": (0,),
    "master_weights": ("fp32", "split"),
}
"""The options that change no result, with the values that the search begins with."""

_CHOSEN = (*FREE, "microbatches", "state_dtype", "head_chunk_tokens")
"""The options that may be chosen."""

_DECIDE = {field.name for field in fields(RunShape)} & set(OPTIONS)
"""The options that decide memory or speed, as far as they are simulated."""


@dataclass(frozen=True)
class Fit:
    """The options for `relay.Trainer`, the simulation of a step with them, and the reasons for each choice.

    `tried` is the number of simulated candidates. Use it as `relay.Trainer(model, device=..., **fit.options)`.
    """

    options: dict[str, Any]
    expected: Simulation
    reasons: tuple[str, ...]
    tried: int

    def __str__(self) -> str:
        return "\n".join(self.reasons)


@as_if_alone()
def fit(
    model: nn.Module | Sequence[nn.Module] | ModelShape | str,
    batch: Any,
    loss: Callable[..., torch.Tensor] | None = None,
    *,
    device: str | Machine = "cpu",
    capacity: int | str | None = None,
    host_memory: int | str | None = None,
    calibration: str | None = None,
    allow_small_states: bool = False,
    resume: str | Path | None = None,
    **given: Any,
) -> Fit:
    """Choose the options with which a model trains fastest on a machine. Nothing is trained and no number is computed.

    Args:
        model: An `nn.Module` whose output has `.loss`, which may be on torch's meta device; a list of modules; or a
            described model: its name, or a `ModelShape`.
        batch: The batch of a step, called as `model(**batch)`, of which only shapes and dtypes count; for a list of
            modules `(inputs, targets)`; for a described model its sequences and the tokens in each, such as
            `(8, 1024)`.
        loss: For a list of modules: `loss(output, targets)`.
        device: A device that is here, or a preset or description of another one.
        capacity, host_memory: Bytes to use at most. Without `host_memory` 8 GiB of the host are left to the system.
        calibration: The file that `relay calibrate` wrote for the device. One in the current folder is found.
        allow_small_states: Whether the optimizer's moments may be stored in bfloat16 or 8 bits.
        resume: A checkpoint whose options are used again, as long as they fit.
        given: Options of `relay.Trainer`. They are kept as they are.

    Raises NoFeasiblePlan, with what is missing and what would make it fit, cheapest first.
    """
    refuse_unknown("fit", given, [name for name in OPTIONS if name not in ("device", "capacity", "host_memory")])
    kept = checked(given)
    fitted = machine_for(device, calibration)
    if host_memory is not None:
        fitted = replace(fitted, host_memory=parse_size(host_memory))
    shape, sequences, length, described, notes = _described(model, batch, loss)
    reasons = [*fitted.notes, *notes]
    if resume is not None:
        saved = Checkpoint(Path(resume)).manifest.options
        again = {name: saved[name] for name in _CHOSEN if name in saved} | kept
        same = _search(shape, fitted, sequences, length, capacity, again)
        only = same.simulated()
        if only.fits:
            reasons.append(f"The options are those of the checkpoint {str(resume)!r}.")
            return Fit(_all(again, only, capacity, host_memory), only, tuple(reasons), 1)
        reasons.append(f"The options of the checkpoint {str(resume)!r} do not fit here: {' '.join(only.shortfalls)}")
    states: tuple[str, ...] = ()
    if allow_small_states and "state_dtype" not in kept:
        masters = str(kept.get("master_weights", OPTIONS["master_weights"].default))
        updates = as_spec(kept.get("optimizer") or AdamW())
        small = states_may_be_small(shape, masters, COMPUTE[chosen_precision(kept)], updates)
        states = ("fp32", "bf16", "int8") if small else ()
    searches = [
        _searched(_search(shape, fitted, sequences, length, capacity, kept | {"microbatches": count}), kept, states)
        for count in _counts(kept, sequences, described, fitted, length, capacity)
    ]
    best = max(searches, key=lambda search: max(map(speed, search.tried.values())))
    if not best.found:
        raise NoFeasiblePlan(_too_large(shape, min(searches, key=_least_excess), kept))
    for stash in dict.fromkeys(candidate.run.stash for candidate in best.found):
        best.refine(plainest([candidate for candidate in best.found if candidate.run.stash == stash]))
    chosen, changed = best.settle(_values(kept, states, chosen_precision(kept)))
    if "microbatches" not in kept:
        reasons.append(f"microbatches={chosen.run.microbatches}: none was given; results are equal to rounding.")
    if chosen.run.head_chunk_tokens is not None and "head_chunk_tokens" not in kept:
        chunk = chosen.run.head_chunk_tokens
        reasons.append(f"head_chunk_tokens={chunk}: none was given; results are equal to rounding.")
    for name in ("state_dtype",) if states else ():
        reasons.append(f"{name}={getattr(chosen.run, name)!r} was free, since allow_small_states=True.")
    reasons += reasons_for(chosen, changed, best)
    return Fit(_all(kept, chosen, capacity, host_memory), chosen, tuple(reasons), sum(len(s.tried) for s in searches))


def chosen_precision(kept: Mapping[str, Any]) -> str:
    """The precision of the run."""
    return str(kept.get("precision", OPTIONS["precision"].default))


def _described(
    model: nn.Module | Sequence[nn.Module] | ModelShape | str,
    batch: Any,
    loss: Callable[..., torch.Tensor] | None,
) -> tuple[ModelShape | MetaModel, int, int, ModelShape | None, tuple[str, ...]]:
    """The model, the sequences of a batch, their length, a described shape that is like the model, and notes."""
    if loss is not None or not isinstance(model, (nn.Module, ModelShape, str)):
        modules = list_of_modules(model, loss)  # type: ignore[arg-type]
        assert modules is not None
        assert loss is not None
        listed = MetaList(modules, loss, batch)
        return listed, listed.sequences, listed.sequence, None, ()
    if isinstance(model, nn.Module):
        if not isinstance(batch, Mapping):
            raise BatchError(f"relay.fit takes the batch of a module as a mapping of tensors; received {batch!r:.100}.")
        meta = MetaModel(model, batch)
        return meta, meta.sequences, meta.sequence, _shape_of(model), ()
    if isinstance(batch, Mapping) or len(batch) != 2:
        raise BatchError(f"The batch of a described model is (sequences, tokens in each); received {batch!r:.100}.")
    found = describe(model)
    sequences, length = map(int, batch)
    shape = found.shape
    if not isinstance(shape, ModelShape):
        raise ShapeError(f"{model!r} takes no tokens alone. Give relay.fit the module and a batch of it.")
    return shape, sequences, length, shape, found.notes_at(length)


def _shape_of(model: nn.Module) -> ModelShape | None:
    """The described shape that is like a Hugging Face model of text which is trained as a whole; None for any other.

    It is like the model if it has as many parameters, to 2 %.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not all(parameter.requires_grad for parameter in model.parameters()):
        return None
    config = config.get_text_config()
    layers, hidden, heads = (
        getattr(config, name, 0) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    wide, keys = (getattr(config, name, None) or 0 for name in ("intermediate_size", "num_key_value_heads"))
    vocabulary, tied = getattr(config, "vocab_size", 0), bool(getattr(config, "tie_word_embeddings", True))
    head_size = getattr(config, "head_dim", None) or 0
    count = sum(parameter.numel() for parameter in model.parameters())
    for gated in (True, False):
        try:
            shape = ModelShape(layers, hidden, heads, vocabulary, wide, keys, gated, tied, head_size)
        except ShapeError:
            return None
        matrices = shape.layers * shape.layer_matrices + vocabulary * shape.hidden * (1 if tied else 2)
        if abs(matrices / count - 1) < LIKE:
            return shape
    return None


def _search(
    shape: ModelShape | MetaModel,
    fitted: FittedMachine,
    sequences: int,
    length: int,
    capacity: int | str | None,
    fixed: Mapping[str, Any],
) -> Search:
    """A search in which these options are fixed."""
    options = {name: value for name, value in fixed.items() if name in _DECIDE and value is not None}
    if "optimizer" in options:
        options["optimizer"] = as_spec(options["optimizer"])
    options.setdefault("precision", chosen_precision(fixed))
    return Search(
        shape, sequences,
        {
            **options, "device": fitted.machine, "batch": sequences, "seq": length, "capacity": capacity,
            "host_memory": fitted.host_memory, "must_fit": None,
        },
    )  # fmt: skip


def _values(kept: Mapping[str, Any], states: Sequence[str], precision: str) -> dict[str, Sequence[Any]]:
    """The values that free options begin with."""
    values: dict[str, Sequence[Any]] = {name: found for name, found in FREE.items() if name not in kept}
    if precision != "bf16":
        values.pop("master_weights", None)
    if states:
        values["state_dtype"] = states
    if "head_chunk_tokens" not in kept:
        values["head_chunk_tokens"] = (None, "auto")
    return values


def _searched(search: Search, kept: Mapping[str, Any], states: Sequence[str]) -> Search:
    """The search after every combination of the first values was simulated."""
    values = _values(kept, states, chosen_precision(kept))
    combinations: list[dict[str, Any]] = [{}]
    for name in ("stash", "slots", "master_weights", "state_dtype"):
        if name in values:
            combinations = [{**found, name: value} for found in combinations for value in values[name]]
    for options in combinations:
        plain = {name: value for name, value in options.items() if (name, value) != ("master_weights", "fp32")}
        search.simulated(**plain)
    return search


def _counts(
    kept: Mapping[str, Any],
    sequences: int,
    described: ModelShape | None,
    fitted: FittedMachine,
    length: int,
    capacity: int | str | None,
) -> list[int]:
    """The numbers of micro-batches to try: the one given; else the best of the described shape; else three."""
    if "microbatches" in kept:
        return [kept["microbatches"]]
    counts = microbatch_counts(sequences)
    if described is None:
        return list(dict.fromkeys([counts[-1], counts[len(counts) // 2], counts[0]]))
    free = {"stash": "host"} if "stash" not in kept else {}

    @functools.cache
    def speed_with(count: int) -> float:
        search = _search(described, fitted, sequences, length, capacity, {**kept, "microbatches": count})
        return max(speed(search.simulated(**free)), speed(search.simulated(**free, **_split(kept))))

    best = _climb(counts, speed_with)
    return [best] if speed_with(best) else [counts[-1]]


def _climb(counts: Sequence[int], speed_with: Callable[[int], float]) -> int:
    """The number of micro-batches from which neither fewer nor more are faster, beginning in the middle of `counts`.

    Each number is another trace. Fewer micro-batches do more work at a time, until they no longer fit, and then have no
    speed; memory is least with single sequences.
    """
    index = len(counts) // 2
    while index and speed_with(counts[index]) and speed_with(counts[index - 1]) >= speed_with(counts[index]):
        index -= 1
    while index + 1 < len(counts) and (
        not speed_with(counts[index]) or speed_with(counts[index + 1]) > speed_with(counts[index])
    ):
        index += 1
    return counts[index]


def _split(kept: Mapping[str, Any]) -> dict[str, str]:
    free = chosen_precision(kept) == "bf16" and "master_weights" not in kept
    return {"master_weights": "split"} if free else {}


def _all(
    kept: Mapping[str, Any], chosen: Simulation, capacity: int | str | None, host_memory: int | str | None
) -> dict[str, Any]:
    """The options for the trainer: those given, and those chosen where they are not the default."""
    found = dict(kept)
    for name in _CHOSEN:
        value = getattr(chosen.run, name)
        if name not in kept and repr(value) != repr(OPTIONS[name].default):
            found[name] = value
    for name, size in (("capacity", capacity), ("host_memory", host_memory)):
        if size is not None:
            found[name] = parse_size(size)
    return found


def _least_excess(search: Search) -> float:
    return min(map(excess, search.refused))


def _too_large(shape: ModelShape | MetaModel, search: Search, kept: Mapping[str, Any]) -> str:
    closest = min(search.refused, key=excess)
    found = cures(shape, closest, search.host_cache, kept)
    return f"{' '.join(closest.shortfalls)} What would make it fit, cheapest first: {'; '.join(found)}."
