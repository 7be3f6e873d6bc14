"""The command `relay conformance`: run the conformance suite on a device, and report passes, failures and known gaps.

pytest runs the suite, without the configuration of the project in the current folder. The tests are in
`hal.conformance` and `relay.conformance`. The exit code is 0 where every test passed or is a known gap; 1 where a test
failed or the device cannot be opened; 2 for an empty device name or a pattern that matches no test.
"""

import contextlib
import importlib.util
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from relay.cli.console import json_option, print_json
from relay.errors import RelayError


class CannotRun(RelayError):
    """The suite cannot run in this environment."""


OUTCOMES = ("passed", "failed", "known gap", "skipped")


class Tally:
    """The outcome of each test, as pytest reports it."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called by pytest for each of the three phases of a test."""
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
        """Called by pytest for each collected file: one that does not load counts as a failure."""
        if report.failed:
            reason = str(report.longrepr)
            self.tests[report.nodeid] = {"test": report.nodeid, "outcome": "failed", "seconds": 0.0, "reason": reason}

    def with_outcome(self, outcome: str) -> list[dict[str, Any]]:
        """The tests with that outcome."""
        return [test for test in self.tests.values() if test["outcome"] == outcome]


@click.command()
@click.argument("device")
@click.option("--only", metavar="WORDS", help="Run only the tests whose file or name matches, as with pytest -k.")
@click.option("--verify-known-gaps", is_flag=True, help="Run the known gaps too, and fail where one of them passes.")
@click.option("--samples", type=click.IntRange(min=1), help="Test at most this many shapes of each op in each dtype.")
@click.option(
    "--report",
    "reports",
    multiple=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a report to publish: FILE.md or FILE.json, with versions, known gaps and figures. May be repeated.",
)
@json_option
def conformance(
    device: str,
    only: str | None,
    verify_known_gaps: bool,
    samples: int | None,
    reports: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Test whether DEVICE keeps the contracts of a backend: memory, order, errors, every op, randomness, and training.

    A device conforms when the whole suite passes. With --only or --samples a part of the suite is run.

    \b
    Examples:
      relay conformance cpu
      relay conformance numpy --only test_ops
      relay conformance opencl:0 --samples 1 --json
      relay conformance mychip --verify-known-gaps
      relay conformance mychip --report mychip.md --report mychip.json
    """
    for file in reports:
        if file.suffix not in (".md", ".json") or not file.parent.is_dir():
            raise click.UsageError(f"--report {file}: expected a name in .md or .json, in a folder that exists.")
    if importlib.util.find_spec("pytest") is None:
        raise CannotRun("The suite runs under pytest, which is not installed: pip install 'layer-relay[conformance]'.")
    if not device.strip():
        raise click.UsageError("The suite needs a device. `relay devices` lists the names.")
    from hal import registry

    registry.open(device).close()  # one error message, instead of hundreds of failing tests
    tally = run(device, only, verify_known_gaps, sys.stderr if as_json else sys.stdout, samples)
    if not tally.tests:
        raise click.UsageError(f"No test has {only!r} in its file or name.")
    counts = Counter(test["outcome"] for test in tally.tests.values())
    passed = counts["failed"] == 0
    limited_by = [option for option, given in (("--only", only), ("--samples", samples)) if given]
    _write_reports(reports, device, tally, limited_by)
    if as_json:
        answer: dict[str, Any] = {"device": device, "conforms": passed, "whole": not (only or samples)}
        answer |= {outcome.replace(" ", "_"): counts[outcome] for outcome in OUTCOMES}
        print_json(answer | {"tests": list(tally.tests.values())})
    else:
        _print_result(device, tally, counts, limited_by)
    if not passed:
        raise SystemExit(1)


def run(device: str, only: str | None, verify_known_gaps: bool, output: Any, samples: int | None = None) -> Tally:
    """Run the suite in this process. pytest's output goes to `output`; `samples` limits the shapes of each op."""
    import pytest

    import hal.conformance
    import relay.conformance

    folders = [str(Path(package.__file__ or "").parent) for package in (hal.conformance, relay.conformance)]
    arguments = [*folders, "--device", device, "-q", "--no-header", "--tb=short", "--no-summary"]
    # Without the configuration, the plugins and the cache of the project in the current folder.
    arguments += ["-c", os.devnull, "--rootdir", str(Path(folders[0]).parent.parent), "-p", "no:cacheprovider"]
    arguments += ["-p", "hal.conformance.plugin", "-p", "no:xdist", "-p", "no:hypothesispytest"]
    arguments += ["-k", only] if only else []
    arguments += ["--verify-known-gaps"] if verify_known_gaps else []
    arguments += ["--samples", str(samples)] if samples else []
    tally = Tally()
    with contextlib.redirect_stdout(output):
        code = pytest.main(arguments, plugins=[tally])
    if code == pytest.ExitCode.USAGE_ERROR:
        raise CannotRun("The suite could not start; pytest's message is above.")
    return tally


def _write_reports(files: Sequence[Path], device: str, tally: Tally, limited_by: list[str]) -> None:
    if not files:
        return
    from hal import registry
    from relay.authoring.conformance_report import as_markdown, report_of
    from relay.checkpoint.atomic_file import write_whole

    opened = registry.open(device)
    try:
        report = report_of(opened, list(tally.tests.values()), limited_by)
    finally:
        opened.close()
    for file in files:
        write_whole(file, as_markdown(report) if file.suffix == ".md" else json.dumps(report, indent=1))


def _print_result(device: str, tally: Tally, counts: Counter[str], limited_by: list[str]) -> None:
    for test in tally.with_outcome("failed"):
        click.echo(f"✗ {test['test']}\n  {test['reason'].splitlines()[0] if test['reason'] else ''}")
    reasons: Counter[str] = Counter()
    for outcome in ("known gap", "skipped"):
        reasons.update(f"{outcome}: {test['reason']}" for test in tally.with_outcome(outcome))
    for reason, count in reasons.most_common():
        click.echo(f"- {count} {reason}")
    verdict = "conforms" if counts["failed"] == 0 else "does not conform"
    figures = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    if not limited_by:
        click.echo(f"{device} {verdict}: {figures}.")
        return
    if counts["failed"] == 0:
        verdict = "passes the part of the suite that was run"
    click.echo(f"{device} {verdict}: {figures}. {' and '.join(limited_by)} left out the rest.")
