"""Split masters hold float32 to the bit, and fused updates of them are those of float32 masters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from relay.optim import fused
from relay.optim.split_master import BLOCK, SplitMaster, sizes
from tests.support.fused_states import ADAM, SGD, new_state, normal, value

pytestmark = pytest.mark.skipif(not fused.available(), reason=f"not available: {fused.reason()}")

RULES: dict[str, tuple[fused.Rule, dict[str, Any]]] = {
    "Adam": (fused.ADAM, ADAM),
    "AdamW": (fused.ADAMW, ADAM),
    "LAMB": (fused.LAMB, ADAM),
    "Lion": (fused.LION, ADAM),
    "SGD": (fused.SGD, SGD),
    "SGD with momentum": (fused.SGD, SGD | {"momentum": 0.9, "nesterov": True}),
}


def split(values: torch.Tensor) -> SplitMaster:
    """A split master of these values; its bitmap is not initialised, as the store's is not."""
    count = values.numel()
    flags, ties = sizes(count)
    master = SplitMaster(
        torch.empty(values.shape, dtype=torch.bfloat16),
        torch.empty(count, dtype=torch.int16),
        torch.zeros(flags, dtype=torch.uint8),
        torch.full((ties,), 0xFF, dtype=torch.uint8),
    )
    master.assign(values)
    return master


def from_patterns(patterns: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(patterns.astype(np.uint32).view(np.float32).copy())


def check_exact(values: torch.Tensor) -> None:
    master = split(values)
    back = master.to_float()
    numbers = ~values.isnan()
    assert torch.equal(back.isnan(), ~numbers)
    assert torch.equal(back.view(torch.int32)[numbers], values.view(torch.int32)[numbers])
    assert torch.equal(master.high[numbers].view(torch.int16), values[numbers].bfloat16().view(torch.int16))
    assert bool(master.high[~numbers].isnan().all())


EVERY_HIGH = np.arange(2**16, dtype=np.uint64) << 16
LOWS = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


@pytest.mark.parametrize("low", LOWS, ids=hex)
def test_every_upper_half_with_the_lower_halves_at_which_rounding_turns_is_held_to_the_bit(low: int) -> None:
    check_exact(from_patterns(EVERY_HIGH | low))


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", range(0, 2**32, 2**27))
def test_every_float32_is_held_to_the_bit(start: int) -> None:
    for first in range(start, start + 2**27, 2**23):
        check_exact(from_patterns(np.arange(first, first + 2**23, dtype=np.uint64)))


@pytest.mark.parametrize("count", [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 13])
def test_tensors_of_any_size_are_held_and_ties_come_and_go(count: int) -> None:
    values = normal(count, 3)
    master = split(values)
    for share in (1, 3, 1000, 1):  # each time other elements are ties that were rounded down to even
        words = normal(count, share).view(torch.int32)
        words[::share] = (words[::share] & ~0x1FFFF) | 0x8000
        master.assign(words.view(torch.float32))
        assert torch.equal(master.to_float().view(torch.int32), words)
        assert bool(master.flags.any()) == (count > 0)
        master.assign(values)
        assert torch.equal(master.to_float(), values)


def test_a_bitmap_is_touched_only_where_its_block_has_a_tie() -> None:
    values = torch.ones(3 * BLOCK)
    values.view(torch.int32)[BLOCK + 5] = 0x3F808000
    master = split(values)
    assert master.flags.tolist() == [0, 1, 0]
    touched = master.ties != 0xFF
    assert touched.nonzero().view(-1).tolist() == list(range(BLOCK // 8, 2 * BLOCK // 8))


def odd_values(count: int) -> torch.Tensor:
    """Weights with ties that round down and up, zeros of both signs, denormals, and infinities."""
    values = normal(count, 1)
    words = values.view(torch.int32)
    words[::7] = (words[::7] & ~0x1FFFF) | 0x8000
    words[1::7] = (words[1::7] & ~0x1FFFF) | 0x18000
    odd = [0.0, -0.0, 1e-41, -1e-45, float("inf"), -float("inf"), 3.4e38, -3.4e38]
    values[3 : 3 + len(odd)] = torch.tensor(odd)
    return values


@pytest.mark.parametrize("states", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("kind", RULES)
def test_fifty_updates_of_split_masters_are_those_of_float32_masters(kind: str, states: str) -> None:
    rule, group = RULES[kind]
    count = 2 * BLOCK + 77
    values = odd_values(count)
    if kind == "LAMB":  # an infinite norm would make everything NaN at once
        values = values.clamp(-9.0, 9.0)
    whole, rounded, halves = values.clone(), values.bfloat16(), split(values)
    labels = {} if kind == "SGD" else rule.moments
    ours, theirs = ({label: new_state(states, count, signed=signed) for label, signed in labels.items()} for _ in "12")
    ratios = []
    for step in range(1, 51):
        gradient = normal(count, step, spread=2).bfloat16()
        common = {"step": step, "seed": 5, "factor": 0.5}
        ratios.append(fused.update(rule, whole, gradient, theirs, rounded, group, **common))
        assert fused.update(rule, halves, gradient, ours, None, group, **common) == ratios[-1]
    found = halves.to_float()
    numbers = ~whole.isnan()
    assert numbers.sum() > count - 600
    assert torch.equal(found.view(torch.int32)[numbers], whole.view(torch.int32)[numbers])
    assert torch.equal(found.isnan(), ~numbers)
    assert torch.equal(halves.high[numbers], rounded[numbers])
    for label in labels:
        here, there = value(ours[label]), value(theirs[label])
        assert torch.equal(here.isnan(), there.isnan())
        assert torch.equal(here.nan_to_num(), there.nan_to_num())


def test_the_result_does_not_depend_on_the_threads() -> None:
    count = 3 * fused.SMALLEST_SHARE + 5
    values = odd_values(count)
    found = []
    for threads in (1, 3):
        master = split(values)
        state = {label: torch.zeros(count) for label in fused.ADAMW.moments}
        for step in range(1, 4):
            fused.update(fused.ADAMW, master, normal(count, step), state, None, ADAM, step=step, threads=threads)
        found.append(master.to_float().view(torch.int32))
    assert torch.equal(*found)


def test_a_split_master_takes_no_rounded_weight_beside_it() -> None:
    master = split(torch.ones(8))
    with pytest.raises(ValueError, match="weight_out goes with a float32 master"):
        fused.update(fused.SGD, master, torch.ones(8), {}, torch.empty(8, dtype=torch.bfloat16), SGD, step=1)


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of 8 elements.*of 9"):
        split(torch.ones(8)).assign(torch.ones(9))
    with pytest.raises(ValueError, match=r"received torch\.float64"):
        split(torch.ones(8)).to_float(torch.empty(8, dtype=torch.float64))
