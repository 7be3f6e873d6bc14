"""Choosing how to run a model on a machine: micro-batches, slots, stash and state dtype, by simulating each choice.

It tries every combination that it is given, keeps those that fit device and host, and takes the fastest. Among
choices within `TIE` of it the plainer one wins: states in more bits, activations on the device, fewer slots. It
decides nothing that changes the model or the batch, and the dtype of states only among those that are allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hal.memory import format_size
from hal.spec import Machine, machine
from relay.errors import RelayError
from relay.shapes import ModelShape
from relay.simulation import Simulation, check_precision, default_precision, resolve, simulate

TIE = 0.02
"""Choices whose speeds differ by less than this share count as equal: predictions are no better than that."""

_PLAINNESS = {"fp32": 0, "bf16": 1, "int8": 2, "device": 0, "host": 1}


class NoPlan(RelayError):
    """No combination fits. What to do: what the message says is closest, another machine, or a smaller model."""


@dataclass(frozen=True)
class Plan:
    """The choice, what it is expected to do, and why it was taken. `options` are those of `relay.Trainer`."""

    options: dict[str, Any]
    expected: Simulation
    reasons: tuple[str, ...]
    tried: int

    def as_toml(self) -> str:
        """A run file for `relay train`."""
        shape, run = self.expected.shape, self.expected.run
        assert isinstance(shape, ModelShape)
        rows: dict[str, Any] = {
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": shape.heads,
            "seq": run.sequence,
            "batch": run.batch,
            **self.options,
        }
        lines = [f"# {reason}" for reason in self.reasons]
        lines += [f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}" for key, value in rows.items()]
        return "\n".join(lines) + "\n"


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
    slots: Sequence[int] = (2, 3),
    host_memory: int | str | None = None,
    capacity: int | str | None = None,
    sequence: int = 1024,
    **shape: Any,
) -> Plan:
    """The best way to run a model, given by name or by `layers`, `hidden` and so on as `relay.simulate` takes them.

    `batch` sequences make a step; pieces are powers of two and the whole batch. Raises NoPlan where nothing fits.
    """
    described = device if isinstance(device, Machine) else machine(device, link, host, software)
    resolved = resolve(model, **shape)
    precision = precision or default_precision(described)
    check_precision(described, precision)
    found: list[Simulation] = []
    refused: list[Simulation] = []
    for microbatches in _counts(batch):
        for stash in stashes:
            for count in slots:
                for state_dtype in state_dtypes:
                    one = simulate(
                        resolved,
                        device=described,
                        host_memory=host_memory,
                        capacity=capacity,
                        precision=precision,
                        must_fit=None,
                        sequence=sequence,
                        batch=batch,
                        microbatches=microbatches,
                        stash=stash,
                        slots=count,
                        state_dtype=state_dtype,
                    )
                    (found if one.fits else refused).append(one)
    if not found:
        closest = min(refused, key=_excess)
        raise NoPlan(
            f"Nothing of {len(refused)} combinations fits. The closest ({_name(closest)}) still lacks: "
            + " ".join(closest.shortfalls)
        )
    best = max(one.tokens_per_second for one in found)
    chosen = min(
        (one for one in found if one.tokens_per_second >= best * (1 - TIE)),
        key=lambda one: (
            _PLAINNESS[one.run.state_dtype],
            _PLAINNESS[one.run.stash],
            one.run.slots,
            -one.tokens_per_second,
        ),
    )
    run = chosen.run
    options = {name: getattr(run, name) for name in ("microbatches", "slots", "stash", "precision", "state_dtype")}
    return Plan(options, chosen, tuple(_reasons(chosen, found, refused)), len(found) + len(refused))


def _counts(batch: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 < batch:
        counts.append(counts[-1] * 2)
    return list(dict.fromkeys([*counts, batch]))


def _excess(one: Simulation) -> float:
    """By how much a choice passes what there is, the worse of device and host."""
    device = one.memory.device_total / one.device_capacity
    return max(device, one.memory.host_total / one.host_capacity)


def _name(one: Simulation) -> str:
    run = one.run
    return f"{run.microbatches} micro-batches, {run.slots} slots, stash on the {run.stash}, {run.state_dtype} states"


def _reasons(chosen: Simulation, found: Sequence[Simulation], refused: Sequence[Simulation]) -> list[str]:
    reasons = [
        f"{_name(chosen)}: {chosen.tokens_per_second:,.1f} tokens/s, {format_size(chosen.memory.device_total)} of the "
        f"device and {format_size(chosen.memory.host_total)} of the host; bottleneck {chosen.bottleneck}",
        f"{len(found)} of {len(found) + len(refused)} combinations fit",
    ]
    for option in ("state_dtype", "stash", "slots", "microbatches"):
        for other in dict.fromkeys(getattr(one.run, option) for one in [*found, *refused]):
            if other == getattr(chosen.run, option):
                continue
            speeds = [one.tokens_per_second for one in found if getattr(one.run, option) == other]
            if speeds:
                change = max(speeds) / chosen.tokens_per_second - 1
                reasons.append(f"{option}={other} would give {change:+.1%} at best")
            else:
                reasons.append(f"{option}={other} does not fit")
    return reasons
