"""`relay.plan`: the options with which a model runs fastest on a machine, found by simulating candidates.

The options are micro-batches, slots, layers a slot, stash, recomputing and the state dtype. The search:

1. Every combination of micro-batches, stash, slots and state dtypes, with one layer a slot and everything recomputed.
2. From the fastest of each stash: as many segments save their tensors as fit, or half of these; two, four, ... layers a
   slot while that is faster; then the neighbouring numbers of micro-batches.
3. Each option of the best candidate is changed alone, and a better candidate replaces it, until no change is better.
   The results of the last changes are the reasons.

Candidates within `TIE` of the fastest count as equal, and the plainest of them wins: states in more bits, activations
on the device, everything recomputed, fewer layers a slot, fewer slots (but one only where two do not fit or are
slower).

Invariant: the plan changes neither the model nor the batch, and uses only the state dtypes that are allowed.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from hal.spec import Machine
from hal.spec.units import format_size, parse_size
from relay.errors import RelayError
from relay.options import OPTIONS, fixed_scale, refuse_unknown
from relay.runtime.grad_mode import as_if_alone
from relay.simulation.describe import describe, loss_scale_notes
from relay.simulation.host_cache import HostCache
from relay.simulation.meta_model import MetaModel
from relay.simulation.plan_file import TABLE, as_table, caution
from relay.simulation.shortfall import shortfalls
from relay.simulation.simulate import Simulation, check_precision, default_precision, machine_of, simulate
from relay.simulation.simulated_step import RunShape, SimulatedRun
from relay.simulation.transformer_shape import ModelShape

PROMISING = 0.2
"""The search continues from candidates that are slower than the fastest by at most this share."""

TIE = 0.02
"""Candidates whose speeds differ by less than this share count as equal: predictions are no more exact than that."""

_PLAINNESS = {"fp32": 0, "bf16": 1, "int8": 2, "device": 0, "host": 1}

_REASONED = ("state_dtype", "stash", "recompute", "layers_per_slot", "slots", "microbatches")
_OPTIONS = ("microbatches", "slots", "layers_per_slot", "stash", "recompute", "precision", "state_dtype")


class NoFeasiblePlan(RelayError):
    """No combination fits the machine.

    What to do: give what the closest combination lacks (the message names it), take another machine, or a smaller
    model.
    """


@dataclass(frozen=True)
class Plan:
    """The chosen options of `relay.Trainer`, the simulation of a step with them, and the reasons for the choice.

    `tried` is the number of simulated candidates.
    """

    options: dict[str, Any]
    expected: Simulation
    reasons: tuple[str, ...]
    tried: int

    def __str__(self) -> str:
        return "\n".join(self.reasons)

    @property
    def caution(self) -> str | None:
        """How the planned model differs from the one that `relay train` builds; None where they are the same."""
        shape = self.expected.shape
        assert isinstance(shape, ModelShape)
        return caution(shape, shape.layers, shape.hidden, shape.heads)

    def as_toml(self) -> str:
        """A run file for `relay train`. It holds the planned model too, and the `caution` where that is another one."""
        shape, run = self.expected.shape, self.expected.run
        assert isinstance(shape, ModelShape)
        rows: dict[str, Any] = {
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": shape.heads,
            "seq": run.seq,
            "batch": run.batch,
            **self.options,
        }
        comments = [] if self.caution is None else [*textwrap.wrap(self.caution, 110), ""]
        lines = [f"# {line}".rstrip() for line in [*comments, *self.reasons]]
        lines += [f"{key} = {json.dumps(value)}" for key, value in rows.items()]
        lines += ["", f"[{TABLE}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in as_table(shape).items()]
        return "\n".join(lines) + "\n"


def _several(name: str, values: Any) -> tuple[Any, ...]:
    """The values to choose from. TypeError for a single one, ValueError for none."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"relay.plan() chooses {name} among several: give a list, such as [{values!r}].")
    found = tuple(values)
    if not found:
        raise ValueError(f"relay.plan() chooses {name} among those given, and none were: {name}={values!r}.")
    return found


