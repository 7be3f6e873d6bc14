"""Writes the tables of several hosts in docs/scaling.md: simulated speeds on 1 to 8 devices and 1 to 1,024 hosts.

    python docs/hosts_scaling.py

It prints the tables as Markdown. Nothing is measured.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from relay.simulation.hosts.scaling_curve import simulate_hosts

MODELS: dict[str, dict[str, Any]] = {
    "8B": {"model": "llama-3-8b"},
    "50B": {"layers": 62, "hidden": 8192},
    "500B": {"layers": 96, "hidden": 20480, "stash": "host"},
}
SHOWN = (2, 8, 64, 256, 1024)
DEVICES = (1, 2, 4, 8)


def main() -> None:
    """Print one row for each model and number of devices."""
    shares = " | ".join(f"{hosts:,}" for hosts in SHOWN)
    last = f"tokens/s, {SHOWN[-1]:,} hosts | network binds from | fits from"
    print(f"| model | devices | tokens/s, 1 host | {shares} | {last} |")
    print("| --- " * (len(SHOWN) + 6) + "|")
    for (name, shape), devices in product(MODELS.items(), DEVICES):
        _, curve = simulate_hosts(
            **shape, hosts=SHOWN[-1], network=25e9, device="h200-sxm", host="epyc-9654-2s", count=devices,
            batch=4 * devices, microbatches=4 * devices, seq=4096, master_weights="split",
        )  # fmt: skip
        by_hosts = {point.hosts: point for point in curve.points}
        network = next((str(point.hosts) for point in curve.points if point.binds == "network"), "none")
        fits = next((str(point.hosts) for point in curve.points if point.fits), "none")
        cells = [
            name,
            str(devices),
            f"{by_hosts[1].tokens_per_second:,.0f}",
            *(f"{by_hosts[hosts].efficiency:.2f}" for hosts in SHOWN),
            f"{by_hosts[SHOWN[-1]].tokens_per_second:,.0f}",
            network,
            fits,
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
