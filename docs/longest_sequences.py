"""Write the table of docs/long-sequences.md: the longest sequence by device memory, by simulation.

`python docs/longest_sequences.py` prints it; with names of models, only their rows. Nothing is trained.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hal.spec import machine
from relay.simulation.described.transformer_shape import ModelShape
from relay.simulation.limits.longest_sequence import NeededMemory
from relay.simulation.simulated_step import RunShape

SHAPES = {
    "1B": ModelShape(16, 2048, 32, vocabulary=128256, ffn=8192, kv_heads=8, gated=True, tied=True),
    "8B": ModelShape(32, 4096, 32, vocabulary=128256, ffn=14336, kv_heads=8, gated=True),
    "32B": ModelShape(64, 5120, 40, vocabulary=152064, ffn=27648, kv_heads=8, gated=True, head_size=128),
}
"""The sizes of Llama 3.2 1B, Llama 3 8B and Qwen2.5 32B."""

MEMORY = (8, 16, 24, 48, 80)
"""Gigabytes of the device."""

WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "head in chunks": {"head_chunk_tokens": 512},
}

HOST = 2 * 10**12
"""Bytes of host memory: enough for all of them."""


def rows(names: Sequence[str] = tuple(SHAPES), memory: Sequence[float] = MEMORY) -> list[tuple[str, ...]]:
    """A row for each model and way: the longest sequence for each size of device memory."""
    found = []
    for name in names:
        for way, options in WAYS.items():
            run = RunShape(batch=1, microbatches=1, precision="bf16", state_dtype="bf16", stash="host", **options)
            needed = NeededMemory(SHAPES[name], run, machine("h200-sxm"))
            longest = [needed.longest(int(size * 10**9), HOST) for size in memory]
            found.append((name, way, *(f"{length:,}" if length else "does not fit" for length in longest)))
    return found


def table(names: Sequence[str] = tuple(SHAPES), memory: Sequence[float] = MEMORY) -> str:
    """The table in Markdown."""
    head = ["Model", "", *(f"{size} GB" for size in memory)]
    lines = [head, ["---", "---", *(["---:"] * len(memory))], *map(list, rows(names, memory))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(table(sys.argv[1:] or tuple(SHAPES)) + "\n")