@as_if_alone()
def plan(
    model: str | ModelShape | None = None,
    *,
    device: str | Machine = "generic",
    link: str | None = None,
    host: str | None = None,
    software: str = "eager",
    batch: int = 8,
    precision: str | None = None,
    state_dtypes: Sequence[str] = ("fp32", "bf16", "int8"),
    stashes: Sequence[str] = ("device", "host"),
    slots: Sequence[int] = (1, 2, 3),
    loss_scale: str | float = "dynamic",
    clip_grad_norm: float | None = None,
    master_weights: str = "fp32",
    exact_ties: bool | str = "auto",
    head_chunk_tokens: int | str | None = None,
    loss_over: str = "auto",
    host_memory: int | str | None = None,
    capacity: int | str | None = None,
    seq: int = 1024,
    **shape: Any,
) -> Plan:
    """Choose the options with which a model trains fastest on a machine.

    Arguments:
        model: The name of a model; or give `config`, or `layers`, `hidden` and so on (`shape`), as for
        `relay.simulate`. device, link, host, software, host_memory, capacity, precision: As for `relay.simulate`.
        batch, seq: Sequences in a step and tokens in a sequence. A batch is cut into micro-batches by powers of
            two, and into single sequences.
        state_dtypes, stashes, slots: The values to choose among.
        loss_scale, clip_grad_norm, master_weights, exact_ties, head_chunk_tokens, loss_over: As the run will have
            them.

    Raises NoFeasiblePlan where no combination fits, and the errors of `relay.simulate` for wrong arguments.
    """
    refuse_unknown("plan", shape, _KEYWORDS)
    state_dtypes, stashes, slots = (
        _several(name, values)
        for name, values in (("state_dtypes", state_dtypes), ("stashes", stashes), ("slots", slots))
    )
    description = describe(model, **shape)
    described = machine_of(device, link, host, software)
    precision = precision or default_precision(described)
    check_precision(described, precision)
    fixed: dict[str, Any] = {
        "device": described, "precision": precision, "loss_scale": loss_scale, "clip_grad_norm": clip_grad_norm,
        "batch": batch, "seq": seq, "host_memory": host_memory, "capacity": capacity, "must_fit": None,
        "master_weights": master_weights, "exact_ties": exact_ties,
        "head_chunk_tokens": head_chunk_tokens, "loss_over": loss_over,
    }  # fmt: skip
    search = _Search(description.shape, batch, fixed)
    for microbatches in _counts(batch):
        for stash in stashes:
            for count in slots:
                for state_dtype in state_dtypes:
                    search.simulated(microbatches=microbatches, stash=stash, slots=count, state_dtype=state_dtype)
    fitting = search.found
    if not fitting:
        refused = search.refused
        closest = min(refused, key=_excess)
        hint = ""
        if precision == "fp16" and loss_scale == "dynamic":
            hint = " A fixed loss scale (loss_scale='fixed') would keep no gradients on the host."
        raise NoFeasiblePlan(
            f"Nothing of {len(refused)} combinations fits. The closest ({_name(closest)}) still lacks: "
            + " ".join(closest.shortfalls)
            + hint
        )
    fastest = max(map(_speed, fitting))
    for stash in stashes:
        starts = [
            candidate
            for candidate in fitting
            if candidate.run.stash == stash and _speed(candidate) >= fastest * (1 - PROMISING)
        ]
        if starts:
            search.refine(_chosen(starts))
    allowed: dict[str, Sequence[Any]] = {
        "state_dtype": state_dtypes, "stash": stashes, "slots": slots, "microbatches": _counts(batch),
    }  # fmt: skip
    chosen, changed = search.settle(allowed)
    further = (*description.notes_at(seq), *loss_scale_notes(loss_scale, precision))
    chosen = replace(chosen, notes=tuple(dict.fromkeys((*further, *chosen.notes))))
    options = {name: getattr(chosen.run, name) for name in _OPTIONS}
    if precision == "fp16":
        options["loss_scale"] = loss_scale if loss_scale == "dynamic" else fixed_scale(loss_scale)
    if clip_grad_norm is not None:
        options["clip_grad_norm"] = clip_grad_norm
    if master_weights != OPTIONS["master_weights"].default:
        options["master_weights"] = master_weights
    if exact_ties != "auto":
        options["exact_ties"] = exact_ties
    if chosen.run.head_chunk_tokens is not None:
        options["head_chunk_tokens"] = chosen.run.head_chunk_tokens
    if loss_over != "auto":
        options["loss_over"] = loss_over
    if capacity is not None:
        options["capacity"] = parse_size(capacity)
    return Plan(options, chosen, tuple(_reasons(chosen, changed, search)), len(search.tried))


