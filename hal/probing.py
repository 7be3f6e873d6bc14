"""Loading and probing the backends of this machine, each apart from the others.

A backend of this distribution is probed in a thread, which is abandoned at its timeout. A third party's backend is
probed in a process of its own (this module, run with `-m`), since it may crash, exit or hang. Not here: finding and
opening backends (`hal.registry`), and the self-test of a device (`hal.kit.self_test`).

Invariant: each backend gives at least one `Probe`, whatever its code does, and the other backends are not affected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from hal.device import HAL_VERSION, Backend, Probe
from hal.errors import HalError

GROUP = "relay.backends"
"""The entry points under which backends register."""

TIMEOUT = 60.0  # seconds; a cold OpenCL driver on a loaded machine compiles its first kernel in ten to twenty

Load = Callable[[], Backend]


def load(point: EntryPoint) -> Backend:
    """The backend behind an entry point.

    Raises:
        HalError: it is no backend, or was written for another version of the HAL. Importing it may raise anything.
    """
    backend = point.load()()
    if not isinstance(backend, Backend):
        raise HalError(f"entry point {point.name!r} gives a {type(backend).__name__}, not a hal.device.Backend")
    if backend.hal_version[0] != HAL_VERSION[0] or backend.hal_version > HAL_VERSION:
        wanted, present = (".".join(map(str, version)) for version in (backend.hal_version, HAL_VERSION))
        raise HalError(f"it was written for version {wanted} of the HAL; the one installed here has version {present}")
    return backend


def probe_here(name: str, load: Load, timeout: float) -> list[Probe]:
    """Probe a backend in a thread of this process.

    Args:
        name: the backend's name, which a failure is reported under.
        load: gives the backend; what it raises is the reason why there is none.
        timeout: seconds after which the thread is abandoned.
    """
    answers: list[list[Probe]] = []
    thread = threading.Thread(
        target=lambda: answers.append(_probe(name, load)), name=f"relay probe {name}", daemon=True
    )
    thread.start()
    thread.join(timeout)
    return answers[0] if answers else [_no_answer(name, timeout)]


class ProbeProcess:
    """The probe of a backend in a process of its own.

    Args:
        name: the backend's name.
        target: where the backend's class is, as an entry point names it: `package.module:Class`.
        timeout: seconds after which the process is killed.
    """

    def __init__(self, name: str, target: str, timeout: float) -> None:
        self.name = name
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._folder = tempfile.TemporaryDirectory(prefix="relay-probe-")
        self._answer = Path(self._folder.name) / "probes.json"  # what the backend prints cannot get into a file
        self._log = (Path(self._folder.name) / "log").open("w+b")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hal.probing", name, target, str(self._answer)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
        )

    def answer(self) -> list[Probe]:
        """The probes, as soon as the process has ended or its time is over."""
        try:
            code = self._process.wait(max(self._deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            return [_no_answer(self.name, self._timeout)]
        else:
            return self._read(code)
        finally:
            self.close()

    def _read(self, code: int) -> list[Probe]:
        try:
            rows: list[dict[str, Any]] = json.loads(self._answer.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            ended = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
            last = f"; its last line of output: {lines[-1]}" if lines else ""
            return [Probe(self.name, False, f"the process that probed it ended with {ended}{last}")]
        return [Probe(**{**row, "tags": frozenset(row["tags"]), "notes": tuple(row["notes"])}) for row in rows]

    def close(self) -> None:
        """End the process, and delete its files."""
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._folder.cleanup()


def probe_all(here: dict[str, Load], elsewhere: dict[str, str], timeout: float) -> Iterator[list[Probe]]:
    """Probe backends, and give each one's probes as it answers.

    Args:
        here: backends that are probed in this process, one after the other, by name.
        elsewhere: third parties' backends by name, and where their classes are. Their processes run meanwhile.
        timeout: seconds for each backend.
    """
    processes = [ProbeProcess(name, target, timeout) for name, target in elsewhere.items()]
    try:
        for name, load in here.items():
            yield probe_here(name, load, timeout)
        for process in processes:
            yield process.answer()
    finally:
        for process in processes:
            process.close()


def _probe(name: str, load: Load) -> list[Probe]:
    """The probes of a backend, checked: any code may be behind it."""
    try:
        backend = load()
    except BaseException as failure:  # SystemExit too: a package may leave the process while it is imported
        return [Probe(name, False, f"its package does not load: {type(failure).__name__}: {failure}")]
    try:
        probes = backend.probe()
    except BaseException as failure:  # contract 10 forbids it; a third party's backend may break it
        return [Probe(name, False, f"its probe raised {type(failure).__name__}: {failure}")]
    if not isinstance(probes, (list, tuple)) or not all(isinstance(probe, Probe) for probe in probes):
        return [Probe(name, False, f"its probe returned {probes!r}; it must return a list of hal.device.Probe")]
    if not probes:
        return [Probe(name, False, "its probe returned no device and no reason")]
    foreign = [probe.name for probe in probes if str(probe.name).partition(":")[0] != name]
    if foreign:
        return [Probe(name, False, f"its probe names {foreign[0]!r}, a device of another backend")]
    return list(probes)


def _no_answer(name: str, timeout: float) -> Probe:
    return Probe(name, False, f"its probe did not answer within {timeout:g} seconds")


def _main(name: str, target: str, path: str) -> None:
    """Probe one backend in this process, and write what came of it."""
    probes = _probe(name, lambda: load(EntryPoint(name, target, GROUP)))
    rows = [{**asdict(probe), "tags": sorted(probe.tags), "notes": list(probe.notes)} for probe in probes]
    Path(path).write_text(json.dumps(rows), encoding="utf-8")
    os._exit(0)  # a driver's threads or exit handlers may hang; everything is written


if __name__ == "__main__":
    _main(*sys.argv[1:])
