"""The command `relay sweep`: a simulated step at many settings, as a table that can be continued, and heat maps.

This file holds the options; the points, the table and the maps are made in `relay.simulation.sweeping`. Invariant: no
option that is given is ignored, and a table holds the points of one set of settings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relay.cli.console import json_option, print_json
from relay.cli.shared_options import forget_usual_length, sample_options
from relay.cli.simulation.compare import tokens_option
from relay.cli.simulation.step_options import step_arguments, step_options

if TYPE_CHECKING:
    from relay.simulation.sweeping.points import Axis, Point
    from relay.simulation.sweeping.table import SweepTable

_NOT_SWEPT = ("over", "out", "maps", "tokens", "as_json", "calibration")


@click.command()
@click.option(
    "--over",
    multiple=True,
    required=True,
    metavar="OPTION=A,B,...",
    help="An option of this command and its values, such as batch=8,16 or device=rtx-3090,rtx-4090, or a figure of the "
    "machine, such as link.down=16GB/s,32GB/s or host.memory=64GB,128GB. Repeat it for several options.",
)
@step_options
@tokens_option
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("sweep.csv"),
    show_default=True,
    help="The table. Where it is there, with the same settings, only the points that it lacks are simulated.",
)
@click.option(
    "--maps/--no-maps", default=True, show_default=True, help="Draw heat maps beside the table (with matplotlib)."
)
@json_option
@click.pass_context
def sweep(context: click.Context, as_json: bool, **options: Any) -> None:
    """Simulate a step at every combination of the values of several options.

    Writes a table of speed, step time, utilisation, energy and memory, each figure with its range, and heat maps of
    speed, energy, device memory and host memory. A sweep that ended early goes on where it was; a table of other
    settings is refused.

    \b
    Examples:
      relay sweep --model llama-3-8b --device rtx-4090 --over batch=8,16,32
      relay sweep --layers 24 --hidden 4096 --over batch=8,16,32 --over device=rtx-3090,rtx-4090
      relay sweep --model llama-3-8b --device rtx-4090 --over link.peak=16GB/s,32GB/s,64GB/s --over slots=1,2,3
      relay sweep --layers 62 --hidden 8192 --device h200-sxm --over state-dtype=fp32,int8 --over host-memory=512GB,1TB
    """
    from hal.spec import SpecError
    from relay.simulation.sweeping.points import Sweep, combinations, count_of
    from relay.simulation.sweeping.table import SweepTable, settings_of

    try:
        axes = [_axis(context, text) for text in options["over"]]
        _refuse_unclear(context, axes)
        if options["out"].suffix != ".csv":
            raise ValueError(f"--out {options['out']} is the name of a table and should end in .csv.")
        count_of(axes)
        forget_usual_length(context, options)
        _check_parts(options, axes)
        swept = {axis.argument for axis in axes}
        arguments = {**step_arguments(options), **sample_options(options), "model": options["model"]}
        arguments["microbatches"] = options["microbatches"]
        fixed = {name: value for name, value in arguments.items() if name not in swept}
        described = {**fixed, "tokens": options["tokens"]}
        settings = settings_of(described, _files(options, axes))
        with SweepTable(options["out"], settings, axes) as table:
            run = Sweep(None, fixed, axes, options["tokens"])
            _fill(table, run.point, list(combinations(axes)), options["out"])
    except (ValueError, SpecError) as wrong:
        raise click.UsageError(str(wrong), context) from wrong
    _report(axes, table, options, as_json)


def _fill(table: SweepTable, simulated: Any, wanted: list[tuple[str, ...]], out: Path) -> None:
    """Simulate the points that the table lacks. Raises ValueError where every combination is impossible."""
    missing = [texts for texts in wanted if texts not in table.done]
    if len(missing) < len(wanted):
        click.echo(f"{out} has {len(wanted) - len(missing)} of {len(wanted)} points", err=True)
    with click.progressbar(missing, label="simulating", file=sys.stderr, show_pos=True) as points:
        for texts in points:
            table.add(texts, simulated(texts))
    found = [table.done[texts] for texts in wanted]
    if all(point.verdict == "impossible" for point in found):
        table.discard()
        raise ValueError(f"None of these combinations is possible. {found[-1].reason}")


def _report(axes: list[Axis], table: SweepTable, options: dict[str, Any], as_json: bool) -> None:
    """Draw the maps, and print the points that were asked for."""
    from relay.simulation.sweeping.heat_map import MOST_PANELS, panels_of, write_maps
    from relay.simulation.sweeping.points import FIELDS, RANGES, combinations

    points: dict[tuple[str, ...], Point] = {texts: table.done[texts] for texts in combinations(axes)}
    maps: list[Path] = []
    note = ""
    if options["maps"] and panels_of(axes) > MOST_PANELS:
        note = f"; no maps, since the options after the second have more than {MOST_PANELS} combinations"
    elif options["maps"]:
        try:
            maps = write_maps(table.path.with_suffix(""), axes, points)
        except ModuleNotFoundError:
            note = "; the maps need matplotlib: pip install 'layer-relay[plot]'"
    if as_json:
        rows = []
        for texts, point in points.items():
            figures = {name: getattr(point, name) for name in FIELDS}
            for name in RANGES:
                figures[name] = None if figures[name] is None else figures[name].as_json()
            rows.append({**{axis.name: text for axis, text in zip(axes, texts, strict=True)}, **figures})
        print_json({"points": rows, "csv": str(table.path), "maps": [str(path) for path in maps]})
    else:
        for texts, point in points.items():
            click.echo(_line(axes, texts, point))
        _print_narrowing(points.values())
    click.echo(f"written: {', '.join(map(str, (table.path, *maps)))}{note}", err=True)


def _line(axes: list[Axis], texts: tuple[str, ...], point: Point) -> str:
    """A point as a line for people."""
    from hal.spec.units import format_size

    name = ", ".join(f"{axis.name}={text}" for axis, text in zip(axes, texts, strict=True))
    if point.speed is None or point.joules_per_unit is None:
        return f"{name}: {point.verdict}: {point.reason}"
    memory = f"{format_size(point.device_bytes or 0)} of the device, {format_size(point.host_bytes or 0)} of the host"
    speed, joules = point.speed.text("{:,.4g}".format), point.joules_per_unit.text("{:.3g}".format)
    return f"{name}: {speed} {point.unit}/s, {joules} J each, {memory}; bottleneck {point.bottleneck}"


def _print_narrowing(points: Iterable[Point]) -> None:
    """Print by how much a calibration narrows the ranges, where there is one."""
    widths = [
        (point.step_width_without_calibration, point.step_seconds.width)
        for point in points
        if point.step_width_without_calibration is not None and point.step_seconds is not None
    ]
    if widths:
        before, after = (max(column) for column in zip(*widths, strict=True))
        click.echo(f"The calibration narrows the ranges of steps from a factor of {before:.2f} to one of {after:.2f}.")


def _axis(context: click.Context, text: str) -> Axis:
    """The option and the values of one --over. Raises ValueError for what is neither an option nor a figure."""
    from relay.simulation.sweeping.hardware_figures import is_figure, read_figure
    from relay.simulation.sweeping.points import Axis

    name, equals, listed = text.partition("=")
    name, texts = name.strip(), [value.strip() for value in listed.split(",")]
    known = {
        option.removeprefix("--"): parameter
        for parameter in context.command.params
        if parameter.name not in _NOT_SWEPT
        for option in parameter.opts
        if option.startswith("--")
    }
    if not equals or not all(texts) or not (name in known or is_figure(name)):
        raise ValueError(
            f"--over {text!r} should be OPTION=A,B,... with one of {', '.join(sorted(known))}, or a figure of the "
            "machine, such as device.memory, link.down or host.bandwidth."
        )
    if len(set(texts)) < len(texts):
        raise ValueError(f"--over {text!r} has a value twice.")
    if is_figure(name):
        return Axis(name, None, {value: read_figure(name, value) for value in texts})
    parameter = known[name]
    return Axis(name, parameter.name, {value: parameter.type.convert(value, parameter, context) for value in texts})


def _refuse_unclear(context: click.Context, axes: list[Axis]) -> None:
    """Raise ValueError for an option that is swept twice, or swept and given too."""
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise ValueError(f"--over takes different options; received {', '.join(names)}.")
    for axis in axes:
        given = axis.argument is not None and context.get_parameter_source(axis.argument)
        if given is click.core.ParameterSource.COMMANDLINE:
            raise ValueError(f"{axis.name}: given as an option and swept too. Leave one of them out.")
        if axis.argument is None and context.params["calibration"] is not None:
            raise ValueError(f"{axis.name} is a figure that the calibration measured. Leave one of them out.")


def _check_parts(options: dict[str, Any], axes: list[Axis]) -> None:
    """Raise SpecError for a device, link or host that does not exist: a mistake, not an impossible combination."""
    from hal.spec import load

    for kind in ("device", "link", "host"):
        for name in _values(options, axes, kind):
            for single in name.split(",") if kind == "device" else [name]:
                load(kind, single.strip())


def _values(options: dict[str, Any], axes: list[Axis], name: str) -> list[str]:
    """The values that an option takes in a sweep, those that are not given left out."""
    swept = next((list(axis.values.values()) for axis in axes if axis.argument == name), [options[name]])
    return [value for value in swept if value is not None]


def _files(options: dict[str, Any], axes: list[Axis]) -> list[str]:
    """The files that decide figures: descriptions of hardware and of models."""
    named = [value for name in ("device", "link", "host", "config", "calibration") for value in
             (_values(options, axes, name))]  # fmt: skip
    singles = [single.strip() for value in named for single in str(value).split(",")]
    return [name for name in singles if name.endswith((".json", ".toml")) and Path(name).is_file()]
