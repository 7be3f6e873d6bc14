"""Runs that share a host state give the figures that each gives alone."""

from typing import Any

import pytest

import relay
from relay.simulation.described.transformer_shape import ModelShape
from relay.simulation.host_cache import HostCache

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
@pytest.mark.sample("fp32")
def test_a_run_with_a_shared_host_state_gives_the_figures_of_a_run_alone(precision: str) -> None:
    common: dict[str, Any] = {"device": "t4", "batch": 7, "microbatches": 2, "seq": 16, "precision": precision}
    host_cache = HostCache()
    for choice in [*CHOICES, *reversed(CHOICES)]:
        alone = relay.simulate(SHAPE, **{**common, **choice}, record=True)
        shared = relay.simulate(SHAPE, **{**common, **choice}, record=True, host_cache=host_cache)
        assert (shared.memory, shared.step) == (alone.memory, alone.step), choice
    assert sum(len(idle) for idle in host_cache._idle.values()) < len(CHOICES)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_a_run_gives_the_same_figures_whatever_was_simulated_before(stash: str) -> None:
    common: dict[str, Any] = {"device": "t4", "seq": 16, "microbatches": 2, "recompute": False, "stash": stash}
    even, ragged = {"batch": 4}, {"batch": 5}
    before = {number: relay.simulate(SHAPE, **common, **batch) for number, batch in enumerate((even, ragged))}
    for number, batch in enumerate((even, ragged)):
        again = relay.simulate(SHAPE, **common, **batch)
        assert (again.memory, again.step) == (before[number].memory, before[number].step)
