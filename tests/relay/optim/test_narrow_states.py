"""What `relay.optim.fused` keeps in less than float32: 16-bit weights, moments rounded at random, moments of 8 bits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relay.optim import fused
from relay.optim.int8_state import GROUP
from tests.support.fused_states import ADAM, SGD, SHORT, equal, few, moments, new_state, normal, sizes

pytestmark = pytest.mark.skipif(not fused.available(), reason=f"not available: {fused.reason()}")


@few
@given(
    size=sizes,
    gradient_dtype=st.sampled_from(SHORT),
    weight_dtype=st.sampled_from(SHORT),
    shift=st.integers(0, 3),
)
def test_low_precision_in_and_out_is_the_casts_and_nothing_else(size, gradient_dtype, weight_dtype, shift):
    gradient = normal(size, 1, spread=3).to(gradient_dtype)
    weight = torch.zeros(size + shift, dtype=weight_dtype)[shift:]  # not always on a cache line
    narrow = [normal(size, 2, spread=6), torch.zeros(size), torch.zeros(size)]
    wide = [tensor.clone() for tensor in narrow]
    fused.update(fused.ADAMW, narrow[0], gradient, moments(*narrow[1:]), weight, ADAM, step=1)
    fused.update(fused.ADAMW, wide[0], gradient.float(), moments(*wide[1:]), None, ADAM, step=1)
    assert equal(narrow, wide)
    assert torch.equal(weight, wide[0].to(weight_dtype))


@pytest.mark.parametrize("dtype", SHORT)
def test_weights_that_are_not_ordinary_numbers_are_rounded_as_torch_rounds(dtype):
    special = [
        0.0,
        -0.0,
        math.inf,
        -math.inf,
        1e-40,
        -1e-42,
        65504.0,
        65519.9,
        65520.0,
        3.4e38,
        1e-7,
        5.9e-8,
        2e-8,
    ]
    master = torch.tensor(special * 40)
    weight = torch.empty(master.numel(), dtype=dtype)
    fused.update(fused.SGD, master, torch.zeros_like(master), {}, weight, SGD | {"lr": 0.0}, step=1)
    expected = torch.tensor(special * 40).to(dtype)
    assert torch.equal(weight.view(torch.int16), expected.view(torch.int16))
    master[5] = math.nan
    fused.update(fused.SGD, master, torch.zeros_like(master), {}, weight, SGD | {"lr": 0.0}, step=1)
    assert weight[5].isnan()


def test_random_rounding_to_bfloat16_keeps_the_mean_and_follows_seed_and_step():
    size = 200_000
    value_between = torch.full((size,), 1.0 + 2.0**-7 * 0.3)
    rounded = {}
    for seed, step in [(1, 1), (1, 2), (2, 1), (1, 1)]:
        state = torch.zeros(size, dtype=torch.bfloat16)
        # A buffer of zeros takes the gradient as it is, in the first step and in later ones.
        states, group = {"momentum_buffer": state}, SGD | {"momentum": 0.9}
        fused.update(fused.SGD, torch.zeros(size), value_between, states, None, group, step=step, seed=seed)
        assert set(state.float().tolist()) == {1.0, 1.0 + 2.0**-7}
        share = (state > 1).float().mean().item()
        assert abs(share - 0.3) < 5 * math.sqrt(0.3 * 0.7 / size)
        if (seed, step) in rounded:
            assert torch.equal(rounded[seed, step], state)
        rounded[seed, step] = state
    shares = [(rounded[1, 1] != rounded[other]).float().mean().item() for other in [(1, 2), (2, 1)]]
    assert all(abs(share - 2 * 0.3 * 0.7) < 0.01 for share in shares)


@few
@given(size=sizes, seed=st.integers(0, 2**32), spread=st.sampled_from([0.0, 2.0]))
def test_an_eight_bit_moment_is_within_one_code_of_its_value(size, seed, spread):
    gradient = normal(size, 3, spread)
    first, second = new_state("int8", size, signed=True), new_state("int8", size, signed=False)
    exact = [torch.zeros(size), torch.zeros(size)]
    fused.update(fused.ADAM, torch.zeros(size), gradient, moments(first, second), None, ADAM, step=1, seed=seed)
    fused.update(fused.ADAM, torch.zeros(size), gradient, moments(*exact), None, ADAM, step=1)
    for state, true in zip((first, second), exact, strict=True):
        scales = state.scales.repeat_interleave(GROUP)[:size]
        least = scales * 2.0 ** (-17 if state.signed else -31)
        assert ((state.to_float() - true).abs() <= true.abs() / 8 + least).all()
    assert (second.to_float() > 0).all()


def test_an_eight_bit_moment_that_stands_still_keeps_its_values():
    size = 3000
    master = torch.zeros(size)
    first, second = new_state("int8", size, signed=True), new_state("int8", size, signed=False)
    fused.update(fused.ADAM, master, normal(size, 1, spread=3), moments(first, second), None, ADAM, step=1)
    before = first.to_float()
    group = SGD | {"lr": 0.0, "momentum": 1.0, "dampening": 1.0}
    fused.update(fused.SGD, master, torch.ones(size), {"momentum_buffer": first}, None, group, step=2, seed=3)
    assert torch.equal(first.to_float(), before)
    for state in (first, second):
        copy = new_state("int8", size, signed=state.signed)
        copy.assign(state.to_float())
        assert torch.equal(copy.to_float(), state.to_float())


def test_assigning_rounds_to_the_nearest_code():
    for signed in (True, False):
        values = normal(5000, 4, spread=1)
        values = values if signed else values.square()
        state = new_state("int8", 5000, signed=signed)
        state.assign(values)
        scales = state.scales.repeat_interleave(GROUP)[:5000]
        assert ((state.to_float() - values).abs() <= values.abs() / 16 + scales * 2.0 ** (-18 if signed else -31)).all()


def test_an_eight_bit_second_moment_follows_changes_smaller_than_its_steps():
    size = 4096
    state, first = new_state("int8", size, signed=False), torch.zeros(size)
    expected = 0.0
    for step in range(1, 1501):
        gradient = torch.full((size,), 1.0 if step <= 500 else 0.1)
        gradient[::GROUP] = 3.0  # keeps the scale where it is
        fused.update(fused.ADAM, torch.zeros(size), gradient, moments(first, state), None, ADAM, step=step, seed=1)
        expected = 0.999 * expected + 0.001 * gradient[1].item() ** 2
    rest = torch.arange(size) % GROUP != 0
    assert state.to_float()[rest].mean().item() == pytest.approx(expected, rel=0.03)


def test_a_zero_moment_stays_zero_and_a_broken_one_shows():
    first, second = new_state("int8", 600, signed=True), new_state("int8", 600, signed=False)
    gradient = torch.zeros(600)
    gradient[300] = math.nan
    fused.update(fused.ADAM, torch.zeros(600), gradient, moments(first, second), None, ADAM, step=1)
    for state in (first, second):
        assert (state.to_float()[:256] == 0).all()
        assert state.to_float()[300].isnan()
