"""The sections of `benchmarks/gpu.py`, in the order that they run in, with the seconds that each may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpu_correctness import attention_used, close_to_plain, conformance, equal_to_plain, gpu_tests
from gpu_settings import Setting
from gpu_speed import copies, large_layers, predictions, recorded_launches, step_against_plain

from hal import registry


@dataclass(frozen=True)
class Section:
    """`seconds` is its budget; `runs_tests` marks what runs a suite of tests rather than a measurement."""

    run: Callable[[Setting], dict[str, Any]]
    seconds: float
    runs_tests: bool = False


def devices(setting: Setting) -> dict[str, Any]:
    """What `relay devices` finds."""
    return {probe.name: probe.reason or f"{probe.description}, {probe.memory_bytes} B" for probe in registry.devices()}


SECTIONS: dict[str, Section] = {
    "devices": Section(devices, 20),
    "attention": Section(attention_used, 25),
    "equal, fp32": Section(lambda setting: equal_to_plain(setting, "fp32"), 30),
    "equal, bf16": Section(lambda setting: equal_to_plain(setting, "bf16"), 30),
    "close": Section(close_to_plain, 35),
    "copies, GB/s": Section(copies, 20),
    "step": Section(step_against_plain, 60),
    "recorded launches": Section(recorded_launches, 35),
    "large layers": Section(large_layers, 60),
    "conformance": Section(conformance(""), 90, runs_tests=True),
    "tests": Section(gpu_tests, 60, runs_tests=True),
    "predictions": Section(predictions, 60),
    "conformance, cupy": Section(conformance("cupy:0"), 90, runs_tests=True),
}
"""In the order of what is missed most where the time does not suffice."""
