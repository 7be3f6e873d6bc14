"""Checks `relay.optim.fused`: torch's bits in float32, independent float64 arithmetic elsewhere, threads.

What it is not: a test of speed (`benchmarks/eps.py`), or of who calls these functions and when.
"""

from __future__ import annotations

import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relay.optim import fused
from relay.optim.int8_state import Int8State, group_count
from relay.optim.thread_pool import work_through
from tests.support.fused_states import (
    ADAM,
    SGD,
    SHORT,
    equal,
    few,
    for_torch,
    moments,
    new_state,
    normal,
    sizes,
    stored,
)

MANY = 5 * fused.SMALLEST_SHARE + 1234  # enough for five threads, and ragged

pytestmark = pytest.mark.skipif(not fused.available(), reason=f"not available: {fused.reason()}")
as_torch_does = pytest.mark.skipif(
    fused.available() and not fused.matches_torch(),
    reason="torch was compiled with other arithmetic for this processor; its own kernels are used in float32",
)
betas = st.sampled_from([0.0, 0.3, 0.5, 0.500001, 0.9, 0.999])
decays = st.sampled_from([0.0, 0.1])


@contextmanager
def one_torch_thread():
    """For torch's kernels on small tensors, which share even these among threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
    group = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay, "maximize": maximize}
    mine = [normal(size, 1), *(torch.zeros(size) for _ in range(3))]
    theirs = [tensor.clone() for tensor in mine]
    count = torch.zeros(())
    rule = fused.ADAMW if decoupled else fused.ADAM
    reference = torch._fused_adamw_ if decoupled else torch._fused_adam_
    for step in range(1, 51):
        gradient = normal(size, step + 1, spread=3)
        count += 1
        state = moments(mine[1], mine[2]) | ({"max_exp_avg_sq": mine[3]} if amsgrad else {})
        fused.update(rule, mine[0], gradient, state, None, group, step=step)
        lists = [[theirs[0]], [gradient], [theirs[1]], [theirs[2]], [theirs[3]] if amsgrad else [], [count]]
        reference(*lists, amsgrad=amsgrad, **for_torch(group))
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
        state = {"momentum_buffer": mine[1]} if momentum else {}
        fused.update(fused.SGD, mine[0], gradient, state, None, options, step=step)
        torch._fused_sgd_([theirs[0]], [gradient], buffers, is_first_step=step == 1, **options)
    assert equal(mine, theirs)


@as_torch_does
@pytest.mark.parametrize("size", [8 * 2**15, MANY + 5])
def test_a_tensor_shared_by_threads_is_still_torch_to_the_bit(size):
    mine = [normal(size, 1), torch.zeros(size), torch.zeros(size)]
    theirs = [tensor.clone() for tensor in mine]
    for step in (1, 2, 3):
        gradient = normal(size, step)
        fused.update(fused.ADAMW, mine[0], gradient, moments(*mine[1:]), None, ADAM, step=step, threads=4)
        lists = [[theirs[0]], [gradient], [theirs[1]], [theirs[2]], [], [torch.tensor(float(step))]]
        torch._fused_adamw_(*lists, amsgrad=False, maximize=False, **for_torch(ADAM))
    assert equal(mine, theirs)


def lion_reference(parameter, gradient, average, lr, beta1, beta2, decay):
    direction = np.sign(beta1 * average + (1 - beta1) * gradient)
    return parameter - lr * (direction + decay * parameter), beta2 * average + (1 - beta2) * gradient


def lamb_reference(parameter, gradient, first, second, step, lr, beta1, beta2, eps, weight_decay):
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient**2
    direction = first / (1 - beta1**step) / (np.sqrt(second / (1 - beta2**step)) + eps) + weight_decay * parameter
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
    group = {"lr": 0.01, "betas": (beta1, beta2), "weight_decay": decay}
    decided = np.ones(size, bool)  # elsewhere the sign of a direction hangs on the last bit of float32
    for step in range(1, 11):
        gradient = normal(size, step + 1).to(gradient_dtype)
        fused.update(fused.LION, master, gradient, {"exp_avg": average}, None, group, step=step, factor=0.5)
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
    group = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}
    fused.update(fused.LION, master, torch.zeros(100), {"exp_avg": torch.zeros(100)}, None, group, step=1)
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
    group = {"lr": 0.01, "betas": (beta1, beta2), "eps": 1e-6, "weight_decay": decay}
    master, first, second = normal(size, 1), torch.zeros(size), torch.zeros(size)
    state = [tensor.double().numpy() for tensor in (master, first, second)]
    weight = torch.empty(size, dtype=torch.bfloat16)
    for step in range(1, 11):
        gradient = normal(size, step + 1).to(gradient_dtype)
        ratio = fused.update(fused.LAMB, master, gradient, moments(first, second), weight, group, step=step)
        *state, expected = lamb_reference(state[0], gradient.double().numpy(), *state[1:], step, **for_torch(group))
        assert ratio == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(master.numpy(), state[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(weight, master.bfloat16())


def test_lamb_does_not_scale_the_step_of_a_zero_tensor():
    master = torch.zeros(64)
    states = moments(torch.zeros(64), torch.zeros(64))
    ratio = fused.update(fused.LAMB, master, torch.ones(64), states, None, ADAM, step=1)
    assert ratio == 1.0
    torch.testing.assert_close(master, torch.full((64,), -0.01))


def test_the_factor_multiplies_the_gradient_first():
    scaled = [normal(1000, 1), torch.zeros(1000), torch.zeros(1000)]
    plain = [tensor.clone() for tensor in scaled]
    gradient = normal(1000, 2)
    fused.update(fused.ADAM, scaled[0], gradient, moments(*scaled[1:]), None, ADAM, step=1, factor=0.3)
    fused.update(fused.ADAM, plain[0], gradient * torch.tensor(0.3), moments(*plain[1:]), None, ADAM, step=1)
    assert equal(scaled, plain)


def run_all(kind: str, threads: int | None) -> list[torch.Tensor]:
    """Everything that three steps of every optimizer leave behind."""
    results: list[torch.Tensor] = []
    gradients = [normal(MANY, step, spread=2).bfloat16() for step in range(3)]
    group = ADAM | {"betas": (0.9, 0.99), "momentum": 0.9, "dampening": 0.0}
    for rule in (fused.ADAMW, fused.SGD, fused.LION, fused.LAMB):
        master, weight = normal(MANY, 9), torch.empty(MANY, dtype=torch.bfloat16)
        state = {label: new_state(kind, MANY, signed=signed) for label, signed in rule.moments.items()}
        for step, gradient in enumerate(gradients, 1):
            fused.update(rule, master, gradient, state, weight, group, step=step, seed=5, threads=threads)
        results += [master, weight, *(part for moment in state.values() for part in stored(moment))]
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


def test_operands_that_do_not_fit_are_named():
    def adamw(
        master: torch.Tensor,
        gradient: torch.Tensor,
        second: fused.State,
        weight: torch.Tensor | None = None,
        step: int = 1,
    ) -> None:
        fused.update(fused.ADAMW, master, gradient, moments(torch.zeros(8), second), weight, ADAM, step=step)

    good = [torch.zeros(8) for _ in range(3)]
    with pytest.raises(ValueError, match=r"^gradient cannot.*of 8 elements.*received.*of 7.*Convert"):
        adamw(good[0], torch.zeros(7), good[2])
    with pytest.raises(ValueError, match=r"^weight_out cannot.*expected.*bfloat16 or float16.*received.*float32"):
        adamw(*good, torch.zeros(8))
    with pytest.raises(ValueError, match=r"^master cannot.*expected.*received a strided"):
        adamw(torch.zeros(16)[::2], *good[1:])
    with pytest.raises(ValueError, match=r"^the second state has the wrong 8-bit format.*expected.*received"):
        adamw(*good[:2], new_state("int8", 8, signed=True))
    with pytest.raises(ValueError, match=r"^step is out of range.*received 0"):
        adamw(*good, step=0)
    with pytest.raises(ValueError, match=r"^momentum_buffer does not go with momentum=0.9.*received none"):
        fused.update(fused.SGD, good[0], good[1], {}, None, SGD | {"momentum": 0.9}, step=1)
    with pytest.raises(ValueError, match=r"^The parts of an 8-bit state do not fit.*2 float32 scales"):
        Int8State(torch.zeros(257, dtype=torch.uint8), torch.zeros(1), True)
    assert group_count(257) == 2


def test_without_a_compiler_it_says_so_once(monkeypatch):
    fused._compile.cache_clear()
    monkeypatch.setitem(sys.modules, "relay.optim.fused_kernels", None)
    monkeypatch.delattr("relay.optim.fused_kernels", raising=False)
    try:
        with pytest.warns(RuntimeWarning, match="cannot be compiled here, so torch's own"):
            assert not fused.available()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not fused.available()
            assert "fused_kernels" in fused.reason()
            with pytest.raises(RuntimeError, match=r"not available here.*Expected.*Ask available"):
                fused.update(fused.SGD, torch.ones(3), torch.ones(3), {}, None, SGD, step=1)
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
