"""Accounts of memory count every byte and refuse what passes the capacity."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import HalError, OutOfMemory
from hal.memory import MemoryAccount

charges = st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=40)


@given(capacity=st.none() | st.integers(1, 100), steps=charges)
def test_an_account_agrees_with_a_plain_list_of_what_is_held(
    capacity: int | None, steps: list[tuple[bool, int]]
) -> None:
    account = MemoryAccount("a device", capacity)
    sizes: list[int] = []
    peak = 0
    for take, size in steps:
        if not take and sizes:
            account.release(sizes.pop(size % len(sizes)))
        elif capacity is not None and sum(sizes) + size > capacity:
            with pytest.raises(OutOfMemory):
                account.charge(size, "x")
        else:
            account.charge(size, "x")
            sizes.append(size)
        peak = max(peak, sum(sizes))
        use = account.use()
        assert (use.in_use, use.peak, use.capacity) == (sum(sizes), peak, capacity)


def test_a_refusal_says_what_did_not_fit_where_and_by_how_much() -> None:
    account = MemoryAccount("device 'x'", 1_000_000)
    account.charge(700_000, "weights")
    with pytest.raises(OutOfMemory) as caught:
        account.charge(300_001, "gradients of slot 1")
    refusal = caught.value
    assert isinstance(refusal, HalError)
    assert (refusal.requested, refusal.in_use, refusal.capacity) == (300_001, 700_000, 1_000_000)
    for part in ("gradients of slot 1", "device 'x'", "300,001", "700,000", "1,000,000", "(1 bytes too many)"):
        assert part in str(refusal)


def test_advice_ends_the_message() -> None:
    assert str(OutOfMemory("a", 2, 1, 2, "Use fewer slots.")).endswith("too many). Use fewer slots.")
    assert str(OutOfMemory("a", 2, 1, 2)).endswith("too many).")


def test_nothing_is_counted_by_a_refusal() -> None:
    account = MemoryAccount("a device", 10)
    account.charge(4, "a")
    before = account.use()
    with pytest.raises(OutOfMemory):
        account.charge(7, "b")
    assert account.use() == before
    account.charge(6, "the rest still fits, to the last byte")


def test_less_than_nothing_cannot_be_charged() -> None:
    account = MemoryAccount("a device", None)
    with pytest.raises(ValueError, match="-1 bytes"):
        account.charge(-1, "a buffer")
    assert account.use().in_use == 0


def test_a_new_peak_starts_from_what_is_in_use() -> None:
    account = MemoryAccount("a device", None)
    account.charge(100, "a")
    account.release(60)
    assert account.use().peak == 100
    account.reset_peak()
    assert account.use().peak == 40
    account.charge(10, "b")
    assert account.use().peak == 50


def test_threads_that_charge_at_once_never_pass_the_capacity() -> None:
    account = MemoryAccount("a device", 100)
    together = threading.Barrier(4)
    taken: list[int] = []

    def take() -> None:
        together.wait()
        for _ in range(50):
            try:
                account.charge(3, "a")
            except OutOfMemory:
                return
            taken.append(3)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(taken) == account.use().in_use == account.use().peak == 99
