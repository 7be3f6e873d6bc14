"""What it costs to notice that a model's code has changed: the check before each step, as a share of that step.

A small model, whose steps are short, is the hardest case: the check grows with the number of modules and of what their
code reads, and not with the sizes of tensors. The check and the step that it belongs to are timed together, step by
step, as the machine's speed drifts; printed are the medians and the median share. The losses of the steps must fall.

    python benchmarks/guards.py [--layers 12] [--hidden 64] [--steps 40] [--quick] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

import relay
from relay.models import GPT
from relay.runtime.code_states import CodeState, CodeStates


def timed_steps(trainer: relay.Trainer, batch: dict[str, torch.Tensor], steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of the check within it. Two steps before them compile and warm up."""
    check, seconds = CodeStates.current, [0.0]

    def timed(states: CodeStates) -> CodeState:
        start = time.perf_counter()
        state = check(states)
        seconds[0] += time.perf_counter() - start
        return state

    CodeStates.current = timed  # type: ignore[method-assign]
    whole: list[float] = []
    checks: list[float] = []
    losses: list[float] = []
    try:
        for step in range(steps + 2):
            seconds[0] = 0.0
            start = time.perf_counter()
            losses.append(trainer.step(batch).loss)
            if step >= 2:
                whole.append(time.perf_counter() - start)
                checks.append(seconds[0])
    finally:
        CodeStates.current = check  # type: ignore[method-assign]
    if losses[-1] >= losses[0]:
        sys.exit(f"the loss did not fall: {losses[0]} at first, {losses[-1]} at last")
    return whole, checks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--sequence", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="two layers and few steps: tries the script")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.steps = 2, 4

    torch.manual_seed(0)
    model = GPT(layers=options.layers, hidden=options.hidden, heads=4, sequence=options.sequence, tied=False)
    trainer = relay.Trainer(model, optimizer=relay.AdamW(lr=1e-3), microbatches=options.microbatches)
    ids = torch.randint(0, 256, (options.microbatches, options.sequence))
    whole, checks = timed_steps(trainer, {"input_ids": ids, "labels": ids}, options.steps)
    trainer.close()
    figures = {
        "model": f"{options.layers} layers, hidden {options.hidden}, sequence {options.sequence}, "
        f"{options.microbatches} micro-batches",
        "steps": options.steps,
        "step_seconds": statistics.median(whole),
        "check_seconds": statistics.median(checks),
        "share": statistics.median(check / step for check, step in zip(checks, whole, strict=True)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(figures["model"])
    print(f"a step {figures['step_seconds'] * 1e3:.2f} ms, the check in it {figures['check_seconds'] * 1e6:.0f} us")
    print(f"median share: {figures['share']:.2%}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
