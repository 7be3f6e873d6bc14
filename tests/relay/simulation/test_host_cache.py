"""Runs that share what is on the host say what each would say by itself."""

from typing import Any

import pytest

import relay
from relay.simulation.host_cache import HostSides
from relay.simulation.transformer_shape import ModelShape

SHAPE = ModelShape(5, 64, 2, 256)
CHOICES: list[dict[str, Any]] = [
    {"slots": 3},
    {"stash": "host"},
    {"microbatches": 3},
    {"recompute": 2},
    {"layers_per_slot": 2},
    {"state_dtype": "int8"},
    {"clip_grad_norm": 1.0},
    {"optimizer": relay.SGD(lr=0.1)},
    {"device": "m2-ultra-76c"},
    {},
]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_beside_anothers_host_side_says_what_it_says_by_itself(precision: str) -> None:
    common: dict[str, Any] = {"device": "t4", "batch": 7, "microbatches": 2, "sequence": 16, "precision": precision}
    sides = HostSides()
    for choice in [*CHOICES, *reversed(CHOICES)]:
        alone = relay.simulate(SHAPE, **{**common, **choice}, record=True)
        shared = relay.simulate(SHAPE, **{**common, **choice}, record=True, sides=sides)
        assert (shared.memory, shared.step) == (alone.memory, alone.step), choice
    assert sum(len(idle) for idle in sides._idle.values()) < len(CHOICES)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_run_says_the_same_whatever_was_simulated_before(stash: str) -> None:
    common: dict[str, Any] = {"device": "t4", "sequence": 16, "microbatches": 2, "recompute": False, "stash": stash}
    even, ragged = {"batch": 4}, {"batch": 5}
    before = {number: relay.simulate(SHAPE, **common, **one) for number, one in enumerate((even, ragged))}
    for number, one in enumerate((even, ragged)):
        again = relay.simulate(SHAPE, **common, **one)
        assert (again.memory, again.step) == (before[number].memory, before[number].step)
