"""Quantities as text: `900GB/s`, `125TFLOPS`, `4us`, `300W`, `256MB`, `1.5T` read and written.

This is the only module that parses or formats such text. Every quantity has a dimension, and text of another dimension
is an error: mixing gigabytes with gigabytes a second is the commonest fault in a table of hardware. It keeps no
accounts of memory (`hal.memory`) and knows no hardware (`hal.spec`).

Invariant: units are spelled exactly. GB is 10**9 bytes and GiB is 2**30; `16Gb` and `16gb` are refused, because `b`
stands for bits.
"""

from __future__ import annotations

import re
from fractions import Fraction

BYTES, BYTE_RATE, FLOPS, FLOP_COUNT, SECONDS, WATTS, RATIO, COUNT = (
    "bytes",
    "bytes a second",
    "floating-point operations a second",
    "floating-point operations",
    "seconds",
    "watts",
    "a plain number",
    "a count",
)

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_SMALL = {"": Fraction(1), "m": Fraction(1, 10**3), "u": Fraction(1, 10**6), "µ": Fraction(1, 10**6)}
_SMALL["n"] = Fraction(1, 10**9)

_UNITS: dict[str, dict[str, Fraction]] = {
    BYTES: {f"{prefix}B": Fraction(factor) for prefix, factor in (_DECIMAL | _BINARY).items()},
    BYTE_RATE: {f"{prefix}B/s": Fraction(factor) for prefix, factor in (_DECIMAL | _BINARY).items()},
    FLOPS: {f"{prefix}FLOPS": Fraction(factor) for prefix, factor in _DECIMAL.items()},
    FLOP_COUNT: {f"{prefix}FLOP": Fraction(factor) for prefix, factor in _DECIMAL.items()},
    WATTS: {f"{prefix}W": Fraction(factor) for prefix, factor in _DECIMAL.items()},
    SECONDS: {f"{prefix}s": share for prefix, share in _SMALL.items()},
    COUNT: {prefix: Fraction(factor) for prefix, factor in (_DECIMAL | {"B": 10**9}).items() if prefix != "K"},
}
"""The factor of each unit by dimension. A count's B is a billion, as in "a model of 7B parameters"."""

_EXAMPLES = {
    BYTES: "16GB or 80GiB",
    BYTE_RATE: "900GB/s",
    FLOPS: "125TFLOPS",
    FLOP_COUNT: "0.5GFLOP",
    SECONDS: "4us",
    WATTS: "300W",
    RATIO: "0.6",
    COUNT: "1e9, 300M or 1.5T",
}
_QUANTITY = re.compile(r"\s*((?:\d+(?:\.\d+)?|\.\d+)(?:e[+-]?\d{1,3})?)\s*([A-Za-zµ/]*)\s*")


def parse_quantity(text: str | int | float, dimension: str) -> float:
    """The value of `text` in SI units. Raises ValueError where it is not a quantity of that dimension."""
    if dimension == RATIO:
        if isinstance(text, (int, float)) and not isinstance(text, bool):
            return float(text)
        raise ValueError(f"{text!r} should be {RATIO}, such as {_EXAMPLES[RATIO]}")
    value = _exact(text, dimension)
    if value is None or value >= 10**300:
        raise ValueError(f"{text!r} is not a quantity. Expected {dimension}, such as {_EXAMPLES[dimension]}.")
    return float(value)


def parse_size(text: str | int) -> int:
    """The bytes of a size such as `256MB` (256 * 10**6), `256MiB` (256 * 2**20), `1.5GB` or `4096`, exactly.

    Raises ValueError for anything else, and for sizes below one byte.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        digits = str(text).strip()
        value = Fraction(digits) if digits.isdecimal() else _exact(text, BYTES)
        if value is None:
            raise ValueError(
                f"{text!r} is not a size. Expected a number of bytes with kB, MB, GB, TB (powers of 1000) or KiB, MiB, "
                "GiB, TiB (powers of 1024), such as 256MB."
            )
        size = int(value)
    if size <= 0:
        raise ValueError(f"{text!r} is not a size above zero bytes.")
    return size


def parse_count(text: str | int | float) -> float:
    """A number above zero such as `1e9`, `300M` or `1.5T`; k, M, G or B, and T are powers of a thousand.

    Raises ValueError for anything else.
    """
    value = None if isinstance(text, bool) else _exact(text, COUNT)
    if value is None or not 0 < value < 10**300:
        raise ValueError(f"{text!r} is not a count above zero. Expected a number such as {_EXAMPLES[COUNT]}.")
    return float(value)


def parse_price(text: str, per: str = "") -> float:
    """The number before `per`: 0.30 of `0.30/kWh` where `per` is `/kWh`. k and M are powers of a thousand.

    Raises ValueError for anything else, and for what is not above zero.
    """
    whole = text.strip()
    number = whole.removesuffix(per)
    if per and number == whole:
        raise ValueError(f"{text!r} does not end in {per}.")
    return parse_count(number)


def format_size(size: float) -> str:
    """Bytes in decimal units: 1_530_000 -> `1.53 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} PB"


def format_binary_size(size: float) -> str:
    """Bytes in GiB, and in MiB or KiB where that would be less than one: 3 * 2**29 -> `1.5 GiB`."""
    unit, each = next((one for one in (("GiB", 2**30), ("MiB", 2**20)) if size >= one[1]), ("KiB", 2**10))
    return f"{size / each:.1f} {unit}"


def format_count(number: float) -> str:
    """A number with the largest prefix that leaves at least one: 6_738_000_000 -> `6.74 G`."""
    for prefix, factor in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= factor:
            return f"{number / factor:.2f} {prefix}"
    return f"{number:g}"


def format_seconds(seconds: float) -> str:
    """A time in seconds, or in milliseconds where it is below one second: 0.01234 -> `12.34 ms`."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _exact(text: str | int | float, dimension: str) -> Fraction | None:
    """The exact value in SI units; None where the text is not a number and a unit of any dimension.

    Raises ValueError for a unit of another dimension.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        return None
    number, unit = match.groups()
    factor = _UNITS[dimension].get(unit)
    if factor is None:
        other = next((name for name, units in _UNITS.items() if name != COUNT and unit in units), None)
        if other is not None:
            raise ValueError(f"{text!r} is in {other}. Expected {dimension}, such as {_EXAMPLES[dimension]}.")
        return None
    return Fraction(number) * factor
