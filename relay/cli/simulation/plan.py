"""The command `relay plan`: the fastest options for a model on a machine, found by simulating candidates.

This file holds the options; the search is in `relay.simulation.plan`. The exit code is 1 where nothing fits.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relay.checkpoint.atomic_file import write_whole
from relay.cli.console import json_option, print_json
from relay.cli.shared_options import (
    ADAPTERS,
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
from relay.cli.simulation import compare as comparing
from relay.cli.simulation.compare import compare_options, tokens_option

if TYPE_CHECKING:
    from relay.simulation.simulate import Simulation


@click.command()
@model_options
@precision_option
@training_option(
    "state_dtype",
    default=None,
    because="The plan chooses. Restrict it to this value; repeat the option to allow several.  [default: all three]",
    multiple=True,
)
@training_option(
    "slots",
    default=None,
    because="The plan chooses. Restrict it to this value; repeat the option to allow several.  [default: 1, 2 and 3]",
    multiple=True,
)
@training_option("master_weights")
@training_option("clip_grad_norm")
@training_option("head_chunk_tokens")
@training_option("mlp_chunk_tokens")
@training_option("loss_over")
@training_option("loss_scale")
@training_option("exact_ties")
@machine_options
@hosts_options
@tokens_option
@compare_options
@longest_option
@click.option("--out", type=click.Path(path_type=Path), help="Write a run file for `relay train --plan`.")
@json_option
@click.pass_context
def plan(context: click.Context, as_json: bool, out: Path | None, **options: Any) -> None:
    """Choose the options with which a model trains fastest on a machine.

    The options are micro-batches, slots, layers a slot, resident layers, stash, recomputing and the state dtype.
    Candidates are simulated, so the machine need not be present.

    \b
    Examples:
      relay plan --layers 62 --hidden 8192 --device v100-sxm2-16gb --host-memory 512GB --loss-scale fixed
      relay plan --model llama-3-8b --device rtx-4090 --batch 32
      relay plan --model llama-3-8b --device rtx-4090 --count 8 --hosts 4 --network 25GB/s
      relay plan --model llama-3-8b --compare rtx-4090,4xrtx-4090 --chinchilla
      relay plan --model llama-3-8b --compare rtx-4090,h100-sxm --tokens 1e9 --price rtx-4090=0.4/h,h100-sxm=2.5/h
      relay plan --layers 12 --hidden 768 --vocab 256 --seq 512 --device t4 --out plan.toml
      relay train --plan plan.toml
    """
    from hal.spec import SpecError
    from relay.simulation.hosts import scaling_curve
    from relay.simulation.plan import plan as choose

    check_hosts(context)
    hosts, network = options.pop("hosts"), options.pop("network")
    comparison, tokens = {name: options.pop(name) for name in comparing.OPTIONS}, options.pop("tokens")
    options["state_dtypes"], longest = options.pop("state_dtype"), options.pop("longest")
    for repeatable in ("state_dtypes", "slots"):
        if not options[repeatable]:
            del options[repeatable]
    forget_usual_length(context, options)
    of_sample = sample_options(options)
    for name in ("seq", "seconds", *ADAPTERS):
        del options[name]
    try:
        if comparison["compare"] is not None:
            comparing.refuse_beside_compare(context)
            for name in ("device", "count"):
                del options[name]
            model = options.pop("model")
            limits = {name: options[name] for name in ("host_memory", "capacity")}

            def run(device: str, count: int) -> Simulation:
                return choose(model, device=device, count=count, **options, **of_sample).expected

            if not comparing.compare(run, comparison, tokens, limits, as_json):
                context.exit(1)
            return
        comparing.refuse_without_compare({**comparison, "tokens": tokens})
        chosen = choose(options.pop("model"), **options, **of_sample)
        limits = {name: options[name] for name in ("host_memory", "capacity")}
        curve = None if hosts is None else scaling_curve.curve_of(chosen.expected, hosts, network, **limits)
        file = "" if out is None else chosen.as_toml()
    except (ValueError, SpecError) as wrong:
        raise click.UsageError(str(wrong), context) from wrong
    for note in chosen.expected.notes:
        click.echo(f"note: {note}", err=True)
    if out is not None:
        write_whole(out, file)
        if chosen.caution is not None:
            click.echo(f"written: {out}. {chosen.caution}", err=True)
    length = longest_with(chosen.expected, options["head_chunk_tokens"]) if longest else None
    if as_json:
        from relay.simulation.report import as_json as figures

        more: dict[str, Any] = {"longest_sequence": length} if length is not None else {}
        if curve is not None:
            more |= scaling_curve.as_json(curve)
        print_json({"options": chosen.options, "reasons": list(chosen.reasons), "tried": chosen.tried,
                    "caution": chosen.caution, **more,
                    "expected": figures(chosen.expected, None)})  # fmt: skip
    else:
        click.echo("\n".join(chosen.reasons))
        if length is not None:
            click.echo(f"the longest sequence that fits with these options has {length:,} tokens")
        if curve is not None:
            click.echo("\n" + scaling_curve.as_text(curve))
