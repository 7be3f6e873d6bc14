"""The command `relay simulate`: what a run would need and cost on hardware that is not here.

It holds the options and nothing else: the answer is worked out by `relay.simulation`, and written by
`relay.simulation.report`. Exit code 1, with both ledgers, where the run does not fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hal.spec.units import parse_count
from relay.cli.collecting import SeldomCollected
from relay.cli.console import json_option, print_json
from relay.cli.shared_options import (
    AT_LEAST_ONE,
    clip_option,
    layers_per_slot_option,
    loss_scale_option,
    machine_options,
    model_options,
    precision_option,
    recompute_option,
)

if TYPE_CHECKING:
    from relay.simulation.host_cache import HostSides


class Count(click.ParamType):
    """A number such as `1e9`, `300M` or `1.5T`, as `hal.spec.units.parse_count` reads it."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        try:
            return parse_count(value)
        except ValueError as wrong:
            self.fail(str(wrong), param, context)


SWEPT = (
    "device", "link", "host", "software", "layers", "hidden", "heads", "seq", "batch", "microbatches", "precision",
    "state-dtype", "stash", "slots", "layers-per-slot", "recompute", "loss-scale",
)  # fmt: skip


@click.command(cls=SeldomCollected)
@model_options
@click.option("--microbatches", default=None, type=AT_LEAST_ONE, help="Pieces of a batch.  [default: one a sequence]")
@precision_option
@click.option("--state-dtype", default="fp32", show_default=True, type=click.Choice(["fp32", "bf16", "int8"]))
@click.option("--stash", default="host", show_default=True, type=click.Choice(["device", "host"]))
@click.option("--slots", default=2, show_default=True, type=AT_LEAST_ONE, help="Layers on the device at a time.")
@clip_option
@layers_per_slot_option
@recompute_option
@loss_scale_option
@machine_options
@click.option("--tokens", type=Count(), help="Tokens of the whole run, such as 1e9 or 300G, for days and kWh.")
@click.option("--trace", type=click.Path(), help="Write the step for https://ui.perfetto.dev.")
@click.option(
    "--sweep",
    multiple=True,
    metavar="OPTION=A,B,...",
    help=f"Vary an option; give it twice for a heat map. One of {', '.join(SWEPT)}.",
)
@click.option("--out", default="sweep", show_default=True, help="Name of the sweep's .csv and .png.")
@click.option("--presets", is_flag=True, help="List the presets and end.")
@json_option
@click.pass_context
def simulate(context: click.Context, as_json: bool, **options: Any) -> None:
    """Predict a run on hardware you do not have: does it fit, how fast, how many joules, what would help.

    The real schedule and parameter server run on a virtual clock; nothing is computed and no memory is taken.

    \b
    Examples:
      relay simulate --layers 62 --hidden 8192 --device h200-sxm --host-memory 512GB --state-dtype int8
      relay simulate --model llama-3-8b --seq 512 --batch 64 --device rtx-4090 --tokens 1e9
      relay simulate --config config.json --device h200-sxm --trace step.json
      relay simulate --layers 24 --hidden 4096 --sweep batch=8,16,32 --sweep device=rtx-3090,rtx-4090
      relay simulate --presets
    """
    from hal.spec import SpecError

    try:
        if options["presets"]:
            _list_presets(as_json)
        elif options["sweep"]:
            _sweep(options, as_json)
        else:
            _one(context, options, as_json)
    except (ValueError, SpecError) as wrong:
        raise click.UsageError(str(wrong), context) from wrong


def _one(context: click.Context, options: dict[str, Any], as_json: bool) -> None:
    from relay.simulation import report

    found = _simulate(options, sensitivity=True, record=options["trace"] is not None, must_fit=False)
    if options["trace"] is not None and found.fits:
        report.write_trace(found, options["trace"])
    if as_json:
        print_json(report.as_json(found, options["tokens"]))
    else:
        click.echo(report.as_text(found, options["tokens"]))
    if not found.fits:
        context.exit(1)


