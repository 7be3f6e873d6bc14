"""The command `relay simulate`: what a run needs and costs on hardware that is not present.

The options of a step are in `relay.cli.simulation.step_options`, the simulation in `relay.simulation.simulate`, and its
report in `relay.simulation.report`. Invariant: no option that is given is ignored. The exit code is 1, with both
ledgers, where the run does not fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from relay.cli.console import json_option, print_json
from relay.cli.shared_options import check_hosts, forget_usual_length, hosts_options, longest_option, longest_with
from relay.cli.simulation import compare as comparing
from relay.cli.simulation.compare import compare_options, tokens_option
from relay.cli.simulation.step_options import step_arguments, step_options

if TYPE_CHECKING:
    from relay.simulation.simulate import Simulation


@click.command()
@step_options
@hosts_options
@tokens_option
@compare_options
@longest_option
@click.option("--trace", type=click.Path(), help="Write the step to this file, for https://ui.perfetto.dev.")
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
      relay simulate --model llama-3-8b --batch 32 --compare rtx-4090,4xrtx-4090,h100-sxm --tokens 1e9
      relay simulate --model llama-3-8b --device rtx-4090 --calibration measured.json
      relay simulate --presets
    """
    from hal.spec import SpecError

    _refuse_ignored(context)
    forget_usual_length(context, options)
    try:
        if options["compare"] is None:
            comparing.refuse_without_compare({name: options[name] for name in comparing.OPTIONS})
        if options["presets"]:
            _list_presets(as_json)
        elif options["compare"] is not None:
            _compare(context, options, as_json)
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
        raise click.UsageError(
            "--presets lists the presets and simulates nothing. Leave the other options out.", context
        )
    check_hosts(context)
    for name in ("trace", "tokens", "longest"):
        if "hosts" in given and name in given:
            raise click.UsageError(f"--{name} is for one host. Leave --hosts and --network, or --{name}, out.", context)


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
        options["model"], hosts=options["hosts"], network=options["network"], **step_arguments(options)
    )
    if as_json:
        print_json({"one_host": report.as_json(found, None), **scaling_curve.as_json(curve)})
    else:
        click.echo("\n".join([*report.as_text(found, None).splitlines()[:4], scaling_curve.as_text(curve)]))
    if not curve.points[-1].fits:
        click.echo(f"It does not fit on {options['hosts']} hosts.", err=True)
        context.exit(1)


def _compare(context: click.Context, options: dict[str, Any], as_json: bool) -> None:
    """Simulate the same run on several machines, and print them side by side."""
    comparing.refuse_beside_compare(context)
    limits = {name: options[name] for name in ("host_memory", "capacity")}

    def run(device: str, count: int) -> Simulation:
        return _simulation({**options, "device": device, "count": count}, sensitivity=True, must_fit=None)

    if not comparing.compare(run, options, options["tokens"], limits, as_json):
        context.exit(1)


def _simulation(options: dict[str, Any], **more: Any) -> Simulation:
    from relay.simulation.simulate import simulate as simulate_step

    return simulate_step(options["model"], **step_arguments(options), **more)


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
