"""The command `relay calibrate`: measure a device here, for the simulator to use here or elsewhere.

It holds the options; what is measured is in `relay.simulation.calibrate`.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from relay.checkpoint.atomic_file import write_whole
from relay.cli.console import json_option, print_json


@click.command()
@click.option("--device", default="cpu", show_default=True, help="A name from `relay devices`.")
@click.option("--precision", default="fp32", show_default=True, type=click.Choice(["fp32", "bf16", "fp16"]))
@click.option("--out", type=click.Path(path_type=Path), help="Where to write.  [default: DEVICE.json]")
@json_option
def calibrate(device: str, precision: str, out: Path | None, as_json: bool) -> None:
    """Time kernels, transfers, host memory and an optimizer step of a device here, and write its description.

    The file takes a preset's place, here or on another machine.

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
        raise click.UsageError(f"--out {path}: expected a name that ends in .json, in a folder that is there.")
    tables = measure(device, precision, on_progress=lambda text: click.echo(f"measuring {text}", err=True))
    for kind in ("device", "link", "host"):
        spec_of({"kind": kind, **tables[kind]}, f"what was measured of the {kind}")  # or nobody could use it
    write_whole(path, json.dumps(tables, indent=1))
    if as_json:
        print_json({"file": str(path), **tables})
        return
    figures = tables["device"]
    products, memory = figures[f"achieved_{precision}"]["value"], figures["bandwidth_achieved"]["value"]
    optimizer = tables["host"]["optimizer_bandwidth"]["value"]
    click.echo(f"{figures['title']}: products {products}, memory {memory}, optimizer {optimizer}")
    click.echo(f"written: {path}; the fit is off by {tables['kernels_mean_error']:.0%} in the mean over the kernels")
