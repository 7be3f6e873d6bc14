"""`relay conformance`: run the suite on a device, and say what it passes, what it does not, and what it need not.

pytest runs it, away from the configuration of whatever project it is called in. The answer's exit code is 0 where every
test passed or is a known gap, else 1; a device that cannot be opened is 1, a device string or pattern that asks for
nothing is 2.
"""

import contextlib
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click

from relay.cli.console import json_option, print_json
from relay.errors import RelayError


class CannotRun(RelayError):
    """The suite itself cannot run here."""


OUTCOMES = ("passed", "failed", "known gap", "skipped")


class Tally:
    """What became of each test, as pytest reports it."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One of a test's three phases."""
        name = report.nodeid.rpartition("/")[2]
        known_gap = hasattr(report, "wasxfail")
        outcome = "known gap" if known_gap and report.outcome == "skipped" else report.outcome
        known = self.tests.setdefault(name, {"test": name, "outcome": "passed", "seconds": 0.0, "reason": ""})
        known["seconds"] += report.duration
        if outcome == "passed":
            return
        known["outcome"] = outcome
        if known_gap:
            known["reason"] = report.wasxfail.removeprefix("reason: ").removeprefix("[NOTRUN] ")
        elif outcome == "skipped":
            known["reason"] = str(report.longrepr[2]).removeprefix("Skipped: ")
        else:
            known["reason"] = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))

    def pytest_collectreport(self, report: Any) -> None:
        """A file of tests that does not load is a failure too."""
        if report.failed:
            reason = str(report.longrepr)
            self.tests[report.nodeid] = {"test": report.nodeid, "outcome": "failed", "seconds": 0.0, "reason": reason}

    def with_outcome(self, outcome: str) -> list[dict[str, Any]]:
        """The tests of that outcome."""
        return [test for test in self.tests.values() if test["outcome"] == outcome]


@click.command()
@click.argument("device")
@click.option("--only", metavar="WORDS", help="Run only the tests whose file or name has these words (as pytest -k).")
@click.option("--verify-known-gaps", is_flag=True, help="Run the known gaps too, and fail where one of them passes.")
@click.option("--samples", type=click.IntRange(min=1), help="Try at most so many shapes of each op in each dtype.")
@json_option
def conformance(device: str, only: str | None, verify_known_gaps: bool, samples: int | None, as_json: bool) -> None:
    """Hold DEVICE to what every backend promises: memory, order, errors, every op, randomness, and training.

    It conforms when all of it passes; a part of it says only that the part does.

    \b
    Examples:
      relay conformance cpu
      relay conformance numpy --only test_ops
      relay conformance opencl:0 --samples 1 --json
      relay conformance mychip --verify-known-gaps
    """
    if importlib.util.find_spec("pytest") is None:
        raise CannotRun("The suite runs under pytest, which is not installed: pip install 'layer-relay[conformance]'.")
    if not device.strip():
        raise click.UsageError("The suite needs a device. `relay devices` lists the names.")
    from hal import registry

    registry.open(device).close()  # an error in words, before hundreds of tests fail with it
    tally = run(device, only, verify_known_gaps, sys.stderr if as_json else sys.stdout, samples)
    if not tally.tests:
        raise click.UsageError(f"No test has {only!r} in its file or name.")
    counts = Counter(test["outcome"] for test in tally.tests.values())
    passed = counts["failed"] == 0
    if as_json:
        answer: dict[str, Any] = {"device": device, "conforms": passed, "whole": not (only or samples)}
        answer |= {outcome.replace(" ", "_"): counts[outcome] for outcome in OUTCOMES}
        print_json(answer | {"tests": list(tally.tests.values())})
    else:
        _tell(device, tally, counts, [option for option, given in (("--only", only), ("--samples", samples)) if given])
    if not passed:
        raise SystemExit(1)


def run(device: str, only: str | None, verify_known_gaps: bool, output: Any, samples: int | None = None) -> Tally:
    """Run the suite in this process, its own output going to `output`, with all samples of each op or so many."""
    import pytest

    import hal.conformance
    import relay.conformance

    folders = [str(Path(package.__file__ or "").parent) for package in (hal.conformance, relay.conformance)]
    arguments = [*folders, "--device", device, "-q", "--no-header", "--tb=short", "--no-summary"]
    # Nothing of the project that it is run in: no configuration, no plugins of its environment, no cache.
    arguments += ["-c", os.devnull, "--rootdir", str(Path(folders[0]).parent.parent), "-p", "no:cacheprovider"]
    arguments += ["-p", "hal.conformance.plugin", "-p", "no:xdist"]
    arguments += ["-k", only] if only else []
    arguments += ["--verify-known-gaps"] if verify_known_gaps else []
    arguments += ["--samples", str(samples)] if samples else []
    tally = Tally()
    with contextlib.redirect_stdout(output):
        code = pytest.main(arguments, plugins=[tally])
    if code == pytest.ExitCode.USAGE_ERROR:
        raise CannotRun("The suite could not start; pytest's message is above.")
    return tally


def _tell(device: str, tally: Tally, counts: Counter[str], left_out_by: list[str]) -> None:
    for test in tally.with_outcome("failed"):
        click.echo(f"✗ {test['test']}\n  {test['reason'].splitlines()[0] if test['reason'] else ''}")
    reasons: Counter[str] = Counter()
    for outcome in ("known gap", "skipped"):
        reasons.update(f"{outcome}: {test['reason']}" for test in tally.with_outcome(outcome))
    for reason, count in reasons.most_common():
        click.echo(f"- {count} {reason}")
    verdict = "conforms" if counts["failed"] == 0 else "does not conform"
    figures = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    if not left_out_by:
        click.echo(f"{device} {verdict}: {figures}.")
        return
    if counts["failed"] == 0:
        verdict = "passes what was run of the suite"
    click.echo(f"{device} {verdict}: {figures}. {' and '.join(left_out_by)} left the rest out.")