_KEYWORDS = (
    *(name for name in signature(plan).parameters if name != "shape"),
    *(name for name in signature(describe).parameters if name != "model"),
)


class _Search:
    """The candidates for one model on one machine that have been simulated."""

    def __init__(self, shape: ModelShape | MetaModel, batch: int, fixed: Mapping[str, Any]) -> None:
        self.tried: dict[str, Simulation] = {}
        self._shape = shape
        self._batch = batch
        self._fixed = fixed
        self._host_cache = HostCache()

    @property
    def found(self) -> list[Simulation]:
        """The candidates that fit."""
        return [candidate for candidate in self.tried.values() if candidate.fits]

    @property
    def refused(self) -> list[Simulation]:
        """The candidates that do not fit."""
        return [candidate for candidate in self.tried.values() if not candidate.fits]

    def simulated(self, **options: Any) -> Simulation:
        """The simulation of a candidate, run once only."""
        key = repr(sorted(options.items()))
        if key not in self.tried:
            self.tried[key] = simulate(self._shape, host_cache=self._host_cache, **self._fixed, **options)
        return self.tried[key]

    def refine(self, start: Simulation) -> None:
        """Vary recomputing and the layers a slot from a starting candidate."""
        best = self._with_less_recompute(start)
        layers = 2
        while layers <= self._layers():
            more = self._with_less_recompute(self._changed(best, layers_per_slot=layers, recompute=True))
            if not more.fits or _speed(more) < _speed(best) * (1 + TIE):
                break
            best, layers = more, 2 * layers
        if best is start:
            return
        counts = _counts(self._batch)
        index = counts.index(best.run.microbatches)
        for microbatches in counts[max(0, index - 1) : index + 2]:
            other = self._changed(best, microbatches=microbatches, recompute=True)
            self._with_less_recompute(other, best.run.recompute)

    def settle(self, allowed: Mapping[str, Sequence[Any]]) -> tuple[Simulation, list[tuple[str, Any, Simulation]]]:
        """The candidate that no change of a single option improves, and each such change with its simulation.

        An option takes the values in `allowed`; recomputing and the layers a slot take those tried so far, and
        recomputing also False.
        """
        values = dict(allowed)
        for option, further in (("recompute", [False]), ("layers_per_slot", [])):
            found = [*(getattr(candidate.run, option) for candidate in self.tried.values()), *further]
            values[option] = list({repr(value): value for value in found}.values())  # 1 and True are the same key
        while True:
            chosen = _chosen(self.found)
            changes = [
                (option, value, self._changed(chosen, **{option: value}))
                for option in _REASONED
                for value in values[option]
                if repr(value) != repr(getattr(chosen.run, option))
            ]
            if _chosen(self.found) is chosen:
                return chosen, changes

    def _changed(self, base: Simulation, **changes: Any) -> Simulation:
        names = ("microbatches", "stash", "slots", "state_dtype", "layers_per_slot", "recompute")
        options = {name: getattr(base.run, name) for name in names} | changes
        # Defaults are left out, so that equal candidates have equal keys.
        if options["layers_per_slot"] == 1:
            del options["layers_per_slot"]
        if options["recompute"] is True:
            del options["recompute"]
        return self.simulated(**options)

    def _with_less_recompute(self, base: Simulation, wanted: bool | int = False) -> Simulation:
        """The fastest of three: everything recomputed; as little as fits, or `wanted`; half of that saving."""
        if not base.fits or wanted is True:
            return base
        segments = -(-self._layers() // base.run.layers_per_slot) + 1
        least, most = int(wanted), segments
        while least < most:
            middle = (least + most) // 2
            if self._fits(replace(base.run, recompute=middle), base):
                most = middle
            else:
                least = middle + 1
        if least >= segments:
            return base
        choices = [base, self._changed(base, recompute=least or False)]
        if segments - least > 1:
            choices.append(self._changed(base, recompute=(least + segments) // 2))
        best = max((choice for choice in choices if choice.fits), key=_speed)
        return best if _speed(best) > _speed(base) * (1 + TIE) else base

    def _fits(self, run: RunShape, like: Simulation) -> bool:
        room = None if like.machine.device.unified else like.device_capacity
        prepared = SimulatedRun(self._shape, run, like.machine, self._host_cache, room)
        memory = prepared.memory()
        prepared.close()
        return not shortfalls(memory, like.device_capacity, like.host_capacity, like.machine.device.unified)

    def _layers(self) -> int:
        assert isinstance(self._shape, ModelShape)
        return self._shape.layers


def _speed(candidate: Simulation) -> float:
    return candidate.tokens_per_second if candidate.fits else 0.0


def _chosen(found: Sequence[Simulation]) -> Simulation:
    """The plainest of the candidates that are within `TIE` of the fastest."""
    best = max(candidate.tokens_per_second for candidate in found)
    return min(
        (candidate for candidate in found if candidate.tokens_per_second >= best * (1 - TIE)),
        key=lambda candidate: (
            _PLAINNESS[candidate.run.state_dtype],
            _PLAINNESS[candidate.run.stash],
            candidate.run.recompute is not True,
            candidate.run.layers_per_slot,
            candidate.run.slots == 1,  # with one slot nothing loads while a layer computes
            candidate.run.slots,
            -candidate.tokens_per_second,
        ),
    )


def _counts(batch: int) -> list[int]:
    """The possible numbers of micro-batches, as a batch is really cut: 6 sequences in 4 micro-batches are 3."""
    wanted = [1]
    while wanted[-1] * 2 < batch:
        wanted.append(wanted[-1] * 2)
    return list(dict.fromkeys(len(RunShape(batch=batch, microbatches=count).pieces()) for count in [*wanted, batch]))


def _excess(candidate: Simulation) -> float:
    """The needed memory as a share of the capacity, for device or host, whichever is larger."""
    device = candidate.memory.device_total / candidate.device_capacity
    return max(device, candidate.memory.host_total / candidate.host_capacity)


def _name(candidate: Simulation) -> str:
    run = candidate.run
    recompute = ""
    if run.recompute is not True:
        recompute = f", {run.recompute} segments recomputing" if run.recompute else ", none recomputing"
    layers = f" of {run.layers_per_slot} layers" if run.layers_per_slot > 1 else ""
    pieces = f"{run.microbatches} micro-batch{'es' if run.microbatches > 1 else ''}"
    slots = f"{run.slots} slot{'s' if run.slots > 1 else ''}"
    return f"{pieces}, {slots}{layers}, stash on the {run.stash}, {run.state_dtype} states{recompute}"


def _reasons(chosen: Simulation, changes: Sequence[tuple[str, Any, Simulation]], search: _Search) -> list[str]:
    reasons = [
        f"{_name(chosen)}: {chosen.tokens_per_second:,.1f} tokens/s, {format_size(chosen.memory.device_total)} of the "
        f"device and {format_size(chosen.memory.host_total)} of the host; bottleneck {chosen.bottleneck}",
        f"{len(search.found)} of {len(search.tried)} combinations fit; the plainest within {TIE:.0%} of the fastest is "
        f"chosen, so a change may give up to {TIE:+.0%}. With one option changed and the others as chosen:",
    ]
    for option, value, other in changes:
        if other.fits:
            gain = round(other.tokens_per_second / chosen.tokens_per_second - 1, 3) + 0.0  # -0.0 + 0.0 is 0.0
            reasons.append(f"{option}={value} would give {gain:+.1%}")
        else:
            reasons.append(f"{option}={value} does not fit")
    return reasons
