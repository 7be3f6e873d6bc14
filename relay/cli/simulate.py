"""The command `relay simulate`: what a run needs and costs on hardware that is not present.

This file holds the options and the sweep over them. The simulation is in `relay.simulation.simulate`, its report in
`relay.simulation.report`. Invariant: no option that is given is ignored. The exit code is 1, with both ledgers, where
the run does not fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hal.spec.units import parse_count
from relay.cli.console import json_option, print_json
from relay.cli.shared_options import (
    check_hosts,
    forget_usual_length,
    hosts_options,
    longest_option,
    longest_with,
    machine_options,
    model_options,
    precision_option,
    sample_options,
    training_option,
)

if TYPE_CHECKING:
    from relay.simulation.host_cache import HostCache
    from relay.simulation.simulate import Simulation


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
    "state-dtype", "master-weights", "stash", "slots", "layers-per-slot", "resident-layers", "recompute",
    "loss-scale", "count",
)  # fmt: skip


@click.command()
@model_options
@training_option(
    "microbatches",
    default=None,
    because="Here, one per sequence if not given, which needs the least device memory; relay train has 4.",
)
@precision_option
@training_option("state_dtype")
@training_option("master_weights")
@training_option("stash")
@training_option("slots")
@training_option("clip_grad_norm")
@training_option("layers_per_slot")
@training_option("resident_layers")
@training_option("layers_per_visit")
@training_option("recompute")
@training_option("head_chunk_tokens")
@training_option("mlp_chunk_tokens")
@training_option("sparse_rows")
@training_option("loss_over")
@training_option("loss_scale")
@training_option("exact_ties")
@machine_options
@hosts_options
@click.option("--tokens", type=Count(), help="Tokens of the whole run, such as 1e9 or 300G, to report "
    "days and kWh; for models of images or audio the images or the seconds.")
@longest_option
@click.option("--trace", type=click.Path(), help="Write the step to this file, for https://ui.perfetto.dev.")
@click.option(
    "--sweep",
    multiple=True,
    metavar="OPTION=A,B,...",
    help="Report tokens a second for several values of an option. Give it twice for a heat map over two options. "
    f"OPTION is one of {', '.join(SWEPT)}.",
)
@click.option(
    "--out", default="sweep", show_default=True, help="The name of the .csv and .png files that --sweep writes."
)
@click.option("--presets", is_flag=True, help="List the presets and the models, and exit.")
@json_option
@click.pass_context
def simulate(context: click.Context, as_json: bool, **options: Any) -> None:
    """Predict a training run on hardware that you do not have.

    Reports whether the run fits in memory, its speed, its energy, its bottleneck, and what would make it faster. The
    schedule and the parameter server of a real run are simulated on a virtual clock; nothing is computed and no memory
    is taken.

    \b
    Examples:
      relay simulate --layers 62 --hidden 8192 --device h200-sxm --host-memory 512GB --state-dtype int8
      relay simulate --model llama-3-8b --seq 512 --batch 64 --device rtx-4090 --tokens 1e9
      relay simulate --config config.json --device h200-sxm --trace step.json
      relay simulate --model llama-3-8b --batch 32 --device rtx-4090 --count 4
      relay simulate --model llama-3-8b --batch 32 --device rtx-4090 --count 4 --hosts 64 --network 25GB/s
      relay simulate --layers 24 --hidden 4096 --sweep batch=8,16,32 --sweep device=rtx-3090,rtx-4090
      relay simulate --presets
    """
    from hal.spec import SpecError

    _refuse_ignored(context)
    forget_usual_length(context, options)
    try:
        if options["presets"]:
            _list_presets(as_json)
        elif options["sweep"]:
            _sweep(context, options, as_json)
        elif options["hosts"] is not None:
            _on_hosts(context, options, as_json)
        else:
            _report(context, options, as_json)
    except (ValueError, SpecError) as wrong:
        raise click.UsageError(str(wrong), context) from wrong


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _refuse_ignored(context: click.Context) -> None:
    """Raise UsageError for options that would have no effect beside the others."""
    given = [name for name in context.params if name != "as_json" and _is_given(context, name)]
    if "presets" in given and len(given) > 1:
        raise click.UsageError("--presets lists the presets and simulates nothing. Leave the other options out.",
        context)
    check_hosts(context)
    for name in ("sweep", "trace", "tokens", "longest"):
        if "hosts" in given and name in given:
            raise click.UsageError(f"--{name} is for one host. Leave --hosts and --network, or --{name}, out.", context)
    if "sweep" in given:
        single = (("trace", "writes a single step"), ("tokens", "reports a single run"))
        for name, what in (*single, ("longest", "is for a single run")):
            if name in given:
                raise click.UsageError(f"--{name} {what}, and --sweep simulates many. Leave one of them out.", context)
    elif "out" in given:
        raise click.UsageError("--out names the files of a sweep, and there is no --sweep. Leave it out.", context)


def _report(context: click.Context, options: dict[str, Any], as_json: bool) -> None:
    """Simulate one run and print its report."""
    from relay.simulation import report

    found = _simulation(options, sensitivity=True, record=options["trace"] is not None, must_fit=False)
    if options["trace"] is not None and found.fits:
        report.write_trace(found, options["trace"])
    longest = longest_with(found, options["head_chunk_tokens"]) if options["longest"] else None
    if as_json:
        more = {"longest_sequence": longest} if longest is not None else {}
        print_json(report.as_json(found, options["tokens"]) | more)
    else:
        click.echo(report.as_text(found, options["tokens"]))
        if longest is not None:
            click.echo(f"longest         {longest:,} tokens in a sequence fit with these options")
    if not found.fits:
        if options["trace"] is not None:
            click.echo("No trace was written, because the run does not fit.", err=True)
        context.exit(1)


def _on_hosts(context: click.Context, options: dict[str, Any], as_json: bool) -> None:
    """Simulate one host, and print the speed of several."""
    from relay.simulation import report
    from relay.simulation.hosts import scaling_curve

    found, curve = scaling_curve.simulate_hosts(
        options["model"], hosts=options["hosts"], network=options["network"], **_arguments(options)
    )
    if as_json:
        print_json({"one_host": report.as_json(found, None), **scaling_curve.as_json(curve)})
    else:
        click.echo("\n".join([*report.as_text(found, None).splitlines()[:4], scaling_curve.as_text(curve)]))
    if not curve.points[-1].fits:
        click.echo(f"It does not fit on {options['hosts']} hosts.", err=True)
        context.exit(1)


def _simulation(options: dict[str, Any], **more: Any) -> Simulation:
    from relay.simulation.simulate import simulate as simulate_step

    return simulate_step(options["model"], **_arguments(options), **more)


def _arguments(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `relay.simulate` but the model."""
    return dict(
        **{name: options[name] for name in ("config", "layers", "hidden", "heads", "ffn", "vocabulary", "tied")},
        **{name: options[name] for name in ("device", "count", "one_link", "link", "host", "software")},
        **{name: options[name] for name in ("host_memory", "capacity", "layers_per_visit")},
        **{name: options[name] for name in ("batch", "state_dtype", "stash", "slots", "precision", "loss_scale")},
        **{name: options[name] for name in ("layers_per_slot", "resident_layers", "recompute", "clip_grad_norm")},
        **{name: options[name] for name in ("master_weights", "exact_ties", "head_chunk_tokens", "sparse_rows")},
        **{name: options[name] for name in ("loss_over", "mlp_chunk_tokens")},
        **sample_options(options),
        microbatches=options["microbatches"] or options["batch"],
    )


