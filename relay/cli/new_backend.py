"""The command `relay new-backend`: write a package for an accelerator, install it, and say what comes next.

The writing is in `relay.authoring.new_backend`. Invariant: what was written stays when the installation fails, and the
message then holds the command to repeat.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import click

from relay.cli.console import json_option, print_json
from relay.errors import RelayError


class NotInstalled(RelayError):
    """The package was written and pip could not install it."""


@click.command("new-backend")
@click.argument("name")
@click.option(
    "--into",
    default=".",
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder that the package's own folder is made in.",
)
@click.option("--install/--no-install", default=True, show_default=True, help="Install it for development (pip -e).")
@json_option
def new_backend(name: str, into: Path, install: bool, as_json: bool) -> None:
    """Write a package that makes an accelerator a device of Relay, called NAME.

    The package works as it is: its driver is a simulated chip, and `relay conformance NAME` passes. Put your own driver
    in its place, a call at a time; GUIDE.md in the folder shows how.

    \b
    Examples:
      relay new-backend mychip
      relay new-backend mychip --into ~/src --no-install
      relay conformance mychip
    """
    from hal import registry
    from relay.authoring.new_backend import write_backend

    usable, broken = registry.backends()
    folder = write_backend(name, into, frozenset(usable) | frozenset(broken))
    if install:
        _install(folder)
    files = sorted(
        str(file.relative_to(folder)) for file in folder.rglob("*") if file.suffix in (".py", ".md", ".toml")
    )
    if as_json:
        print_json({"folder": str(folder), "device": name, "installed": install, "files": files})
        return
    click.echo(f"written: {folder}")
    steps = [] if install else [f"pip install --no-deps -e {shlex.quote(str(folder))}"]
    steps += [f"relay conformance {name}", f"relay train --device {name} --layers 2 --hidden 32 --seq 32 --steps 5"]
    click.echo("next:\n" + "\n".join(f"  {step}" for step in steps))
    click.echo(f"then: replace {folder / f'{name}_backend' / 'chip.py'} by your driver, as {folder / 'GUIDE.md'} shows")


def _install(folder: Path) -> None:
    """Install the package for development, without its dependencies: Relay is here."""
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    # First with the setuptools that is here, which needs no network; an old or missing one is then downloaded.
    for isolation in (["--no-build-isolation"], []):
        done = subprocess.run([*words, *isolation, "--editable", str(folder)], capture_output=True, text=True)
        if done.returncode == 0:
            return
    said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
    raise NotInstalled(
        f"{folder} is written, but pip could not install it. Install it yourself: pip install --no-deps -e "
        f"{shlex.quote(str(folder))}. The end of what pip printed:\n{said}"
    )
