"""Runs Python commands as a shell would, in processes forked from one that has imported PyTorch and nothing of ours.

To import PyTorch is most of what a short command costs, and the same every time. Each command still is a process of its
own, with its own arguments, folder, environment, standard streams and exit, and imports all of the project itself.
What a library reads from the environment as it is imported, it has read before: tests of that start processes of their
own, as do those of how a process starts or ends. Where processes cannot be forked safely, and for programs that are
not this Python's, it is `subprocess.run`.

Invariant: the process that is forked has one thread and has run no tensor.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
OURS = ("hal", "backends", "relay")


def run(
    words: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """A command's exit code and output, as `subprocess.run` gives them. Raises subprocess.TimeoutExpired."""
    python = as_python(words, environment)
    if python is None:
        return subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    with tempfile.TemporaryDirectory() as streams:
        files = [Path(streams) / name for name in ("out", "err")]
        request = {"words": python, "folder": str(folder), "environment": dict(environment)}
        code = _Parent.here().ask(request | {"streams": [str(file) for file in files]}, timeout)
        return subprocess.CompletedProcess(words, code, *(file.read_text(encoding="utf-8") for file in files))


def run_script(name: str, *arguments: str, timeout: float = 300) -> Any:
    """Run a script of this folder in a process of its own; what it prints, read as JSON. Fails where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run([sys.executable, str(Path(__file__).parent / name), *arguments], ROOT, environment, timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def as_python(words: Sequence[str], environment: Mapping[str, str]) -> list[str] | None:
    """What follows `python` in a command that is one of this Python's; None for any other."""
    if sys.platform != "linux":
        return None
    if words[0] == sys.executable:
        return list(words[1:]) if words[1] in ("-c", "-m") or not words[1].startswith("-") else None
    script = shutil.which(words[0], path=environment.get("PATH"))
    start = Path(script).read_bytes().splitlines()[0] if script is not None else b""
    beside = f"#!{Path(sys.executable).parent}{os.sep}python"  # python, python3, python3.11: one and the same
    return [str(script), *words[1:]] if start.startswith(beside.encode()) else None


class _Parent:
    """The process that is forked: one for each process that runs tests, started when it is first asked."""

    _started: _Parent | None = None

    @classmethod
    def here(cls) -> _Parent:
        """This process's."""
        if cls._started is None:
            cls._started = cls()
        return cls._started

    def __init__(self) -> None:
        without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # In a session of its own, so that a command can be ended with all that it started. It ends with its input.
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=without, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        atexit.register(self.close)

    def close(self) -> None:
        """Let it end."""
        self._process.communicate()

    def ask(self, request: Mapping[str, Any], timeout: float) -> int:
        """Run one command; its exit code, negative for a signal."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            _Parent._started = None
            os.killpg(self._process.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(request["words"], timeout)
        return int(self._process.stdout.readline())


# **** in the process that is forked, and in its children ****


def serve() -> dict[str, Any]:
    """Fork a child for each request that comes in, one after another. Returns in the children, with the request."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            answers.close()
            request: dict[str, Any] = json.loads(line)
            return request
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    raise SystemExit


def become(request: Mapping[str, Any]) -> None:
    """Be the process that the command would have started, and run it."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, file in enumerate(request["streams"], 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the process lives
    first, *rest = request["words"]
    searched = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    sys.path[:1] = ["" if first in ("-c", "-m") else str(Path(first).parent), *searched]
    if first == "-c":
        code, *arguments = rest
        sys.argv = ["-c", *arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), main.__dict__)
    elif first == "-m":
        module, *arguments = rest
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    import torch._functorch.aot_autograd  # noqa: F401 - for the children, as is all that it imports

    assert not set(OURS) & set(sys.modules)
    gc.collect()
    gc.freeze()  # or each child would go through all of these objects again as it ends
    become(serve())
