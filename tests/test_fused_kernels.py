"""Checks `relay.eps.fused`: torch's bits in float32, independent float64 arithmetic elsewhere, small states, threads.

What it is not: a test of speed (`benchmarks/eps.py`), or of who calls these functions and when.
"""

from __future__ import annotations

import math
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.eps import fused
from relay.eps.small_states import GROUP, Int8State, group_count, state_bytes
from relay.eps.threads import work_through

ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
SHORT = [torch.bfloat16, torch.float16]
MANY = 5 * fused.SMALLEST_SHARE + 1234  # enough for five threads, and ragged

pytestmark = pytest.mark.skipif(not fused.available(), reason=f"not available: {fused.reason()}")
as_torch_does = pytest.mark.skipif(
    fused.available() and not fused.matches_torch(),
    reason="torch was compiled with other arithmetic for this processor; its own kernels are used in float32",
)
few = settings(max_examples=25, deadline=None)
sizes = st.one_of(st.integers(1, 70), st.integers(1, 9000))
betas = st.sampled_from([0.0, 0.3, 0.5, 0.500001, 0.9, 0.999])
decays = st.sampled_from([0.0, 0.1])


def normal(size: int, seed: int = 0, spread: float = 0.0) -> torch.Tensor:
    """Normal numbers; with `spread`, over so many decades either way."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator)
    return (
        values * 10 ** torch.empty(size).uniform_(-spread, spread, generator=generator) if spread else values
    )


@contextmanager
def one_torch_thread():
    """For torch's kernels on small tensors, which share even these among threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def new_state(kind: str, size: int, *, signed: bool) -> fused.State:
    if kind == "int8":
        return Int8State.zeros(size, signed=signed)
    return torch.zeros(size, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[kind])


def stored(state: fused.State) -> list[torch.Tensor]:
    return [state.codes, state.scales] if isinstance(state, Int8State) else [state]


def value(state: fused.State) -> torch.Tensor:
    return state.to_float() if isinstance(state, Int8State) else state.float()


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


@as_torch_does
@one_torch_thread()
@few
@given(
    size=sizes,
    decoupled=st.booleans(),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
    beta1=betas,
    beta2=betas,
    decay=decays,
    eps=st.sampled_from([1e-8, 1e-3]),
    lr=st.sampled_from([1e-3, 0.3]),
)
def test_adam_and_adamw_in_float32_are_torch_to_the_bit(
    size, decoupled, amsgrad, maximize, beta1, beta2, decay, eps, lr
):
    options = {
        "lr": lr,
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "weight_decay": decay,
        "maximize": maximize,
    }
    mine = [normal(size, 1), *(torch.zeros(size) for _ in range(3))]
    theirs = [tensor.clone() for tensor in mine]
    count = torch.zeros(())
    ours = fused.adamw if decoupled else fused.adam
    reference = torch._fused_adamw_ if decoupled else torch._fused_adam_
    for step in range(1, 51):
        gradient = normal(size, step + 1, spread=3)
        count += 1
        largest = mine[3] if amsgrad else None
        ours(mine[0], gradient, mine[1], mine[2], max_exp_avg_sq=largest, step=step, **options)
        lists = [[theirs[0]], [gradient], [theirs[1]], [theirs[2]], [theirs[3]] if amsgrad else [], [count]]
        reference(*lists, amsgrad=amsgrad, **options)
    assert equal(mine, theirs)


@as_torch_does
@one_torch_thread()
@few
@given(
    size=sizes,
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    dampening=st.sampled_from([0.0, 0.3]),
    nesterov=st.booleans(),
    maximize=st.booleans(),
    decay=decays,
)
def test_sgd_in_float32_is_torch_to_the_bit(size, momentum, dampening, nesterov, maximize, decay):
    nesterov = nesterov and momentum > 0
    options = {
        "lr": 0.01,
        "momentum": momentum,
        "dampening": 0.0 if nesterov else dampening,
        "nesterov": nesterov,
        "maximize": maximize,
        "weight_decay": decay,
    }
    mine = [normal(size, 1), torch.zeros(size)]
    theirs = [tensor.clone() for tensor in mine]
    for step in range(1, 51):
        gradient = normal(size, step + 1, spread=3)
        buffers = [theirs[1]] if momentum else []
        fused.sgd(mine[0], gradient, mine[1] if momentum else None, first_step=step == 1, **options)
        torch._fused_sgd_([theirs[0]], [gradient], buffers, is_first_step=step == 1, **options)
    assert equal(mine, theirs)