def _simulate(options: dict[str, Any], **more: Any) -> Any:
    from relay.simulation.simulate import simulate as ask

    return ask(
        options["model"],
        **{name: options[name] for name in ("config", "layers", "hidden", "heads", "ffn", "vocabulary", "tied")},
        **{name: options[name] for name in ("device", "link", "host", "software", "host_memory", "capacity")},
        **{name: options[name] for name in ("batch", "state_dtype", "stash", "slots", "precision", "loss_scale")},
        **{name: options[name] for name in ("layers_per_slot", "recompute", "clip_grad_norm")},
        sequence=options["seq"],
        microbatches=options["microbatches"] or options["batch"],
        **more,
    )


def _sweep(options: dict[str, Any], as_json: bool) -> None:
    from relay.simulation import report
    from relay.simulation.host_cache import HostSides

    axes = [_axis(text) for text in options["sweep"]]
    if len(axes) > 2 or len({name for name, _ in axes}) < len(axes):
        given = ", ".join(name for name, _ in axes)
        raise ValueError(f"--sweep is for one or two different options; received {given}.")
    _check_parts(options, axes)
    if len(axes) == 1:
        axes.insert(0, ("stash", [options["stash"]]))
    (first, rows), (second, columns) = axes
    sides = HostSides()
    impossible: list[str] = []
    speeds = [[_speed(options, {first: row, second: column}, sides, impossible) for column in columns] for row in rows]
    if len(impossible) == len(rows) * len(columns):
        raise ValueError(f"None of these combinations can be. {impossible[-1]}")
    rows, columns = [_word(value) for value in rows], [_word(value) for value in columns]
    names = tuple([str(value) for value in values] for values in (rows, columns))
    table, picture = report.write_sweep(options["out"], (first, second), (names[0], names[1]), speeds)
    if as_json:
        print_json({"rows": {first: rows}, "columns": {second: columns}, "tokens_per_second": speeds,
                    "csv": str(table), "png": picture and str(picture)})  # fmt: skip
    else:
        click.echo(Path(table).read_text(encoding="utf-8").rstrip())
    if picture is None:
        click.echo(f"written: {table}; the map needs matplotlib: pip install 'layer-relay[plot]'", err=True)
    else:
        click.echo(f"written: {table}, {picture}", err=True)


def _word(value: Any) -> Any:
    """A swept value as the option has it: 'all' and 'none' for what --recompute makes of them."""
    return {True: "all", False: "none"}[value] if isinstance(value, bool) else value


def _speed(options: dict[str, Any], varied: dict[str, Any], sides: HostSides, impossible: list[str]) -> float:
    """Tokens a second; NaN for a combination that does not fit or cannot be (bf16 where there is none), which is said
    and put among the `impossible`."""
    from hal.spec import SpecError
    from relay.simulation.transformer_shape import ShapeError

    try:
        found = _simulate({**options, **varied}, sides=sides, must_fit=None)
    except (SpecError, ShapeError) as wrong:
        which = ", ".join(f"{name}={_word(value)}" for name, value in varied.items())
        impossible.append(str(wrong))
        click.echo(f"left out: {which}: {wrong}", err=True)
        return float("nan")
    return found.tokens_per_second if found.fits else float("nan")


def _check_parts(options: dict[str, Any], axes: list[tuple[str, list[Any]]]) -> None:
    """A part that is not in the catalogue is a mistake, not a combination that cannot be. SpecError names it."""
    from hal.spec import load

    for kind in ("device", "link", "host"):
        for name in next((values for axis, values in axes if axis == kind), [options[kind]]):
            if name is not None:
                load(kind, name)


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not equals or name not in SWEPT or not values:
        raise ValueError(f"--sweep {text!r} should be OPTION=A,B,... with one of {', '.join(SWEPT)}.")
    parameter = next(one for one in simulate.params if f"--{name}" in one.opts)
    assert parameter.name is not None
    return parameter.name, [parameter.type.convert(value, parameter, None) for value in values.split(",")]


def _list_presets(as_json: bool) -> None:
    from hal.spec import presets
    from relay.simulation.transformer_shape import MODELS

    catalogue = {kind: presets(kind) for kind in ("device", "link", "host")}
    if as_json:
        print_json({kind: {name: spec.title for name, spec in specs.items()} for kind, specs in catalogue.items()})
        return
    for kind, specs in catalogue.items():
        click.echo(f"{kind}s")
        for name, spec in specs.items():
            click.echo(f"  {name:<22} {spec.title}")
    click.echo("models\n  " + ", ".join(MODELS))
