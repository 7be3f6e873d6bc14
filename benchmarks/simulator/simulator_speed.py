"""How much processor time the commands of the simulator take, each in a process of its own, imports included.

    python benchmarks/simulator/simulator_speed.py [--quick] [--json out.json]

Prints one row a command: seconds of user and system time together, which other load on the machine changes less than
wall time. `--quick` leaves out the plan of 96 layers and takes a sweep of 3 x 3 points for one of 10 x 10. It measures
the simulator itself; how exact its figures are is measured by `../validate_here.py` and `../validate_literature.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

LINKS = (
    "pcie-3-x16", "pcie-4-x16", "pcie-5-x16", "pcie-6-x16", "nvlink-c2c", "pcie-5-x16-desktop", "pcie-3-x16-shared",
    "ethernet-100g", "infinity-fabric-gcd", "nvlink-2-power9",
)  # fmt: skip
CARD = ("--hidden", "4096", "--device", "rtx-4090", "--host-memory", "1TB")


def commands(quick: bool, folder: Path) -> dict[str, list[str]]:
    """The arguments of each measured command, by its name in the table."""
    points = 3 if quick else 10
    batches = ",".join(str(batch + 1) for batch in range(points))
    found = {
        "simulate, 50B by --layers": [
            "simulate", "--layers", "62", "--hidden", "8192", "--device", "v100-sxm2-16gb", "--host-memory", "512GB",
            "--stash", "host", "--state-dtype", "int8", "--loss-scale", "fixed", "--tokens", "1e9",
        ],
        "plan, 24 layers": ["plan", "--layers", "24", *CARD],
        "plan, 96 layers": ["plan", "--layers", "96", *CARD],
        f"sweep, {points} batches x {points} links": [
            "sweep", "--layers", "24", *CARD, "--over", f"batch={batches}", "--over",
            f"link={','.join(LINKS[:points])}", "--out", str(folder / "sweep.csv"),
        ],
    }  # fmt: skip
    if quick:
        del found["plan, 96 layers"]
    return found


def processor_seconds(arguments: list[str]) -> float:
    """User and system seconds of `relay` with these arguments. Raises CalledProcessError where the command fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    root = Path(__file__).parent.parent.parent
    paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    subprocess.run(
        [sys.executable, "-m", "relay", *arguments],
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": paths},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the plan of 96 layers; a sweep of 3 x 3 points")
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in commands(options.quick, Path(folder)).items():
            figures[name] = processor_seconds(arguments)
            print(f"{name:34} {figures[name]:6.1f} s of processor time", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