def _sweep(context: click.Context, options: dict[str, Any], as_json: bool) -> None:
    """Simulate every combination of the swept values, and write the table and the map."""
    from relay.simulation import report
    from relay.simulation.host_cache import HostCache

    axes = [_axis(text) for text in options["sweep"]]
    if len(axes) > 2 or len({name for name, _ in axes}) < len(axes):
        given = ", ".join(name for name, _ in axes)
        raise ValueError(f"--sweep takes one or two different options; received {given}.")
    twice = [name for name, _ in axes if _is_given(context, name)]
    if twice:
        raise ValueError(f"{' and '.join(twice)}: given as an option and swept too. Leave one of them out.")
    _check_parts(options, axes)
    if len(axes) == 1:
        axes.insert(0, ("stash", [options["stash"]]))
    (first, rows), (second, columns) = axes
    host_cache = HostCache()
    impossible: list[str] = []
    speeds = [
        [_speed(options, {first: row, second: column}, host_cache, impossible) for column in columns] for row in rows
    ]
    if len(impossible) == len(rows) * len(columns):
        raise ValueError(f"None of these combinations is possible. {impossible[-1]}")
    rows, columns = [_as_option(value) for value in rows], [_as_option(value) for value in columns]
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


def _as_option(value: Any) -> Any:
    """A swept value as it is written on the command line: `all` and `none` for the booleans of --recompute."""
    return {True: "all", False: "none"}[value] if isinstance(value, bool) else value


def _speed(options: dict[str, Any], varied: dict[str, Any], host_cache: HostCache, impossible: list[str]) -> float:
    """Tokens a second; NaN for a combination that does not fit or is impossible.

    The reason for an impossible one (such as bf16 on a device without it) is printed and added to `impossible`.
    """
    from hal.spec import SpecError
    from relay.simulation.described.transformer_shape import ShapeError

    try:
        found = _simulation({**options, **varied}, host_cache=host_cache, must_fit=None)
    except (SpecError, ShapeError) as wrong:
        combination = ", ".join(f"{name}={_as_option(value)}" for name, value in varied.items())
        impossible.append(str(wrong))
        click.echo(f"left out: {combination}: {wrong}", err=True)
        return float("nan")
    return found.tokens_per_second if found.fits else float("nan")


def _check_parts(options: dict[str, Any], axes: list[tuple[str, list[Any]]]) -> None:
    """Raise SpecError for a device, link or host that does not exist: a mistake, not an impossible combination."""
    from hal.spec import load

    for kind in ("device", "link", "host"):
        for name in next((values for axis, values in axes if axis == kind), [options[kind]]):
            for single in name.split(",") if kind == "device" else [name]:
                if single is not None:
                    load(kind, single.strip())


def _axis(text: str) -> tuple[str, list[Any]]:
    """The parameter and the values of one --sweep."""
    name, equals, values = text.partition("=")
    if not equals or name not in SWEPT or not values:
        raise ValueError(f"--sweep {text!r} should be OPTION=A,B,... with one of {', '.join(SWEPT)}.")
    parameter = next(parameter for parameter in simulate.params if f"--{name}" in parameter.opts)
    assert parameter.name is not None
    return parameter.name, [parameter.type.convert(value, parameter, None) for value in values.split(",")]


def _list_presets(as_json: bool) -> None:
    from hal.spec import presets
    from relay.simulation.described.diffusion import DIFFUSION_MODELS
    from relay.simulation.described.transformer_shape import MODELS

    catalogue = {kind: presets(kind) for kind in ("device", "link", "host")}
    if as_json:
        print_json({kind: {name: spec.title for name, spec in specs.items()} for kind, specs in catalogue.items()})
        return
    for kind, specs in catalogue.items():
        click.echo(f"{kind}s")
        for name, spec in specs.items():
            click.echo(f"  {name:<22} {spec.title}")
    click.echo("models\n  " + ", ".join((*MODELS, *DIFFUSION_MODELS)))
