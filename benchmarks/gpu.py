"""Everything a GPU can show, in one script of under five minutes: right first, then how fast.

Each section (`benchmarks/gpu_sections.py`) runs in a process of its own with a budget of seconds, so that one that
fails, hangs or breaks the device takes none of the others with it; what does not fit into the time left is left out
and named. Results go to the JSON file as they come.

    python benchmarks/gpu.py [--device cuda:0] [--json gpu.json] [--trace gpu-trace.json] [--seconds 290]
    python benchmarks/gpu.py --quick [--device cpu]    # small models, in this process: tries the script itself
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_sections import SECTIONS
from gpu_settings import Setting

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""cuBLAS reads this as it starts; with it, it gives the same bits each time."""


def run_here(name: str, setting: Setting) -> dict[str, Any]:
    """One section in this process: what it found, or how it failed."""
    start = time.perf_counter()
    try:
        found = SECTIONS[name].run(setting)
    except Exception as failure:
        found = {"failed": f"{type(failure).__name__}: {failure}", "where": traceback.format_exc()[-2000:]}
    return {**found, "took": round(time.perf_counter() - start, 2)}


def run_apart(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """One section in a process of its own, ended after that many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--section", name, "--device", options.device, "--json", str(path)]
        command += ["--trace", str(options.trace)] if options.trace is not None else []
        try:
            done = subprocess.run(
                command, env={**os.environ, **DETERMINISTIC}, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {seconds:.0f} s"}
        if not path.exists():
            return {"failed": f"ended with {done.returncode}", "where": done.stderr[-2000:]}
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="default: cuda:0, with --quick cpu")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--trace", type=Path, help="where to write the trace of a step")
    parser.add_argument("--seconds", type=float, default=290.0, help="for all sections together")
    parser.add_argument("--only", nargs="+", choices=sorted(SECTIONS), metavar="SECTION")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="models of a few thousand parameters, in this process, without the sections that run whole test suites",
    )
    parser.add_argument("--section", choices=sorted(SECTIONS), help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    options.device = options.device or ("cpu" if options.quick else "cuda:0")
    setting = Setting(options.device, options.quick, options.trace)
    if options.section:
        found = run_here(options.section, setting)
        options.json.write_text(json.dumps(found, default=str), encoding="utf-8")
        return 0

    start = time.perf_counter()
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "time": time.strftime("%Y-%m-%d"),
        "device": options.device,
    }
    failed = []
    quick_sections = [name for name, section in SECTIONS.items() if not section.runs_tests]
    for name in options.only or (quick_sections if options.quick else SECTIONS):
        left = options.seconds - (time.perf_counter() - start)
        budget = min(SECTIONS[name].seconds, left)
        if options.quick:
            found = run_here(name, setting)
        elif budget < SECTIONS[name].seconds / 3:
            found = {"left out": f"{left:.0f} s were left"}
        else:
            found = run_apart(name, options, budget)
        results[name] = found
        if "failed" in found:
            failed.append(name)
        print(f"{name}: {json.dumps(found, default=str)}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2, default=str) + "\n", encoding="utf-8")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
