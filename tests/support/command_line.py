"""Running a command of Relay within the test's own process, and reading what it printed."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from relay.cli import main


def relay(*arguments: object) -> Result:
    """The command with these words; what it raises besides its exit is raised here."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def only_object(result: Result) -> dict[str, Any]:
    """Standard output must be one JSON object and nothing else."""
    answer = json.loads(result.stdout)
    assert isinstance(answer, dict)
    return answer
