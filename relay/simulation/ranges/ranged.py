"""A predicted figure with the range in which the true one is expected.

It holds three numbers and their arithmetic. Where the range comes from is in `software_factors` and `step_range`.

Invariant: low <= middle <= high.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranged:
    """A figure: its best estimate and the ends of its range."""

    low: float
    middle: float
    high: float

    def __post_init__(self) -> None:
        """Raise ValueError for ends in the wrong order."""
        if not self.low <= self.middle <= self.high:
            raise ValueError(
                f"A range needs low <= middle <= high; received {self.low!r}, {self.middle!r}, {self.high!r}."
            )

    @property
    def width(self) -> float:
        """The high end as a multiple of the low end."""
        return self.high / self.low

    def scaled(self, factor: float) -> Ranged:
        """Each number times a factor that is not negative."""
        return Ranged(self.low * factor, self.middle * factor, self.high * factor)

    def inverse(self, numerator: float = 1.0) -> Ranged:
        """`numerator` divided by each number: the range of days from that of speed, for instance."""
        return Ranged(numerator / self.high, numerator / self.middle, numerator / self.low)

    def times(self, other: Ranged) -> Ranged:
        """The product with another positive range, low ends with low ends."""
        return Ranged(self.low * other.low, self.middle * other.middle, self.high * other.high)

    def contains(self, value: float) -> bool:
        """Whether a value lies in the range, ends included."""
        return self.low <= value <= self.high

    def as_json(self) -> dict[str, float]:
        """The three numbers by name."""
        return {"low": self.low, "middle": self.middle, "high": self.high}

    def text(self, number: Callable[[float], str]) -> str:
        """As "middle (low to high)", each number written by `number`."""
        return f"{number(self.middle)} ({number(self.low)} to {number(self.high)})"
