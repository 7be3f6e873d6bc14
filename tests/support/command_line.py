"""Running a command of Relay, or a script of the repository, within the test's own process."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
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


def load_script(path: Path) -> ModuleType:
    """A script that is in no package (of docs/, examples/ or benchmarks/), as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
