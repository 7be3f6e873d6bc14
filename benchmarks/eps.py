"""The host optimizer against the memory's own speed: AdamW from bfloat16 gradients to bfloat16 weights.

Five things in turn, round by round, in one process, for the machine's speed drifts: (a) what memory can do: a
triad and a copy of our own on the same threads, and torch's copy, the fastest of them by the bytes that the program
names; (b) the fused AdamW, 28 bytes a parameter: gradient 2 and three states of 4 read, three states of 4 and weight
2 written; (c) torch's fused AdamW in float32 with the two casts around it; (d) DeepSpeed's CPUAdam on bfloat16
weights and gradients with float32 moments, where it is installed; (e) the fused AdamW with split masters, 26 bytes.
Prints medians and medians of the paired ratios, and first checks that (b), (c) and (e) give the same weights: a figure
of a broken run is worth nothing.

    python benchmarks/eps.py [--parameters 64000000] [--rounds 15] [--quick] [--json out.json]

(d) needs `pip install deepspeed` and a compiler, in an environment of its own; the relay does not depend on it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import torch
from llvmlite.binding import get_host_cpu_features

from relay.optim import fused
from relay.optim.int8_state import Int8State, group_count
from relay.optim.split_master import SplitMaster, sizes
from relay.optim.thread_pool import work_through

BYTES_A_PARAMETER = 28
PAUSE = 0.02  # seconds in which the last contestant's threads stop spinning for more work and free their cores
OPTIONS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
GROUP = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
TARGETS = {
    "of memory": "0.85",
    "over torch": "1.5",
    "over deepspeed": "2.5",
    "time of split masters": "at most 1.03",
    "deepspeed's time over split masters": "none",
}


@numba.njit(nogil=True)
def _triad(target, left, right, scalar):  # type: ignore[no-untyped-def]
    for i in range(len(target)):
        target[i] = left[i] + scalar * right[i]


@numba.njit(nogil=True)
def _copy(target, source):  # type: ignore[no-untyped-def]
    for i in range(len(target)):
        target[i] = source[i]


def memory_candidates(size: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """By name: a function that moves memory, and the bytes that it names an element."""
    arrays = [torch.rand(size) for _ in range(3)]
    a, b, c = (array.numpy() for array in arrays)

    def share(work: Callable[[int, int], None]) -> None:
        work_through(work, size, alignment=4096, threads=None, smallest=2**16)

    scalar = a.dtype.type(3)
    return {
        "triad": (
            lambda: share(lambda begin, end: _triad(a[begin:end], b[begin:end], c[begin:end], scalar)),
            12,
        ),
        "copy": (lambda: share(lambda begin, end: _copy(a[begin:end], b[begin:end])), 8),
        "torch copy": (lambda: arrays[0].copy_(arrays[1]), 8),
    }


class Problem:
    """One layer's state, in the form that each contestant takes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.gradient = torch.randn(size, generator=torch.Generator().manual_seed(1)).mul_(0.01).bfloat16()
        self.step = 0
        self.ours = self._states()
        self.theirs = self._states()
        self.weights = [torch.empty(size, dtype=torch.bfloat16) for _ in range(2)]
        flags, ties = sizes(size)
        self.split = SplitMaster(
            torch.empty(size, dtype=torch.bfloat16),
            torch.empty(size, dtype=torch.int16),
            torch.zeros(flags, dtype=torch.uint8),
            torch.zeros(ties, dtype=torch.uint8),
        )
        self.split.assign(self.ours[0])
        self.moments = {"exp_avg": torch.zeros(size), "exp_avg_sq": torch.zeros(size)}
        self.wide = torch.empty(size)

    def _states(self) -> list[torch.Tensor]:
        master = torch.randn(self.size, generator=torch.Generator().manual_seed(2))
        return [master, torch.zeros(self.size), torch.zeros(self.size)]

    def run_ours(self) -> None:
        master, first, second = self.ours
        states = {"exp_avg": first, "exp_avg_sq": second}
        fused.update(fused.ADAMW, master, self.gradient, states, self.weights[0], GROUP, step=self.step)

    def run_split(self) -> None:
        fused.update(fused.ADAMW, self.split, self.gradient, self.moments, None, GROUP, step=self.step)

    def run_torch(self) -> None:
        """With its casts into memory that is there already, as favourable as can be."""
        master, first, second = self.theirs
        self.wide.copy_(self.gradient)
        count = torch.tensor(float(self.step))
        lists = [[master], [self.wide], [first], [second], [], [count]]
        torch._fused_adamw_(*lists, amsgrad=False, maximize=False, **OPTIONS)
        self.weights[1].copy_(master)


