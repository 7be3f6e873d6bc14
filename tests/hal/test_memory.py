"""Sizes as people write them, and accounts that count every byte and refuse what passes the capacity."""

from __future__ import annotations

import threading
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import HalError, OutOfMemory
from hal.memory import MemoryAccount, format_size, parse_size

SI = {"": 1, "B": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
BINARY = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
UNITS = {**SI, **BINARY}


@pytest.mark.parametrize("unit", UNITS)
@given(number=st.integers(1, 10**6), after=st.sampled_from(["", " ", "  "]))
def test_a_size_is_its_number_times_its_unit(unit: str, number: int, after: str) -> None:
    assert parse_size(f"{number}{after}{unit}") == number * UNITS[unit]


def test_mb_are_millions_and_mib_are_powers_of_two() -> None:
    assert parse_size("256MB") == 256_000_000
    assert parse_size("256MiB") == 268_435_456


@given(whole=st.integers(0, 10**5), thousandths=st.integers(1, 999), unit=st.sampled_from(sorted(UNITS)))
def test_a_decimal_fraction_loses_no_byte(whole: int, thousandths: int, unit: str) -> None:
    text = f"{whole}.{thousandths:03}"
    expected = int(Fraction(text) * UNITS[unit])
    if expected == 0:
        with pytest.raises(ValueError, match="not a size above zero"):
            parse_size(text + unit)
    else:
        assert parse_size(text + unit) == expected


@given(size=st.integers(1, 2**70))
def test_plain_numbers_are_bytes_however_large(size: int) -> None:
    assert parse_size(size) == size
    assert parse_size(str(size)) == size


@given(number=st.integers(1, 999), unit=st.sampled_from(sorted(UNITS)), data=st.data())
def test_the_case_of_a_unit_does_not_matter(number: int, unit: str, data: st.DataObject) -> None:
    spelled = "".join(data.draw(st.sampled_from([letter.lower(), letter.upper()])) for letter in unit)
    assert parse_size(f"{number}{spelled}") == parse_size(f"{number}{unit}")


@pytest.mark.parametrize(
    "text",
    ["", " ", "MB", "much", "-1MB", "1,000", "1e6", "5 M B", "5XB", "1.MB", ".5MB", "0x10", "nan", "inf", None, True],
)
def test_what_is_not_a_size_is_refused_by_name(text: object) -> None:
    with pytest.raises(ValueError, match="is not a size") as refusal:
        parse_size(text)  # type: ignore[arg-type]
    assert repr(text) in str(refusal.value)


@pytest.mark.parametrize("text", [0, -1, "0", "0MB", "0.0GiB", "0.4B"])
def test_a_size_must_be_above_zero(text: str | int) -> None:
    with pytest.raises(ValueError, match="above zero"):
        parse_size(text)


@given(number=st.integers(1, 999), unit=st.sampled_from([unit for unit in SI if unit]))
def test_a_formatted_size_reads_back_as_itself(number: int, unit: str) -> None:
    assert parse_size(format_size(number * SI[unit])) == number * SI[unit]


def test_sizes_are_shown_in_decimal_units() -> None:
    assert [format_size(size) for size in (0, 999, 1_530_000, 16_000_000_000, 5e15)] == [
        "0 B",
        "999 B",
        "1.53 MB",
        "16.00 GB",
        "5000.00 TB",
    ]


charges = st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=40)


@given(capacity=st.none() | st.integers(1, 100), steps=charges)
def test_an_account_agrees_with_a_plain_list_of_what_is_held(
    capacity: int | None, steps: list[tuple[bool, int]]
) -> None:
    account = MemoryAccount("a device", capacity)
    held: list[int] = []
    peak = 0
    for take, size in steps:
        if not take and held:
            account.release(held.pop(size % len(held)))
        elif capacity is not None and sum(held) + size > capacity:
            with pytest.raises(OutOfMemory):
                account.charge(size, "x")
        else:
            account.charge(size, "x")
            held.append(size)
        peak = max(peak, sum(held))
        use = account.use()
        assert (use.in_use, use.peak, use.capacity) == (sum(held), peak, capacity)


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
