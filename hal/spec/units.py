"""Quantities with units as people and data sheets write them, such as `900GB/s`, `125TFLOPS`, `4us` or `300W`.

Every quantity has a dimension, and one of another dimension is an error: mixing gigabytes with gigabytes a second is
the commonest fault in a table of hardware. Decimal and binary prefixes mean what they say. Values are SI floats.
"""

from __future__ import annotations

import re
from fractions import Fraction

BYTES, BYTE_RATE, FLOPS, FLOP_COUNT, SECONDS, WATTS, RATIO = (
    "bytes",
    "bytes a second",
    "floating-point operations a second",
    "floating-point operations",
    "seconds",
    "watts",
    "a plain number",
)

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SMALL = {"": Fraction(1), "m": Fraction(1, 10**3), "u": Fraction(1, 10**6), "µ": Fraction(1, 10**6)}
_SMALL["n"] = Fraction(1, 10**9)

_UNITS: dict[str, tuple[str, Fraction]] = {}
for _prefix, _factor in [*_DECIMAL.items(), *_BINARY.items()]:
    _UNITS[f"{_prefix}B"] = (BYTES, Fraction(_factor))
    _UNITS[f"{_prefix}B/s"] = (BYTE_RATE, Fraction(_factor))
for _prefix, _factor in _DECIMAL.items():
    _UNITS[f"{_prefix}FLOPS"] = (FLOPS, Fraction(_factor))
    _UNITS[f"{_prefix}FLOP"] = (FLOP_COUNT, Fraction(_factor))
    _UNITS[f"{_prefix}W"] = (WATTS, Fraction(_factor))
for _prefix, _share in _SMALL.items():
    _UNITS[f"{_prefix}s"] = (SECONDS, _share)

_EXAMPLES = {
    BYTES: "16GB or 80GiB",
    BYTE_RATE: "900GB/s",
    FLOPS: "125TFLOPS",
    FLOP_COUNT: "0.5GFLOP",
    SECONDS: "4us",
    WATTS: "300W",
    RATIO: "0.6",
}


def parse_quantity(text: str | int | float, dimension: str) -> float:
    """The value of `text` in SI units. ValueError where it is no quantity of that dimension."""
    if dimension == RATIO:
        if isinstance(text, (int, float)) and not isinstance(text, bool):
            return float(text)
        raise ValueError(f"{text!r} should be {RATIO}, such as {_EXAMPLES[RATIO]}")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*([A-Za-zµ/]+)\s*", str(text))
    if match is None or match.group(2) not in _UNITS:
        raise ValueError(f"{text!r} is not a quantity. Expected {dimension}, such as {_EXAMPLES[dimension]}.")
    found, factor = _UNITS[match.group(2)]
    if found != dimension:
        raise ValueError(f"{text!r} is in {found}. Expected {dimension}, such as {_EXAMPLES[dimension]}.")
    return float(Fraction(match.group(1)) * factor)
