"""The command `relay calibrate`: measure a device of this machine for the simulator.

This file holds the options; the measurements are in `relay.simulation.calibrate`. Invariant: a file is written only if
the simulator can read it.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from relay.checkpoint.atomic_file import write_whole
from relay.cli.console import json_option, print_json


@click.command()
@click.option("--device", default="cpu", show_default=True, help="The device, as `relay devices` lists it.")
@click.option(
    "--precision",
    default="fp32",
    show_default=True,
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="The dtype of the timed kernels.",
)
@click.option("--out", type=click.Path(path_type=Path), help="The file to write.  [default: DEVICE.json]")
@json_option
def calibrate(device: str, precision: str, out: Path | None, as_json: bool) -> None:
    """Measure a device of this machine and write its description for the simulator.

    Kernels, transfers, host memory and an optimizer step are timed. The file can be given as --device to `relay
    simulate` and `relay plan`, also on another machine.

    \b
    Examples:
      relay calibrate
      relay calibrate --device cpu --out mine.json
      relay simulate --model gpt2 --device mine.json --precision fp32
    """
    from hal.spec import spec_of
    from relay.simulation.calibrate import calibrate as measure

    path = out if out is not None else Path(f"{device.replace(':', '-')}.json")
    if path.suffix != ".json" or not path.parent.is_dir():
        raise click.UsageError(f"--out {path}: expected a name that ends in .json, in a folder that exists.")
    tables = measure(device, precision, on_progress=lambda text: click.echo(f"measuring {text}", err=True))
    for kind in ("device", "link", "host"):
        spec_of({"kind": kind, **tables[kind]}, f"the measured {kind}")  # raises where the simulator could not read it
    write_whole(path, json.dumps(tables, indent=1))
    if as_json:
        print_json({"file": str(path), **tables})
        return
    figures = tables["device"]
    products, memory = figures[f"achieved_{precision}"]["value"], figures["bandwidth_achieved"]["value"]
    optimizer = tables["host"]["optimizer_bandwidth"]["value"]
    click.echo(f"{figures['title']}: products {products}, memory {memory}, optimizer {optimizer}")
    click.echo(f"written: {path}; mean error of the fit over the kernels: {tables['kernels_mean_error']:.0%}")
