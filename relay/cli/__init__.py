"""The command line: `relay devices | train | sample | simulate | plan | calibrate | inspect | export | conformance`.

This file puts the commands together and holds the small ones. It is not the place of any training logic, and
imports neither torch nor a device until a command runs, so that `--help` is quick. How commands answer and
fail is in `relay.cli.console`.
"""

import click

from hal.spec.units import format_size
from relay.cli.calibrate import calibrate
from relay.cli.checkpoint import export, inspect
from relay.cli.conformance import conformance
from relay.cli.console import Commands, json_option, print_json
from relay.cli.plan import plan
from relay.cli.sample import sample
from relay.cli.simulate import simulate
from relay.cli.train import train


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="layer-relay", prog_name="relay")
def main() -> None:
    """Train networks far larger than an accelerator's memory, by relaying their layers through it.

    \b
    Start here:
      relay devices      which devices there are here, and why others are not
      relay train        train a small GPT on text that is on every machine
      relay sample       let the trained model write
      relay inspect      show what is in a checkpoint, and whether it is whole
      relay simulate     what a run would need and cost on hardware that is not here
      relay plan         how to run it there, for the most tokens a second that fit
      relay calibrate    measure a device here, for the simulator
      relay conformance  hold a device to what it promises
    """


@main.command()
@json_option
def devices(as_json: bool) -> None:
    """List the devices: here (✓), simulated (~) or not here (✗) and why, and what their self-test says.

    \b
    Examples:
      relay devices
      relay devices --json
    """
    import relay
    from hal.device import SIMULATED

    found = relay.devices()
    if as_json:
        fields = ("name", "available", "reason", "description", "memory_bytes")
        rows = [{field: getattr(device, field) for field in fields} for device in found]
        for row, device in zip(rows, found, strict=True):
            row["simulated"] = SIMULATED in device.tags
            row["self_test"] = "passed" if device.available else "not run, or failed: see reason"
            row["notes"] = list(device.notes)
        print_json({"devices": rows})
        return
    width = max([len(device.name) for device in found], default=0)
    for device in found:
        memory = "" if device.memory_bytes is None else f", {format_size(device.memory_bytes)}"
        here = f"{device.description}{memory}; self-test passed"
        text = here if device.available else f"not here: {device.reason}"
        mark = "✗" if not device.available else "~" if SIMULATED in device.tags else "✓"
        click.echo(f"{mark} {device.name:<{width}}  {text}")
        for note in device.notes:
            click.echo(f"  {'':<{width}}  {note}")


main.add_command(train)
main.add_command(sample)
main.add_command(inspect)
main.add_command(export)
main.add_command(simulate)
main.add_command(plan)
main.add_command(calibrate)
main.add_command(conformance)
