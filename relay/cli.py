"""The command line: `relay devices | train | sample`.

This file puts the commands together and holds the small ones. It is not the place of any training logic, and
imports neither torch nor a device until a command runs, so that `--help` is quick. How commands answer and
fail is in `relay.console`.
"""

import click

from hal.memory import format_size
from relay.console import Commands, json_option, print_json
from relay.sample import sample
from relay.train_command import train


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="layer-relay", prog_name="relay")
def main() -> None:
    """Train networks far larger than an accelerator's memory, by relaying their layers through it.

    \b
    Start here:
      relay devices      which devices there are here, and why others are not
      relay train        train a small GPT on text that is on every machine
      relay sample       let the trained model write
    """


@main.command()
@json_option
def devices(as_json: bool) -> None:
    """List the devices: here or not, why not, and what their self-test says.

    \b
    Examples:
      relay devices
      relay devices --json
    """
    import relay

    found = relay.devices()
    if as_json:
        fields = ("name", "available", "reason", "description", "memory_bytes")
        rows = [{field: getattr(device, field) for field in fields} for device in found]
        for row, device in zip(rows, found, strict=True):
            row["self_test"] = "passed" if device.available else "not run, or failed: see reason"
            row["notes"] = list(device.notes)
        print_json({"devices": rows})
        return
    width = max([len(device.name) for device in found], default=0)
    for device in found:
        memory = "" if device.memory_bytes is None else f", {format_size(device.memory_bytes)}"
        here = f"{device.description}{memory}; self-test passed"
        text = here if device.available else f"not here: {device.reason}"
        click.echo(f"{'✓' if device.available else '✗'} {device.name:<{width}}  {text}")
        for note in device.notes:
            click.echo(f"  {'':<{width}}  {note}")


main.add_command(train)
main.add_command(sample)
