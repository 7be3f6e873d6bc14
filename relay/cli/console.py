"""What every command shares: how it answers, how it fails, and the option types.

It is not the place of any command. Invariants: with `--json` standard output carries exactly one object, and
everything else goes to standard error; the exit code is 0, 1 (asked rightly, but it could not) or 2 (asked
wrongly); an expected failure is one message, never a traceback.
"""

import atexit
import gc
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

import click

from hal.errors import HalError
from hal.spec.units import parse_size
from relay.errors import RelayError

# What a user can bring about. Anything else is a fault of the program and keeps its traceback.
EXPECTED_FAILURES = (HalError, RelayError, OSError)


class Size(click.ParamType):
    """Bytes, written as `256MB` (256 * 10**6), `256MiB` (256 * 2**20) or a plain number."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        try:
            return parse_size(value)
        except ValueError as wrong:
            self.fail(str(wrong), param, context)


class CouldNot(click.ClickException):
    """An expected failure on its way out: one message for the user, exit code 1."""

    exit_code = 1

    def __init__(self, cause: BaseException) -> None:
        super().__init__(_sentence(cause) if isinstance(cause, OSError) else str(cause))

    def show(self, file: Any = None) -> None:
        click.echo(f"relay: {self.message}", file=file, err=True)


class RunStopped(Exception):
    """A run that Ctrl-C or SIGTERM ended, with a message that says what of it is saved and how to go on."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Commands(click.Group):
    """A group that turns failures into one clear message and, with `--json`, into one object."""

    def main(self, args: Sequence[str] | None = None, *positional: Any, **settings: Any) -> Any:
        if args is None:  # as a process of its own, which at its end would go through all of PyTorch's objects again
            atexit.register(gc.freeze)
        # Read here, because a command asked wrongly never gets as far as its own --json.
        arguments = list(sys.argv[1:] if args is None else args)
        return super().main(arguments, *positional, obj={"json": "--json" in arguments}, **settings)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except click.ClickException as wrong:
            self._answer(context, wrong.format_message(), type(wrong).__name__)
            raise
        except (KeyboardInterrupt, RunStopped) as interrupt:
            stopped = CouldNot(interrupt if isinstance(interrupt, RunStopped) else RuntimeError("interrupted"))
            stopped.exit_code = getattr(interrupt, "exit_code", stopped.exit_code)
            self._answer(context, stopped.message, "Interrupted")
            raise stopped from interrupt
        except BrokenPipeError:
            raise  # whoever read our output has gone; click ends quietly
        except EXPECTED_FAILURES as failure:
            could_not = CouldNot(failure)
            self._answer(context, could_not.message, type(failure).__name__)
            raise could_not from failure

    @staticmethod
    def _answer(context: click.Context, message: str, kind: str) -> None:
        if context.obj["json"]:
            print_json({"error": message, "type": kind})


def print_json(answer: dict[str, Any]) -> None:
    """The one object of `--json`. NaN and infinity become null: JSON has neither."""
    click.echo(json.dumps(_finite(answer), allow_nan=False))


def json_option(command: Any) -> Any:
    """The `--json` flag, the same on every command."""
    text = "Print exactly one JSON object on standard output."
    return click.option("--json", "as_json", is_flag=True, help=text)(command)


def _sentence(error: OSError) -> str:
    """What the system said, and about which file."""
    return f"{error.strerror}: '{error.filename}'" if error.filename and error.strerror else str(error)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