@as_torch_does
@pytest.mark.parametrize("size", [8 * 2**15, MANY + 5])
def test_a_tensor_shared_by_threads_is_still_torch_to_the_bit(size):
    mine = [normal(size, 1), torch.zeros(size), torch.zeros(size)]
    theirs = [tensor.clone() for tensor in mine]
    for step in (1, 2, 3):
        gradient = normal(size, step)
        fused.adamw(mine[0], gradient, mine[1], mine[2], step=step, threads=4, **ADAM)
        lists = [[theirs[0]], [gradient], [theirs[1]], [theirs[2]], [], [torch.tensor(float(step))]]
        torch._fused_adamw_(*lists, amsgrad=False, maximize=False, **ADAM)
    assert equal(mine, theirs)


def lion_reference(parameter, gradient, average, lr, beta1, beta2, decay):
    direction = np.sign(beta1 * average + (1 - beta1) * gradient)
    return parameter - lr * (direction + decay * parameter), beta2 * average + (1 - beta2) * gradient


def lamb_reference(parameter, gradient, first, second, step, lr, beta1, beta2, eps, weight_decay):
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient**2
    direction = (
        first / (1 - beta1**step) / (np.sqrt(second / (1 - beta2**step)) + eps) + weight_decay * parameter
    )
    norms = np.linalg.norm(parameter), np.linalg.norm(direction)
    ratio = norms[0] / norms[1] if min(norms) > 0 else 1.0
    return parameter - lr * ratio * direction, first, second, ratio


@few
@given(
    size=sizes,
    beta1=betas,
    beta2=betas,
    decay=decays,
    gradient_dtype=st.sampled_from([torch.float32, *SHORT]),
)
def test_lion_agrees_with_float64(size, beta1, beta2, decay, gradient_dtype):
    master, average = normal(size, 1), torch.zeros(size)
    parameter, mean = master.double().numpy(), np.zeros(size)
    decided = np.ones(size, bool)  # elsewhere the sign of a direction hangs on the last bit of float32
    for step in range(1, 11):
        gradient = normal(size, step + 1).to(gradient_dtype)
        fused.lion(
            master, gradient, average, lr=0.01, beta1=beta1, beta2=beta2, weight_decay=decay, factor=0.5
        )
        halved = 0.5 * gradient.double().numpy()
        terms = beta1 * mean, (1 - beta1) * halved
        decided &= abs(terms[0] + terms[1]) >= 1e-5 * (abs(terms[0]) + abs(terms[1]))
        parameter, mean = lion_reference(parameter, halved, mean, 0.01, beta1, beta2, decay)
    np.testing.assert_allclose(average.numpy(), mean, rtol=1e-5, atol=1e-6)
    assert decided.mean() > 0.99 or size < 100
    np.testing.assert_allclose(master.numpy()[decided], parameter[decided], rtol=1e-5, atol=1e-6)


def test_lion_stands_still_where_there_is_no_direction():
    master = normal(100)
    before = master.clone()
    fused.lion(master, torch.zeros(100), torch.zeros(100), lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0)
    assert torch.equal(master, before)