def deepspeed_step(gradient: torch.Tensor) -> tuple[Callable[[], Any] | None, str]:
    """A step of DeepSpeed's CPUAdam, or None and why not."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        parameter = torch.nn.Parameter(torch.randn(gradient.numel()).bfloat16())
        parameter.grad = gradient
        optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, weight_decay=0.01, adamw_mode=True)
        optimizer.step()
    except Exception as problem:
        return None, f"{type(problem).__name__}: {problem}"
    return optimizer.step, ""


def small_state_steps(problem: Problem) -> dict[str, Callable[[], Any]]:
    """AdamW with moments in fewer bytes: for information, there is no target."""
    size, master = problem.size, torch.randn(problem.size)
    weight = torch.empty(size, dtype=torch.bfloat16)
    short = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(2)]
    eight = [
        Int8State(torch.zeros(size, dtype=torch.uint8), torch.zeros(group_count(size)), signed)
        for signed in (True, False)
    ]

    def step(states: list[Any]) -> None:
        named = dict(zip(("exp_avg", "exp_avg_sq"), states, strict=True))
        fused.update(fused.ADAMW, master, problem.gradient, named, weight, GROUP, step=problem.step)

    return {"bf16 states": lambda: step(short), "int8 states": lambda: step(eight)}


def timed(function: Callable[[], Any]) -> float:
    time.sleep(PAUSE)
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(size: int, rounds: int) -> dict[str, Any]:
    """All figures of one run."""
    problem = Problem(size)
    candidates = memory_candidates(size)
    contestants: dict[str, Callable[[], Any]] = {
        "relay": problem.run_ours,
        "split": problem.run_split,
        "torch": problem.run_torch,
    }
    deepspeed, why_not = deepspeed_step(problem.gradient)
    if deepspeed is not None:
        contestants["deepspeed"] = deepspeed
    contestants |= small_state_steps(problem)
    times: dict[str, list[float]] = {name: [] for name in [*candidates, *contestants]}
    for problem.step in range(1, rounds + 2):
        for name, (function, _) in candidates.items():
            times[name].append(timed(function))
        for name, function in contestants.items():
            times[name].append(timed(function))
        if problem.step == 1 and not torch.equal(*problem.weights):
            raise SystemExit("The fused AdamW and torch's gave different weights: the figures would mean nothing.")
        if problem.step == 1 and not torch.equal(problem.split.to_float(), problem.ours[0]):
            raise SystemExit("Split masters and float32 ones differ: the figures would mean nothing.")
    times = {name: values[1:] for name, values in times.items()}  # the first round compiles and touches memory
    speeds = {name: [size * named / t / 1e9 for t in times[name]] for name, (_, named) in candidates.items()}
    best = max(speeds, key=lambda name: statistics.median(speeds[name]))
    ours = [size * BYTES_A_PARAMETER / t / 1e9 for t in times["relay"]]
    ratios = {
        "of memory": _paired(ours, speeds[best]),
        "over torch": _paired(times["torch"], times["relay"]),
        "time of split masters": _paired(times["split"], times["relay"]),
    }
    if deepspeed is not None:
        ratios["over deepspeed"] = _paired(times["deepspeed"], times["relay"])
        ratios["deepspeed's time over split masters"] = _paired(times["deepspeed"], times["split"])
    return {
        "parameters": size,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "avx512": bool(get_host_cpu_features().get("avx512f", False)),
        "memory_gb_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "memory_yardstick": best,
        "adamw_gb_per_second": statistics.median(ours),
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "ratios": ratios,
        "deepspeed_missing": why_not,
    }


def _paired(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))


def report(figures: dict[str, Any]) -> None:
    """The figures for people."""
    print(f"{figures['parameters']:,} parameters, {figures['threads']} threads, {figures['rounds']} rounds, medians")
    for name, seconds in figures["seconds"].items():
        print(f"  {name:<12} {seconds * 1e3:8.1f} ms")
    memory = ", ".join(f"{name} {speed:.1f}" for name, speed in figures["memory_gb_per_second"].items())
    print(f"memory, GB/s: {memory}; yardstick: {figures['memory_yardstick']}")
    print(f"AdamW bf16 to bf16: {figures['adamw_gb_per_second']:.1f} GB/s at {BYTES_A_PARAMETER} bytes a parameter")
    for name, ratio in figures["ratios"].items():
        print(f"  {ratio:5.2f} {name} (target {TARGETS[name]})")
    if figures["deepspeed_missing"]:
        print(f"  DeepSpeed was not measured: {figures['deepspeed_missing']}")
    elif figures["avx512"]:
        print("  The target against DeepSpeed is for processors without AVX-512; this one has it.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=64_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="few parameters and rounds: tries the script")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.parameters, options.rounds = 100_000, 2
    if not fused.available():
        sys.exit(f"The fused optimizers are not available here: {fused.reason()}")
    figures = measure(options.parameters, options.rounds)
    report(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
