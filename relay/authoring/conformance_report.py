"""A conformance report that the author of a backend can publish: what passed, the known gaps, and a few figures.

Not here: the suite and the command that runs it. Invariant: a report of a part of the suite says so first, and the
figures were measured on the device in the run that the report is of.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch

from hal.device import HAL_VERSION, SIMULATED, Device, KernelCall
from hal.kit.program_builder import GraphBuilder, for_device, upload

TRANSFER = 2**24
"""Bytes of a timed transfer."""

SIZE = 512
"""Rows and columns of the matrices of the timed product."""

REPEATS = 5


def figures_of(device: Device) -> dict[str, float]:
    """Measure a device, in about a second: medians of five.

    Returns:
        `write` and `read`: bytes a second between ordinary host memory and the device. `matrix_product`: fp32
        operations a second of one product of matrices of 512 rows and columns, which small kernels of few devices
        come near to. `launch`: seconds from submitting a kernel of one element to its end.
    """
    data = torch.zeros(TRANSFER, dtype=torch.uint8)
    queue = device.queue("compute")
    buffer, (view,) = upload(device, [data])
    seconds = {
        "write": _median(lambda: queue.write(view, data).wait()),
        "read": _median(lambda: queue.read(data, view).wait()),
    }
    buffer.free()
    return {
        **{name: TRANSFER / passed for name, passed in seconds.items()},
        "matrix_product": 2 * SIZE**3 / _product(device, SIZE),
        "launch": _product(device, 1),
    }


def report_of(device: Device, tests: Sequence[dict[str, Any]], limited_by: Sequence[str]) -> dict[str, Any]:
    """The report as one object.

    Args:
        device: the device that was tested, open.
        tests: each with `test`, `outcome`, `seconds` and `reason`, as the command's `--json` has them.
        limited_by: the options that left out a part of the suite.
    """
    counts = Counter(test["outcome"] for test in tests)
    files: dict[str, Counter[str]] = {}
    for test in tests:
        files.setdefault(test["test"].partition("::")[0], Counter())[test["outcome"]] += 1
    return {
        "device": device.info.name,
        "description": device.info.description,
        "conforms": not counts["failed"] and not limited_by,
        "whole": not limited_by,
        "left_out_by": list(limited_by),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": {
            "hal": ".".join(map(str, HAL_VERSION)),
            "layer-relay": version("layer-relay"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "counts": dict(counts),
        "files": {file: dict(outcomes) for file, outcomes in sorted(files.items())},
        "known_gaps": _by_reason(tests, "known gap"),
        "skipped": _by_reason(tests, "skipped"),
        "failed": [{"test": test["test"], "reason": test["reason"]} for test in tests if test["outcome"] == "failed"],
        "figures": {} if SIMULATED in device.info.tags else figures_of(device),
        "seconds": sum(test["seconds"] for test in tests),
    }


def as_markdown(report: dict[str, Any]) -> str:
    """The report as a page of Markdown."""
    counts, versions = report["counts"], report["versions"]
    verdict = "conforms" if report["conforms"] else "does not conform"
    if not report["whole"] and not report["failed"]:
        verdict = f"passes a part of the suite ({' and '.join(report['left_out_by'])} left out the rest)"
    lines = [
        f"# Conformance of `{report['device']}`",
        "",
        f"`{report['device']}` ({report['description']}) {verdict}: "
        + ", ".join(f"{counts.get(outcome, 0)} {outcome}" for outcome in ("passed", "failed", "known gap", "skipped"))
        + f". Run on {report['date']}, in {report['seconds']:.0f} s.",
        "",
        ", ".join(f"{name} {number}" for name, number in versions.items()) + ".",
        "",
        "| contract | passed | failed | known gap | skipped |",
        "| --- | --- | --- | --- | --- |",
    ]
    for file, outcomes in report["files"].items():
        cells = [str(outcomes.get(outcome, 0)) for outcome in ("passed", "failed", "known gap", "skipped")]
        lines.append(f"| {file.removeprefix('test_').removesuffix('.py')} | {' | '.join(cells)} |")
    for title, reasons in (("Known gaps", report["known_gaps"]), ("Skipped", report["skipped"])):
        if reasons:
            lines += ["", f"## {title}", ""] + [f"- {count} tests: {reason}" for reason, count in reasons.items()]
    if report["failed"]:
        lines += ["", "## Failed", ""]
        lines += [f"- `{test['test']}`: {_first_line(test['reason'])}" for test in report["failed"]]
    if report["figures"]:
        figures = report["figures"]
        lines += ["", "## Figures", "", "Measured in this run; medians of five.", ""]
        lines += [
            f"- host to device: {figures['write'] / 1e9:.2f} GB/s",
            f"- device to host: {figures['read'] / 1e9:.2f} GB/s",
            f"- fp32 product of {SIZE} x {SIZE} matrices: {figures['matrix_product'] / 1e9:.1f} GFLOP/s",
            f"- a kernel of one element, from submission to end: {figures['launch'] * 1e6:.0f} microseconds",
        ]
    return "\n".join(lines) + "\n"


def _by_reason(tests: Sequence[dict[str, Any]], outcome: str) -> dict[str, int]:
    return dict(Counter(test["reason"] for test in tests if test["outcome"] == outcome).most_common())


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


def _product(device: Device, size: int) -> float:
    """Seconds of one product of square matrices."""
    builder = GraphBuilder("timed product")
    left, right = builder.input((size, size)), builder.input((size, size))
    program = builder.program([builder.call("aten.mm.default", left, right)], accumulates=False)
    kernel = device.compile(for_device(program, device))
    matrix = torch.full((size, size), 0.5)
    buffer, views = upload(device, [matrix, matrix, matrix])
    queue = device.queue("compute")
    try:
        return _median(lambda: queue.run(KernelCall(kernel, views[:2], views[2:])).wait())
    finally:
        buffer.free()


def _median(measured: Callable[[], Any]) -> float:
    measured()  # the first call may compile, allocate or touch memory
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        measured()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
