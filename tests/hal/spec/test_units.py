"""Sizes and counts as text: each unit is what its standard says, and no byte is lost."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.spec.units import (
    BYTE_RATE,
    BYTES,
    format_binary_size,
    format_count,
    format_seconds,
    format_size,
    parse_count,
    parse_quantity,
    parse_size,
)

SI = {"": 1, "B": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4, "PB": 1000**5}
BINARY = {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4, "PiB": 1024**5}
UNITS = {**SI, **BINARY}


@pytest.mark.parametrize("unit", UNITS)
@given(number=st.integers(1, 10**6), after=st.sampled_from(["", " ", "  "]))
def test_a_size_is_its_number_times_its_unit(unit: str, number: int, after: str) -> None:
    assert parse_size(f"{number}{after}{unit}") == number * UNITS[unit]


def test_mb_are_millions_and_mib_are_powers_of_two() -> None:
    assert parse_size("256MB") == 256_000_000
    assert parse_size("256MiB") == 268_435_456


@given(whole=st.integers(0, 10**5), thousandths=st.integers(1, 999), unit=st.sampled_from(sorted(filter(None, UNITS))))
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


@pytest.mark.parametrize("text", ["16Gb", "16gb", "16mb", "16Mb", "16GIB", "16gib", "16b", "16g", "16G"])
def test_a_unit_is_spelled_exactly_because_b_stands_for_bits(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "1.5",
        "MB",
        "much",
        "-1MB",
        "1,000",
        "1e6",
        "5 M B",
        "5XB",
        "1.MB",
        ".MB",
        "0x10",
        "nan",
        "inf",
        None,
        True,
    ],
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
    assert [format_size(size) for size in (0, 999, 1_530_000, 16_000_000_000, 5e15, 5e18)] == [
        "0 B",
        "999 B",
        "1.53 MB",
        "16.00 GB",
        "5.00 PB",
        "5000.00 PB",
    ]


def test_a_quantity_of_another_dimension_is_refused_with_both_dimensions() -> None:
    with pytest.raises(ValueError, match=r"is in bytes a second\. Expected bytes, such as 16GB"):
        parse_size("16GB/s")
    with pytest.raises(ValueError, match=r"is in bytes\. Expected bytes a second"):
        parse_quantity("900GB", BYTE_RATE)


@pytest.mark.parametrize("text", ["1e400GB", "9" * 400 + "GB"])
def test_a_quantity_beyond_floats_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text, BYTES)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1e9", 1e9), ("300M", 300e6), ("1.5T", 1.5e12), ("7B", 7e9), ("7G", 7e9), ("2k", 2e3), (12, 12.0), (2.5, 2.5)],
)
def test_a_count_is_its_number_times_its_power_of_a_thousand(text: str | float, number: float) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize("text", ["", "0", "-1", "1e400", "1e999", "many", "3m", "5K", "nan", "inf", True])
def test_what_is_not_a_count_above_zero_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is not a count above zero") as refusal:
        parse_count(text)
    assert repr(text) in str(refusal.value)


def test_numbers_are_shown_with_the_largest_unit_that_leaves_at_least_one() -> None:
    assert [format_count(number) for number in (7, 12_300, 124_440_000, 6_738_415_616, 1e12)] == [
        "7", "12.30 k", "124.44 M", "6.74 G", "1.00 T",
    ]  # fmt: skip
    assert [format_binary_size(size) for size in (512, 2**20, 3 * 2**29)] == ["0.5 KiB", "1.0 MiB", "1.5 GiB"]
    assert [format_seconds(seconds) for seconds in (0.01234, 1, 61.5)] == ["12.34 ms", "1.000 s", "61.500 s"]
