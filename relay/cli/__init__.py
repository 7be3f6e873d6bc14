"""The command line: options, text and exit codes of every `relay` command. This file assembles them.

Not here: the work of a command, which any script can do through the package `relay`; output and errors common to all
commands are in `relay.cli.console`. Imported by `relay/__main__` and the entry point `relay` only.
Invariant: torch is not imported until a command runs, so that `--help` is quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hal.spec.units import format_size
from relay.cli.calibrate import calibrate
from relay.cli.checkpoint import export, inspect
from relay.cli.conformance import conformance
from relay.cli.console import Commands, json_option, print_json
from relay.cli.finetune import finetune
from relay.cli.generate import generate
from relay.cli.new_backend import new_backend
from relay.cli.sample import sample
from relay.cli.simulation.plan import plan
from relay.cli.simulation.simulate import simulate
from relay.cli.simulation.sweep import sweep
from relay.cli.train import train

if TYPE_CHECKING:
    from hal.device import Probe


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="layer-relay", prog_name="relay")
def main() -> None:
    """Train networks far larger than an accelerator's memory, by relaying their layers through it.

    \b
    Start here:
      relay devices      list the devices of this machine, and why others cannot be used
      relay train        train a small GPT on text that every machine has
      relay finetune     tune a Hugging Face model on a file of yours
      relay generate     print text that such a model writes, through the relay
      relay sample       print text that the trained model writes
      relay inspect      show the contents of a checkpoint and verify it
      relay export       write the model in a checkpoint as safetensors or ONNX
      relay simulate     predict memory, speed and energy on hardware that you do not have
      relay plan         choose the fastest options that fit on that hardware
      relay sweep        simulate many settings, as a table and heat maps
      relay calibrate    measure a device of this machine for the simulator
      relay conformance  test whether a device keeps the contracts of a backend
      relay new-backend  write a package for an accelerator of your own
    """


@main.command()
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds after which a backend that does not answer is given up.",
)
@json_option
def devices(timeout: float, as_json: bool) -> None:
    """List the devices: usable (✓), simulated (~) or unusable (✗), with the reason.

    Every usable device has passed a self-test: it was opened, multiplied matrices and drew random numbers, and the
    results were read back. Each backend is printed as it answers; one that fails or hangs does not keep the others.

    \b
    Examples:
      relay devices
      relay devices --json
    """
    from hal import registry

    if as_json:
        print_json({"devices": [_describe(device) for device in registry.devices(timeout)]})
        return
    for probes in registry.probe_each(timeout):
        for device in probes:
            _print_device(device)


def _describe(device: Probe) -> dict[str, Any]:
    from hal.device import SIMULATED

    fields = ("name", "available", "reason", "description", "memory_bytes")
    return {
        **{field: getattr(device, field) for field in fields},
        "simulated": SIMULATED in device.tags,
        "self_test": "passed" if device.available else "not run, or failed: see reason",
        "notes": list(device.notes),
    }


def _print_device(device: Probe) -> None:
    from hal.device import SIMULATED

    width = len("numpy:float64")
    memory = "" if device.memory_bytes is None else f", {format_size(device.memory_bytes)}"
    usable = f"{device.description}{memory}; self-test passed"
    text = usable if device.available else f"not usable: {device.reason}"
    mark = "✗" if not device.available else "~" if SIMULATED in device.tags else "✓"
    click.echo(f"{mark} {device.name:<{width}}  {text}")
    for note in device.notes:
        click.echo(f"  {'':<{width}}  {note}")


main.add_command(train)
main.add_command(finetune)
main.add_command(generate)
main.add_command(sample)
main.add_command(inspect)
main.add_command(export)
main.add_command(simulate)
main.add_command(plan)
main.add_command(sweep)
main.add_command(calibrate)
main.add_command(conformance)
main.add_command(new_backend)
