"""`relay plan --compare` and `relay simulate --compare`: the options, which of them go together, and the table.

The rows are made by `relay.simulation.buying.comparison`. Invariant: none of the options is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hal.spec.units import parse_count
from relay.checkpoint.atomic_file import write_whole
from relay.cli.console import print_json
from relay.cli.shared_options import together

if TYPE_CHECKING:
    from relay.simulation.buying.prices import Prices
    from relay.simulation.simulate import Simulation

OPTIONS = (
    "compare", "chinchilla", "price", "buy", "years", "power_price", "grid", "pue", "csv", "picture",
)  # fmt: skip
"""All that `compare_options` adds, but for the tokens, which a single run may have too."""

_ONE_MACHINE = (
    "device", "link", "host", "count", "one_link", "calibration", "hosts", "network", "longest", "out", "trace",
)  # fmt: skip


class Count(click.ParamType):
    """A number such as `1e9`, `300M` or `1.5T`, as `hal.spec.units.parse_count` reads it."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        try:
            return parse_count(value)
        except ValueError as wrong:
            self.fail(str(wrong), param, context)


tokens_option = click.option(
    "--tokens",
    type=Count(),
    help="Tokens of the whole run, such as 1e9 or 300G, to report days and kWh; for models of images or audio the "
    "images or the seconds.",
)

compare_options = together(
    click.option(
        "--compare",
        metavar="A,B,...",
        help="Machines to compare, each alone: device presets or files; 4xrtx-4090 has four of the device on one host.",
    ),
    click.option("--chinchilla", is_flag=True, help="20 tokens a parameter, in place of --tokens."),
    click.option(
        "--price",
        metavar="2.5/h",
        help="What an hour of a machine costs to rent, all its devices together; also NAME=2.5/h,NAME=0.4/h.",
    ),
    click.option("--buy", metavar="9000", help="What the machine costs to buy; also NAME=9000,NAME=2500."),
    click.option("--years", type=click.FloatRange(0, min_open=True), help="Years that it serves.  [default: 3]"),
    click.option("--power-price", metavar="0.30/kWh", help="What power costs, for a machine that is bought."),
    click.option("--grid", metavar="400g/kWh", help="CO2 of a kWh of power, in grams."),
    click.option("--pue", type=click.FloatRange(1), help="Power of the room over that of its machines.  [default: 1]"),
    click.option("--csv", type=click.Path(path_type=Path), help="Write the comparison to this file."),
    click.option("--picture", type=click.Path(path_type=Path), help="Draw it, with ranges, as this PNG file."),
)
"""What only a comparison takes."""


def refuse_without_compare(given: dict[str, Any]) -> None:
    """Raise ValueError for options of a comparison where nothing is compared."""
    found = [name for name, value in given.items() if value not in (None, False)]
    if found:
        raise ValueError(
            f"--{found[0].replace('_', '-')} is for a comparison. Name the machines with --compare, or leave it out."
        )


def refuse_beside_compare(context: click.Context) -> None:
    """Raise ValueError for options of a single machine or run."""
    for name in _ONE_MACHINE:
        if name in context.params and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise ValueError(
                f"--{name.replace('_', '-')} is for one machine, and --compare takes several, each alone with the "
                "link and host of its description. Leave one of them out."
            )


def compare(
    run: Callable[[str, int], Simulation],
    given: dict[str, Any],
    tokens: float | None,
    limits: dict[str, Any],
    as_json: bool,
) -> bool:
    """Compare, print and write. `run` simulates a machine by its device and their number. True if one fits.

    Raises ValueError for options that do not go together.
    """
    from hal.spec import load
    from relay.simulation.buying import comparison

    machines = [name.strip() for name in given["compare"].split(",")]
    if not all(machines) or len(set(machines)) < len(machines):
        raise ValueError(f"--compare {given['compare']!r} should name each machine once, joined by single commas.")
    for name in machines:
        load("device", comparison.parse_machine(name)[0])
    if (tokens is None) is not given["chinchilla"]:
        raise ValueError("A comparison is of one run: give either --tokens COUNT or --chinchilla.")
    prices = prices_of(given, machines)
    rows = comparison.compare(machines, run, prices, tokens, given["chinchilla"], limits)
    if given["csv"] is not None:
        write_whole(given["csv"], comparison.as_csv(rows))
    if given["picture"] is not None:
        try:
            comparison.write_picture(rows, str(given["picture"]))
        except ModuleNotFoundError as missing:
            raise ValueError("--picture needs matplotlib: pip install 'layer-relay[plot]'") from missing
    if as_json:
        print_json({"machines": comparison.as_json(rows), "notes": comparison.differences(rows)})
    else:
        click.echo(comparison.as_text(rows))
    return any(row.speed is not None for row in rows)


def prices_of(given: dict[str, Any], machines: list[str]) -> Prices:
    """The prices among the options. Raises ValueError for those that do not go together."""
    from relay.simulation.buying.prices import Prices, parse_amount, parse_prices

    if given["price"] is not None and given["buy"] is not None:
        raise ValueError("--price is for machines that are rented and --buy for those that are bought. Give one.")
    for name in ("years", "power_price"):
        if given[name] is not None and given["buy"] is None:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} is for a machine that is bought. Give --buy, or leave {flag} out.")
    if given["pue"] is not None and given["power_price"] is None and given["grid"] is None:
        raise ValueError("--pue raises what power costs and the CO2 of it. Give --power-price or --grid beside it.")
    found: dict[str, Any] = {}
    if given["price"] is not None:
        found["rent"] = parse_prices(given["price"], machines, "/h", "price", "2.5/h")
    if given["buy"] is not None:
        found["buy"] = parse_prices(given["buy"], machines, "", "buy", "9000")
    if given["power_price"] is not None:
        found["power"] = parse_amount(given["power_price"], "/kWh", "power-price", "0.30/kWh")
    if given["grid"] is not None:
        found["grid"] = parse_amount(given["grid"], "g/kWh", "grid", "400g/kWh")
    return Prices(**found, **{name: given[name] for name in ("years", "pue") if given[name] is not None})