@few
@given(
    size=sizes,
    beta1=betas,
    beta2=betas,
    decay=decays,
    gradient_dtype=st.sampled_from([torch.float32, *SHORT]),
)
def test_lamb_agrees_with_float64(size, beta1, beta2, decay, gradient_dtype):
    options = {"lr": 0.01, "beta1": beta1, "beta2": beta2, "eps": 1e-6, "weight_decay": decay}
    master, first, second = normal(size, 1), torch.zeros(size), torch.zeros(size)
    state = [tensor.double().numpy() for tensor in (master, first, second)]
    weight = torch.empty(size, dtype=torch.bfloat16)
    for step in range(1, 11):
        gradient = normal(size, step + 1).to(gradient_dtype)
        ratio = fused.lamb(master, gradient, first, second, weight, step=step, **options)
        *state, expected = lamb_reference(state[0], gradient.double().numpy(), *state[1:], step, **options)
        assert ratio == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(master.numpy(), state[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(weight, master.bfloat16())


def test_lamb_does_not_scale_the_step_of_a_zero_tensor():
    master = torch.zeros(64)
    ratio = fused.lamb(master, torch.ones(64), torch.zeros(64), torch.zeros(64), step=1, **ADAM)
    assert ratio == 1.0
    torch.testing.assert_close(master, torch.full((64,), -0.01))


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
    fused.adamw(narrow[0], gradient, narrow[1], narrow[2], weight, step=1, **ADAM)
    fused.adamw(wide[0], gradient.float(), wide[1], wide[2], step=1, **ADAM)
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
    fused.sgd(master, torch.zeros_like(master), None, weight, lr=0.0)
    expected = torch.tensor(special * 40).to(dtype)
    assert torch.equal(weight.view(torch.int16), expected.view(torch.int16))
    master[5] = math.nan
    fused.sgd(master, torch.zeros_like(master), None, weight, lr=0.0)
    assert weight[5].isnan()


def test_the_factor_multiplies_the_gradient_first():
    scaled = [normal(1000, 1), torch.zeros(1000), torch.zeros(1000)]
    plain = [tensor.clone() for tensor in scaled]
    gradient = normal(1000, 2)
    fused.adam(scaled[0], gradient, scaled[1], scaled[2], step=1, factor=0.3, **ADAM)
    fused.adam(plain[0], gradient * torch.tensor(0.3), plain[1], plain[2], step=1, **ADAM)
    assert equal(scaled, plain)


def run_all(kind: str, threads: int | None) -> list[torch.Tensor]:
    """Everything that three steps of every optimizer leave behind."""
    results: list[torch.Tensor] = []
    gradients = [normal(MANY, step, spread=2).bfloat16() for step in range(3)]
    for name in ("adamw", "sgd", "lion", "lamb"):
        master, weight = normal(MANY, 9), torch.empty(MANY, dtype=torch.bfloat16)
        first, second = new_state(kind, MANY, signed=True), new_state(kind, MANY, signed=False)
        for step, gradient in enumerate(gradients, 1):
            options = {"step": step, "seed": 5, "threads": threads, "weight_decay": 0.1, "lr": 0.01}
            if name == "sgd":
                fused.sgd(master, gradient, first, weight, momentum=0.9, first_step=step == 1, **options)
            elif name == "lion":
                fused.lion(master, gradient, first, weight, beta1=0.9, beta2=0.99, **options)
            else:
                options |= {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
                getattr(fused, name)(master, gradient, first, second, weight, **options)
        results += [master, weight, *stored(first), *stored(second)]
    results.append(torch.tensor(fused.sum_of_squares(gradients[0], threads=threads)))
    return results


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_the_number_of_threads_changes_nothing(kind):
    alone = run_all(kind, 1)
    assert equal(alone, run_all(kind, 3))
    assert equal(alone, run_all(kind, None))
    assert all(tensor.isfinite().all() for tensor in alone)


def test_calls_from_several_threads_do_not_meet():
    alone = run_all("int8", 2)
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(run_all, ["int8"] * 3, [2] * 3))
    assert all(equal(alone, results) for results in together)


def test_random_rounding_to_bfloat16_keeps_the_mean_and_follows_seed_and_step():
    size = 200_000
    value_between = torch.full((size,), 1.0 + 2.0**-7 * 0.3)
    rounded = {}
    for seed, step in [(1, 1), (1, 2), (2, 1), (1, 1)]:
        state = torch.zeros(size, dtype=torch.bfloat16)
        fused.sgd(
            torch.zeros(size),
            value_between,
            state,
            lr=0.0,
            momentum=0.9,
            first_step=True,
            seed=seed,
            step=step,
        )
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
    first, second = Int8State.zeros(size, signed=True), Int8State.zeros(size, signed=False)
    exact = [torch.zeros(size), torch.zeros(size)]
    fused.adam(torch.zeros(size), gradient, first, second, step=1, seed=seed, **ADAM)
    fused.adam(torch.zeros(size), gradient, exact[0], exact[1], step=1, **ADAM)
    for state, true in zip((first, second), exact, strict=True):
        scales = state.scales.repeat_interleave(GROUP)[:size]
        least = scales * 2.0 ** (-17 if state.signed else -31)
        assert ((state.to_float() - true).abs() <= true.abs() / 8 + least).all()
    assert (second.to_float() > 0).all()


def test_an_eight_bit_moment_that_stands_still_keeps_its_values():
    size = 3000
    master = torch.zeros(size)
    first, second = Int8State.zeros(size, signed=True), Int8State.zeros(size, signed=False)
    fused.adam(master, normal(size, 1, spread=3), first, second, step=1, **ADAM)
    before = first.to_float()
    fused.sgd(master, torch.ones(size), first, lr=0.0, momentum=1.0, dampening=1.0, seed=3)
    assert torch.equal(first.to_float(), before)
    for state in (first, second):
        copy = Int8State.zeros(size, signed=state.signed)
        copy.assign(state.to_float())
        assert torch.equal(copy.to_float(), state.to_float())


def test_assigning_rounds_to_the_nearest_code():
    for signed in (True, False):
        values = normal(5000, 4, spread=1)
        values = values if signed else values.square()
        state = Int8State.zeros(5000, signed=signed)
        state.assign(values)
        scales = state.scales.repeat_interleave(GROUP)[:5000]
        assert (
            (state.to_float() - values).abs() <= values.abs() / 16 + scales * 2.0 ** (-18 if signed else -31)
        ).all()


def test_an_eight_bit_second_moment_follows_changes_smaller_than_its_steps():
    size = 4096
    state, first = Int8State.zeros(size, signed=False), torch.zeros(size)
    expected = 0.0
    for step in range(1, 1501):
        gradient = torch.full((size,), 1.0 if step <= 500 else 0.1)
        gradient[::GROUP] = 3.0  # keeps the scale where it is
        fused.adam(torch.zeros(size), gradient, first, state, step=step, seed=1, **ADAM)
        expected = 0.999 * expected + 0.001 * gradient[1].item() ** 2
    rest = torch.arange(size) % GROUP != 0
    assert state.to_float()[rest].mean().item() == pytest.approx(expected, rel=0.03)


def test_a_zero_moment_stays_zero_and_a_broken_one_shows():
    first, second = Int8State.zeros(600, signed=True), Int8State.zeros(600, signed=False)
    gradient = torch.zeros(600)
    gradient[300] = math.nan
    fused.adam(torch.zeros(600), gradient, first, second, step=1, **ADAM)
    for state in (first, second):
        assert (state.to_float()[:256] == 0).all()
        assert state.to_float()[300].isnan()


def test_bytes_of_a_state_are_what_it_holds():
    for size in (1, 256, 257, 1000):
        state = Int8State.zeros(size, signed=True)
        assert state_bytes(size, "int8") == state.codes.nbytes + state.scales.nbytes
        assert state_bytes(size, "bf16") == 2 * size
        assert state_bytes(size, "fp32") == 4 * size
    with pytest.raises(ValueError, match=r"state_dtype .*expected.*received 'int4'"):
        state_bytes(1, "int4")


@pytest.mark.parametrize("dtype", [torch.float32, *SHORT])
@pytest.mark.parametrize("size", [1, 15, 16, 4097, 100_003])
def test_sum_of_squares_agrees_with_float64(dtype, size):
    gradient = normal(size, 1, spread=2).to(dtype)
    assert fused.sum_of_squares(gradient) == pytest.approx(gradient.double().square().sum().item(), rel=1e-12)


def test_operands_that_do_not_fit_are_named():
    good = [torch.zeros(8) for _ in range(4)]
    with pytest.raises(ValueError, match=r"^gradient cannot.*of 8 elements.*received.*of 7.*Convert"):
        fused.adamw(good[0], torch.zeros(7), good[1], good[2], step=1, **ADAM)
    with pytest.raises(
        ValueError, match=r"^weight_out cannot.*expected.*bfloat16 or float16.*received.*float32"
    ):
        fused.adamw(*good, torch.zeros(8), step=1, **ADAM)
    with pytest.raises(ValueError, match=r"^master cannot.*expected.*received a strided"):
        fused.adamw(torch.zeros(16)[::2], *good[1:], step=1, **ADAM)
    with pytest.raises(ValueError, match=r"^the second state has the wrong 8-bit format.*expected.*received"):
        fused.adamw(*good[:3], Int8State.zeros(8, signed=True), step=1, **ADAM)
    with pytest.raises(ValueError, match=r"^step is out of range.*received 0"):
        fused.adamw(*good, step=0, **ADAM)
    with pytest.raises(ValueError, match=r"^momentum_buffer does not go with momentum=0.9.*received none"):
        fused.sgd(good[0], good[1], None, lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"^The parts of an 8-bit state do not fit.*2 float32 scales"):
        Int8State(torch.zeros(257, dtype=torch.uint8), torch.zeros(1), True)
    assert group_count(257) == 2


def test_without_a_compiler_it_says_so_once(monkeypatch):
    fused._compile.cache_clear()
    monkeypatch.setitem(sys.modules, "relay.eps.fused_kernels", None)
    monkeypatch.delattr("relay.eps.fused_kernels", raising=False)
    try:
        with pytest.warns(RuntimeWarning, match="cannot be compiled here, so torch's own"):
            assert not fused.available()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not fused.available()
            assert "fused_kernels" in fused.reason()
            with pytest.raises(RuntimeError, match=r"not available here.*Expected.*Ask available"):
                fused.sum_of_squares(torch.ones(3))
    finally:
        monkeypatch.undo()
        fused._compile.cache_clear()


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_a_range_is_worked_through_once_and_errors_come_back(threads):
    seen = np.zeros(10_001, np.int64)
    lock = threading.Lock()

    def work(begin: int, end: int) -> None:
        assert begin % 64 == 0
        with lock:
            seen[begin:end] += 1

    work_through(work, 10_001, alignment=64, threads=threads, smallest=100)
    assert (seen == 1).all()

    def fail(begin: int, end: int) -> None:
        raise ArithmeticError(f"{begin}")

    with pytest.raises(ArithmeticError):
        work_through(fail, 10_001, alignment=64, threads=threads, smallest=100)
