"""`relay.plan`: the options with which a model runs fastest on a machine, found by simulating candidates.

The options are micro-batches, slots, layers a slot, resident layers, stash, recomputing and the state dtype. Search:

1. The combinations of micro-batches, stash, slots and state dtypes, with one layer a slot and everything recomputed,
   without those that are neither faster nor plainer than one that fits: a stash on the host where one on the device
   fits, and one slot where more fit.
2. From the fastest of each stash: as many segments save their tensors as fit, or half of these; two, four, ... layers a
   slot while that is faster; then the neighbouring numbers of micro-batches.
3. Each option of the best candidate is changed alone, and a better candidate replaces it, until no change is better.
   The results of the last changes are the reasons.

Of candidates that are about as fast the plainest wins: states in more bits, activations on the device, no resident
layers, everything recomputed, fewer layers a slot, fewer slots (but one only where two do not fit or are slower).

Invariant: the plan changes neither the model nor the batch, and uses only the state dtypes that are allowed.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from hal.spec import Machine
from hal.spec.units import parse_size
from relay.adapter_options import ADAPTER_OPTIONS
from relay.eps.bind_optimizer import as_spec
from relay.errors import RelayError
from relay.optim.optimizers import AdamW
from relay.option_schema import fixed_scale
from relay.options import OPTIONS, refuse_unknown
from relay.precision import COMPUTE
from relay.runtime.grad_mode import as_if_alone
from relay.simulation.calibrated_machine import check_measured
from relay.simulation.described.describe import describe, loss_scale_notes
from relay.simulation.described.master_weights import states_may_be_small
from relay.simulation.described.transformer_shape import ModelShape, ShapeError
from relay.simulation.plan_file import TABLE, as_table, caution
from relay.simulation.search import Search, excess, microbatch_counts, name_of, plainest, reasons_for, speed
from relay.simulation.simulate import Simulation, check_precision, default_precision, machine_of, with_lengths
from relay.simulation.simulated_step import RunShape

PROMISING = 0.2
"""The search continues from candidates that are slower than the fastest by at most this share."""

_OPTIONS = (
    "microbatches", "slots", "layers_per_slot", "stash", "recompute", "resident_layers", "precision", "state_dtype",
)  # fmt: skip


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
        if not isinstance(shape, ModelShape):
            return f"This plan is for {shape.title}. Give the options to relay.Trainer with that model."
        return caution(shape, shape.layers, shape.hidden, shape.heads)

    def as_toml(self) -> str:
        """A run file for `relay train`. It holds the planned model too, and the `caution` where that is another one.

        Raises ShapeError for a model that `relay train` has no options for.
        """
        shape, run = self.expected.shape, self.expected.run
        if not isinstance(shape, ModelShape):
            raise ShapeError(f"A run file is for `relay train`, which trains a GPT over bytes. {self.caution}")
        if "optimizer" in self.options:
            raise ShapeError("A run file is for `relay train`, which has AdamW. Give the options to relay.Trainer.")
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
    device: str | Machine | Sequence[str] = "generic",
    count: int = 1,
    one_link: bool = False,
    link: str | None = None,
    host: str | None = None,
    software: str = "eager",
    calibration: str | None = None,
    batch: int = 8,
    precision: str | None = None,
    state_dtypes: Sequence[str] | None = None,
    stashes: Sequence[str] = ("device", "host"),
    slots: Sequence[int] = (1, 2, 3),
    loss_scale: str | float = "dynamic",
    clip_grad_norm: float | None = None,
    master_weights: str = "fp32",
    exact_ties: bool | str = "auto",
    head_chunk_tokens: int | str | None = None,
    mlp_chunk_tokens: int | None = None,
    loss_over: str = "auto",
    optimizer: Any = None,
    host_memory: int | str | None = None,
    capacity: int | str | None = None,
    seq: int | None = None,
    seconds: float | None = None,
    **shape: Any,
) -> Plan:
    """Choose the options with which a model trains fastest on a machine.

    Arguments:
        model: The name of a model; or give `config`, or `layers`, `hidden` and so on (`shape`), as for
        `relay.simulate`. device, count, one_link, link, host, software, calibration, host_memory, capacity, precision:
        As for `relay.simulate`.
        batch, seq: Sequences in a step and tokens in a sequence (1024, or what a configuration has positions for). A
            batch is cut into micro-batches by powers of two, and into single sequences.
        seconds: As for `relay.simulate`.
        state_dtypes, stashes, slots: The values to choose among. All state dtypes that the optimizer has, if not given.
        loss_scale, clip_grad_norm, master_weights, exact_ties, head_chunk_tokens, mlp_chunk_tokens, loss_over,
            optimizer: As the run will have them. AdamW, if no optimizer is given.

    Raises NoFeasiblePlan where no combination fits, and the errors of `relay.simulate` for wrong arguments.
    """
    refuse_unknown("plan", shape, _KEYWORDS)
    stashes, slots = _several("stashes", stashes), _several("slots", slots)
    described = machine_of(device, link, host, software, count, one_link, calibration)
    precision = precision or default_precision(described)
    description = describe(model, **shape, batch=batch, seq=seq, seconds=seconds, half=precision != "fp32")
    made = "config" in shape or isinstance(model, str)
    lengths = with_lengths(description.shape, {} if seq is None else {"seq": seq}, made)
    seq = lengths.get("seq", RunShape.seq)
    check_precision(described, precision)
    if calibration is not None:
        check_measured(described, precision, calibration)
    updates = AdamW() if optimizer is None else as_spec(optimizer)
    if state_dtypes is None:
        small = states_may_be_small(description.shape, master_weights, COMPUTE[precision], updates)
        state_dtypes = ("fp32", "bf16", "int8") if small else ("fp32",)
    state_dtypes = _several("state_dtypes", state_dtypes)
    fixed: dict[str, Any] = {
        "device": described, "precision": precision, "loss_scale": loss_scale, "clip_grad_norm": clip_grad_norm,
        "batch": batch, "seq": seq, "host_memory": host_memory, "capacity": capacity, "must_fit": None,
        "master_weights": master_weights, "exact_ties": exact_ties,
        "head_chunk_tokens": head_chunk_tokens, "mlp_chunk_tokens": mlp_chunk_tokens,
        "loss_over": loss_over, "optimizer": updates,
    }  # fmt: skip
    search = Search(description.shape, batch, fixed)
    search.begin(microbatch_counts(batch), stashes, slots, state_dtypes)
    fitting = search.found
    if not fitting:
        refused = search.refused
        closest = min(refused, key=excess)
        hint = ""
        if precision == "fp16" and loss_scale == "dynamic":
            hint = " A fixed loss scale (loss_scale='fixed') would keep no gradients on the host."
        raise NoFeasiblePlan(
            f"Nothing of {len(refused)} combinations fits. The closest ({name_of(closest)}) still lacks: "
            + " ".join(closest.shortfalls)
            + hint
        )
    fastest = max(map(speed, fitting))
    for stash in stashes:
        starts = [
            candidate
            for candidate in fitting
            if candidate.run.stash == stash and speed(candidate) >= fastest * (1 - PROMISING)
        ]
        if starts:
            search.refine(plainest(starts))
    allowed: dict[str, Sequence[Any]] = {
        "state_dtype": state_dtypes, "stash": stashes, "slots": slots, "microbatches": microbatch_counts(batch),
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
    if mlp_chunk_tokens is not None:
        options["mlp_chunk_tokens"] = mlp_chunk_tokens
    if loss_over != "auto":
        options["loss_over"] = loss_over
    if optimizer is not None:
        options["optimizer"] = optimizer
    if described.others:
        options["layers_per_visit"] = chosen.run.layers_per_visit
    if capacity is not None:
        options["capacity"] = parse_size(capacity)
    return Plan(options, chosen, tuple(reasons_for(chosen, changed, search)), len(search.tried))


_KEYWORDS = (
    *(name for name in signature(plan).parameters if name != "shape"),
    *(name for name in signature(describe).parameters if name not in ("model", "half", "adapters")),
    *ADAPTER_OPTIONS,
)
