"""The search for the options of a run: candidates are simulated, and the plainest among the fastest is taken.

`relay.simulation.plan` searches for described models and `relay.fitting` for a user's own model; both begin with
candidates of their own, and let the search refine and settle them. Candidates within `TIE` of the fastest count as
equal, and the plainest of them wins.

Invariant: a candidate is simulated once, and what is chosen fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hal.spec.units import format_size
from relay.simulation.described.meta_model import MetaModel
from relay.simulation.described.transformer_shape import ModelShape
from relay.simulation.host_cache import HostCache
from relay.simulation.shortfall import shortfalls
from relay.simulation.simulate import Simulation, simulate
from relay.simulation.simulated_step import RunShape, SimulatedRun

TIE = 0.02
"""Candidates whose speeds differ by less than this share count as equal: predictions are no more exact than that."""

REASONED = (
    "master_weights", "state_dtype", "stash", "recompute", "resident_layers", "layers_per_slot", "slots",
    "microbatches", "head_chunk_tokens",
)  # fmt: skip
"""The options that are searched, in the order in which reasons are given."""

_PLAINNESS = {"fp32": 0, "split": 1, "as_given": 1, "bf16": 1, "int8": 2, "device": 0, "host": 1}
_DEFAULTS = {
    "layers_per_slot": 1, "recompute": True, "resident_layers": 0, "master_weights": "fp32", "head_chunk_tokens": None,
}  # fmt: skip


class Search:
    """The candidates for one model on one machine that have been simulated. What is `fixed` is not varied."""

    def __init__(self, shape: ModelShape | MetaModel, batch: int, fixed: Mapping[str, Any]) -> None:
        self.tried: dict[str, Simulation] = {}
        self._shape = shape
        self._batch = batch
        self._fixed = fixed
        self.host_cache = HostCache()

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
            self.tried[key] = simulate(self._shape, host_cache=self.host_cache, **self._fixed, **options)
        return self.tried[key]

    def begin(
        self,
        microbatches: Sequence[int],
        stashes: Sequence[str],
        slots: Sequence[int],
        state_dtypes: Sequence[str],
    ) -> None:
        """Simulate the combinations from which the search starts.

        With the same other options a stash on the host only adds transfers to one on the device, and with one slot
        nothing loads while a layer computes. Where the better one fits the other is left out. The best combination is
        simulated with each stash, since a stash on the host leaves room for other options.
        """
        for count in microbatches:
            for state_dtype in state_dtypes:
                fitting: set[int] = set()  # the numbers of slots that fit, of the stashes so far
                for stash in sorted(stashes, key=lambda stash: stash == "host"):
                    for number in sorted(slots, key=lambda number: (number == 1, number)):
                        if number in fitting or (number == 1 and fitting):
                            continue
                        options = {"microbatches": count, "stash": stash, "slots": number, "state_dtype": state_dtype}
                        if self.simulated(**options).fits:
                            fitting.add(number)
        if self.found:
            best = plainest(self.found).run
            for stash in stashes:
                self.simulated(
                    microbatches=best.microbatches, stash=stash, slots=best.slots, state_dtype=best.state_dtype
                )

    def refine(self, start: Simulation) -> None:
        """Vary recomputing and the layers a slot from a starting candidate."""
        best = self._with_less_recompute(start)
        layers = 2
        while layers <= self._most_layers():
            more = self._with_less_recompute(self._changed(best, layers_per_slot=layers, recompute=True))
            if not more.fits or speed(more) < speed(best) * (1 + TIE):
                break
            best, layers = more, 2 * layers
        if best is start or "microbatches" in self._fixed:
            return
        counts = microbatch_counts(self._batch)
        index = counts.index(best.run.microbatches)
        for microbatches in counts[max(0, index - 1) : index + 2]:
            other = self._changed(best, microbatches=microbatches, recompute=True)
            self._with_less_recompute(other, best.run.recompute)

    def settle(self, allowed: Mapping[str, Sequence[Any]]) -> tuple[Simulation, list[tuple[str, Any, Simulation]]]:
        """The candidate that no change of a single option improves, and each such change with its simulation.

        An option takes the values in `allowed`; recomputing and the layers a slot take those tried so far, recomputing
        also False, and resident layers none or as many as fit.
        """
        values = dict(allowed)
        for option, further in (("recompute", [False]), ("layers_per_slot", []), ("resident_layers", [0, "auto"])):
            found = [*(getattr(candidate.run, option) for candidate in self.tried.values()), *further]
            values[option] = list({repr(value): value for value in found}.values())  # 1 and True are the same key
        while True:
            chosen = plainest(self.found)
            changes = [
                (option, value, self._changed(chosen, **{option: value}))
                for option in REASONED
                if option not in self._fixed
                for value in values.get(option, ())
                if repr(value) != repr(getattr(chosen.run, option))
            ]
            if plainest(self.found) is chosen:
                return chosen, changes

    def _changed(self, base: Simulation, **changes: Any) -> Simulation:
        options = {name: getattr(base.run, name) for name in REASONED if name not in self._fixed} | changes
        # Defaults are left out, so that equal candidates have equal keys (1 and True are equal too).
        return self.simulated(
            **{name: value for name, value in options.items() if repr(value) != repr(_DEFAULTS.get(name))}
        )

    def _with_less_recompute(self, base: Simulation, wanted: bool | int = False) -> Simulation:
        """The fastest of three: everything recomputed; as little as fits, or `wanted`; half of that saving."""
        if not base.fits or wanted is True or "recompute" in self._fixed:
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
        best = max((choice for choice in choices if choice.fits), key=speed)
        return best if speed(best) > speed(base) * (1 + TIE) else base

    def _fits(self, run: RunShape, like: Simulation) -> bool:
        room = None if like.machine.device.unified else like.device_capacity
        prepared = SimulatedRun(self._shape, run, like.machine, self.host_cache, room)
        memory = prepared.memory()
        prepared.close()
        return not shortfalls(memory, like.device_capacity, like.host_capacity, like.machine.device.unified)

    def _layers(self) -> int:
        return self._shape.layers

    def _most_layers(self) -> int:
        """The most layers a slot that are tried: of a module two, since each number is another trace."""
        if "layers_per_slot" in self._fixed:
            return 1
        return self._layers() if isinstance(self._shape, ModelShape) else min(2, self._layers())


def speed(candidate: Simulation) -> float:
    """Tokens a second; 0 for a candidate that does not fit."""
    return candidate.tokens_per_second if candidate.fits else 0.0


def plainest(found: Sequence[Simulation]) -> Simulation:
    """The plainest of the candidates that are within `TIE` of the fastest."""
    best = max(candidate.tokens_per_second for candidate in found)
    return min(
        (candidate for candidate in found if candidate.tokens_per_second >= best * (1 - TIE)),
        key=lambda candidate: (
            _PLAINNESS[candidate.run.state_dtype],
            _PLAINNESS[candidate.run.master_weights],
            _PLAINNESS[candidate.run.stash],
            candidate.run.head_chunk_tokens is not None,
            candidate.run.resident_layers != 0,
            candidate.run.recompute is not True,
            candidate.run.layers_per_slot,
            candidate.run.slots == 1,  # with one slot nothing loads while a layer computes
            candidate.run.slots,
            -candidate.tokens_per_second,
        ),
    )


def microbatch_counts(batch: int) -> list[int]:
    """The possible numbers of micro-batches, as a batch is really cut: 6 sequences in 4 micro-batches are 3."""
    wanted = [1]
    while wanted[-1] * 2 < batch:
        wanted.append(wanted[-1] * 2)
    return list(dict.fromkeys(len(RunShape(batch=batch, microbatches=count).pieces()) for count in [*wanted, batch]))


def excess(candidate: Simulation) -> float:
    """The needed memory as a share of the capacity, for device or host, whichever is larger."""
    device = candidate.memory.device_total / candidate.device_capacity
    return max(device, candidate.memory.host_total / candidate.host_capacity)


def name_of(candidate: Simulation) -> str:
    """The options of a candidate in words."""
    run = candidate.run
    recompute = ""
    if run.recompute is not True:
        recompute = f", {run.recompute} segments recomputing" if run.recompute else ", none recomputing"
    layers = f" of {run.layers_per_slot} layers" if run.layers_per_slot > 1 else ""
    resident = ""
    if run.resident_layers:
        resident = f", {candidate.memory.resident_layers} layers resident"
    chunks = f", head over {run.head_chunk_tokens} positions at a time" if run.head_chunk_tokens is not None else ""
    split = ", split masters" if run.master_weights == "split" else ""
    pieces = f"{run.microbatches} micro-batch{'es' if run.microbatches > 1 else ''}"
    slots = f"{run.slots} slot{'s' if run.slots > 1 else ''}"
    further = f"{split}{resident}{chunks}{recompute}"
    return f"{pieces}, {slots}{layers}, stash on the {run.stash}, {run.state_dtype} states{further}"


def reasons_for(chosen: Simulation, changes: Sequence[tuple[str, Any, Simulation]], search: Search) -> list[str]:
    """What was chosen, and what changing each option alone would give."""
    reasons = [
        f"{name_of(chosen)}: {chosen.speed.text('{:,.1f}'.format)} {chosen.unit}/s, "
        f"{format_size(chosen.memory.device_total)} of the device and {format_size(chosen.memory.host_total)} of the "
        f"host; bottleneck {chosen.bottleneck}",
        f"{len(search.found)} of {len(search.tried)} combinations fit; the plainest within {TIE:.0%} of the fastest is "
        f"chosen, so a change may give up to {TIE:+.0%}. With one option changed and the others as chosen:",
    ]
    if chosen.narrowing is not None:
        before, after = chosen.narrowing
        reasons.insert(
            1, f"the calibration narrows the range of the step from a factor of {before:.2f} to one of {after:.2f}"
        )
    for option, value, other in changes:
        if other.fits:
            gain = round(other.tokens_per_second / chosen.tokens_per_second - 1, 3) + 0.0  # -0.0 + 0.0 is 0.0
            reasons.append(f"{option}={value} would give {gain:+.1%}")
        else:
            reasons.append(f"{option}={value} does not fit")
    return reasons
