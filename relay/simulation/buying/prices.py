"""Prices of machines and of power as a user gives them, and what a run costs by them.

No price is known here: all are the user's, and `hal.spec.units` reads the numbers. What a run takes in hours and kWh
is `relay.simulation.figures`'s.
Invariant: text that is no price of its kind is refused with an example of one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hal.spec.units import parse_price
from relay.simulation.ranges.ranged import Ranged

HOURS_A_YEAR = 8766.0
"""Of 365.25 days."""


def parse_amount(text: str, per: str, option: str, example: str) -> float:
    """The number before a unit, such as 0.30 of `0.30/kWh`. Raises ValueError for anything else."""
    try:
        return parse_price(text, per)
    except ValueError as wrong:
        raise ValueError(
            f"--{option} {text!r} is not an amount above zero{' ' + per if per else ''}. Write it as {example}."
        ) from wrong


def parse_prices(text: str, machines: Sequence[str], unit: str, option: str, example: str) -> dict[str, float]:
    """One price for all machines, or one for each as `NAME=PRICE,NAME=PRICE`.

    Raises ValueError for a machine that is not compared, has no price, or has two.
    """
    if "=" not in text:
        return dict.fromkeys(machines, parse_amount(text, unit, option, example))
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, price = part.partition("=")
        if name.strip() not in machines:
            raise ValueError(
                f"--{option} has a price for {name.strip()!r}, which is not compared. Compared are "
                f"{', '.join(machines)}."
            )
        if name.strip() in found:
            raise ValueError(f"--{option} has two prices for {name.strip()}. Give one for each machine.")
        found[name.strip()] = parse_amount(price, unit, option, example)
    missing = [name for name in machines if name not in found]
    if missing:
        raise ValueError(f"--{option} has no price for {', '.join(missing)}. Give one for each, or one for all.")
    return found


@dataclass(frozen=True)
class Prices:
    """What machines and power cost, in the user's currency.

    `rent` is an hour's price by machine, `buy` a machine's, which is written off over `years`; a rent includes the
    power. `power` is the price of a kWh, `grid` the grams of CO2 of one, and `pue` the power of the whole room over
    that of the machines in it.
    """

    rent: Mapping[str, float] = field(default_factory=dict)
    buy: Mapping[str, float] = field(default_factory=dict)
    years: float = 3.0
    power: float | None = None
    grid: float | None = None
    pue: float = 1.0

    def cost(self, machine: str, days: Ranged, kilowatt_hours: Ranged) -> Ranged | None:
        """What a run costs on a machine; None without a price."""
        if machine in self.rent:
            return days.scaled(24 * self.rent[machine])
        if machine not in self.buy:
            return None
        cost = days.scaled(24 * self.buy[machine] / (self.years * HOURS_A_YEAR))
        if self.power is None:
            return cost
        power = kilowatt_hours.scaled(self.pue * self.power)
        return Ranged(cost.low + power.low, cost.middle + power.middle, cost.high + power.high)

    def kilograms_of_co2(self, kilowatt_hours: Ranged) -> Ranged | None:
        """The CO2 of a run's power; None where the grid is not given."""
        return None if self.grid is None else kilowatt_hours.scaled(self.pue * self.grid / 1000)
