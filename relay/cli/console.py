"""Output, errors and exit codes of every command, and the option types that they share.

No command is defined here. Invariants: with `--json` standard output is exactly one JSON object, and everything else
goes to standard error; the exit code is 0, 1 (the command could not do its work) or 2 (wrong usage); an expected error
is one message without a traceback.
"""

import atexit
import gc
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from hal.errors import HalError
from hal.spec.units import parse_size
from relay.errors import RelayError

# Errors that a user can cause. Any other exception is a fault of the program and keeps its traceback.
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
    """An expected error: one message for the user, exit code 1."""

    def __init__(self, cause: BaseException, exit_code: int = 1) -> None:
        self.exit_code = exit_code  # type: ignore[misc]  # a class variable in click, and set for one failure here
        super().__init__(_sentence(cause) if isinstance(cause, OSError) else str(cause))

    def show(self, file: Any = None) -> None:
        click.echo(f"relay: {self.message}", file=file, err=True)


class RunStopped(Exception):
    """A run ended by Ctrl-C or SIGTERM. The message names what is saved and how to continue."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


SIMULATING = ("plan", "simulate", "sweep")
"""Commands that make and drop small objects by the hundred thousand, and hold no tensors: to look for cycles among them
as often as Python does by itself would take a quarter of their time."""


class Commands(click.Group):
    """A group of commands that turns errors into one message and, with `--json`, into one object."""

    def main(self, args: Sequence[str] | None = None, *positional: Any, **settings: Any) -> Any:
        if args is None:
            # In a process of its own: at its end the collector would visit all objects of PyTorch once more, which
            # takes 0.6 of the 3.4 processor seconds of a short command.
            atexit.register(gc.freeze)
            if sys.argv[1:2] and sys.argv[1] in SIMULATING:
                gc.set_threshold(100_000, 20, 100)
        # Read here, because wrong usage is found before a command's own --json is parsed.
        arguments = list(sys.argv[1:] if args is None else args)
        return super().main(arguments, *positional, obj={"json": "--json" in arguments}, **settings)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except click.ClickException as wrong:
            self._answer(context, wrong.format_message(), type(wrong).__name__)
            raise
        except (KeyboardInterrupt, RunStopped) as interrupt:
            if is_further_rank():
                raise click.exceptions.Exit(getattr(interrupt, "exit_code", 1)) from interrupt
            cause = interrupt if isinstance(interrupt, RunStopped) else RuntimeError("interrupted")
            stopped = CouldNot(cause, getattr(interrupt, "exit_code", 1))
            self._answer(context, stopped.message, "Interrupted")
            raise stopped from interrupt
        except BrokenPipeError:
            raise  # the reader of our output has ended; click exits quietly
        except EXPECTED_FAILURES as failure:
            could_not = CouldNot(failure)
            self._answer(context, could_not.message, type(failure).__name__)
            raise could_not from failure

    @staticmethod
    def _answer(context: click.Context, message: str, kind: str) -> None:
        if context.obj["json"]:
            print_json({"error": message, "type": kind})


def is_further_rank() -> bool:
    """Whether torchrun has started this process as one of several, and not as the first, which reports for all."""
    return os.environ.get("WORLD_SIZE", "1") != "1" and os.environ.get("RANK", "0") != "0"


def print_json(answer: dict[str, Any]) -> None:
    """Print the object of `--json`. NaN and infinity become null, since JSON has neither."""
    click.echo(json.dumps(_finite(answer), allow_nan=False))


def json_option(command: Any) -> Any:
    """The flag `--json`, which every command has."""
    text = "Print exactly one JSON object on standard output."
    return click.option("--json", "as_json", is_flag=True, help=text)(command)


def _sentence(error: OSError) -> str:
    """The system's message with the name of the file."""
    return f"{error.strerror}: '{error.filename}'" if error.filename and error.strerror else str(error)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
