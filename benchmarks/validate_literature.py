"""Published figures against the simulator's, family by family: writes docs/validation.md.

A family is a piece of software on a kind of machine. One row of it, named in the page, calibrates one number: a factor
on the device's compute and memory rates, since other software reaches another share of them. The other rows are
predicted with that factor. Rows that the simulator cannot express are listed with the reason; none is left out.

    python benchmarks/validate_literature.py [--out docs/validation.md] [--quick] [--json out.json]
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

import relay
from hal import registry, spec
from hal.device import KernelCall
from hal.host import HostWork
from hal.program import Port, Program, Role
from hal.spec import Machine
from hal.spec.timeline import VirtualBackend
from relay.simulation.described.transformer_shape import MODELS, ModelShape

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks" / "data" / "validation.csv"
PLENTY = 1e30
ADAM_BYTES = 30  # a parameter: fp32 states, a 16-bit copy written, gradients in fp32


@dataclass(frozen=True)
class Family:
    """Rows that one factor serves. `predict(row, factor)` gives a row's metric; `anchor` calibrates, if any."""

    title: str
    rows: tuple[str, ...]
    anchor: str | None
    how: str
    predict: Callable[[dict[str, str], float], float]


def scaled(machine: Machine, factor: float, precision: str) -> Machine:
    """The machine with its compute and memory rates multiplied."""
    return machine.scaled("device", **{f"achieved_{precision}": factor, "bandwidth_achieved": factor})


def in_memory(machine: Machine) -> Machine:
    """The same with nothing to cross a link and nothing to do on the host."""
    machine = machine.with_values("link", down=PLENTY, up=PLENTY, both=PLENTY, latency=0.0)
    return machine.with_values("host", bandwidth_achieved=PLENTY, optimizer_bandwidth=PLENTY, task=0.0)


def simulated(row: dict[str, str], machine: Machine, precision: str, batch: int, pieces: int, **more: Any) -> Any:
    """A row's run. Memory is not what these rows are about, so nothing is refused for want of it."""
    hidden, layers, sequence = int(row["hidden"]), int(row["layers"]), int(row["seq"])
    shape = more.pop("shape", None) or ModelShape(layers, hidden, hidden // 64, ffn=int(row["ffn"]))
    machine = machine.with_values("device", memory=1e13, reserved=0.0).with_values("host", memory=1e14)
    return relay.simulate(
        shape, device=machine, precision=precision, seq=sequence, batch=batch, microbatches=pieces,
        loss_scale="fixed", **more
    )  # fmt: skip


def adam(row: dict[str, str], factor: float) -> float:
    """Seconds of an Adam step on the host: fp32 states, a 16-bit copy written, gradients in fp32 (30 B a parameter)."""
    backend = registry.backend("sim")
    assert isinstance(backend, VirtualBackend)
    (device,) = backend.open_machines([spec.machine("v100-sxm2-32gb")], numerics=False)
    parameters = float(row["model"].split()[0])
    event = device.host().run(lambda: None, work=HostWork(int(30 * parameters)))
    event.wait()
    return event.elapsed()


def offloaded(row: dict[str, str], factor: float) -> float:
    """TFLOPS with parameters and optimizer on the host."""
    machine = scaled(spec.machine("v100-sxm2-32gb"), factor, "fp16")
    batch = int(row["batch"])
    found = simulated(row, machine, "fp16", batch, batch // int(row["microbatch"]))
    return found.timeline.flops / found.step_seconds / 1e12


def layer_to_layer(row: dict[str, str], factor: float) -> float:
    """The same with one slot, so that loads are not hidden, and an optimizer that takes no time."""
    machine = scaled(spec.machine("v100-sxm2-32gb"), factor, "fp16")
    machine = machine.with_values("host", optimizer_bandwidth=PLENTY, bandwidth_achieved=PLENTY)
    batch = int(row["batch"])
    found = simulated(row, machine, "fp16", batch, batch // int(row["microbatch"]), slots=1)
    return found.timeline.flops / found.step_seconds / 1e12


def bert(row: dict[str, str], factor: float) -> float:
    """Sequences a second, everything in device memory, the optimizer's pass of a fine-tuning step included."""
    software = "fused" if row["case"] == "bert-ds-s128" else "eager"
    machine = scaled(in_memory(spec.machine("v100-sxm2-32gb", software=software)), factor, "fp16")
    batch = int(row["batch"] or 64)
    shape = ModelShape(24, 1024, 16, vocabulary=30522, tied=True, causal=False)
    found = simulated(row, machine, "fp16", batch, 1, shape=shape, recompute=False)
    seconds = float(found.step_seconds)
    if row["case"] == "bert-squad-v100-32":  # pretraining accumulates over hundreds of such pieces before it steps
        seconds += ADAM_BYTES * found.memory.parameters / machine.device["bandwidth_achieved"]
    return batch / seconds


def llm_c(row: dict[str, str], factor: float) -> float:
    """Seconds a step on each of eight devices: 64 sequences of 1,024 tokens, in four micro-batches."""
    machine = scaled(in_memory(spec.machine("a100-sxm-80gb", software="fused")), factor, "bf16")
    return float(simulated(row, machine, "bf16", 64, 4, recompute=False).step_seconds)


STREAMED = {"3090": "rtx-3090", "a100": "a100-sxm-80gb", "h100": "h100-sxm"}


def streamed(row: dict[str, str], factor: float) -> float:
    """Tokens a second of Llama-8B with its layers streamed, bf16 states, 65,536 tokens a step."""
    preset = next(preset for part, preset in STREAMED.items() if part in row["case"])
    machine = scaled(spec.machine(preset), factor, "bf16")
    sequence = int(row["seq"])
    batch = 65536 // sequence
    recomputed = re.search(r"recompute ([0-9.]+) %", row["source"])
    assert recomputed is not None
    found = simulated(
        row, machine, "bf16", batch, max(1, 65536 // 8192), shape=MODELS["llama-3-8b"],
        state_dtype="bf16", recompute=round(float(recomputed[1]) / 100 * int(row["layers"])),
    )  # fmt: skip
    return float(found.tokens_per_second)


def gemm(row: dict[str, str], factor: float) -> float:
    """Seconds of one matrix product."""
    sizes = {part[0]: int(part[1:]) for part in row["model"].split()}
    graph = fx.Graph()

    def tensor(*shape: int) -> dict[str, Any]:
        return {"val": torch.empty(shape, dtype=torch.float16, device="meta")}

    left, right = graph.placeholder("left"), graph.placeholder("right")
    left.meta, right.meta = tensor(sizes["M"], sizes["K"]), tensor(sizes["K"], sizes["N"])
    product = graph.call_function(torch.ops.aten.mm.default, (left, right))
    product.meta = tensor(sizes["M"], sizes["N"])
    graph.output((product,))
    ports = [
        Port(Role.VALUE, number, tuple(node.meta["val"].shape), torch.float16)
        for number, node in enumerate((left, right, product))
    ]
    program = Program("gemm", graph, tuple(ports[:2]), (ports[2],), {}, False, 0, 0, 0, row["case"])
    backend = registry.backend("sim")
    assert isinstance(backend, VirtualBackend)
    (device,) = backend.open_machines([spec.machine("v100-sxm2-32gb")], numerics=False)
    views = [device.alloc(port.size).view(0, port.shape, port.dtype) for port in ports]
    event = device.queue("compute").run(KernelCall(device.compile(program), views[:2], views[2:]))
    event.wait()
    return event.elapsed()


FAMILIES = (
    Family("Adam on two Xeon 8168", ("adam-1b", "adam-2b", "adam-8b"), None,
           "The host preset's optimizer rate comes from adam-2b, so that row is in the sample.", adam),
    Family("ZeRO-Offload on V100", ("zo-1b", "zo-4b", "zo-8b", "zo-11b", "zo-13b"), "zo-4b",
           "TFLOPS with recompute counted.", offloaded),
    Family("L2L as ZeRO-Offload measured it", ("l2l-1b", "l2l-4b", "l2l-8b", "l2l-13b"), "l2l-4b",
           "One slot: loads are not hidden. The optimizer ran on the GPU; here it takes no time.", layer_to_layer),
    Family("BERT-Large in V100 memory", ("bert-pretrain-v100-32", "bert-squad-v100-32", "bert-ds-s128"),
           "bert-pretrain-v100-32", "Nothing is recomputed. bert-ds-s128 is simulated with `--software fused`.", bert),
    Family("llm.c on eight A100", ("gpt2-124m-a100", "gpt2-350m-a100"), "gpt2-124m-a100",
           "An eighth of the batch on one device, `--software fused`; exchanging gradients is in the factor.", llm_c),
    Family("Streamed Llama-8B (ml_dataflow)",
           ("stream-8b-3090-512", "stream-8b-3090-8192", "stream-8b-a100-512", "stream-8b-h100-8192"),
           "stream-8b-3090-512", "As many layers recompute as the source says (11 to 19 %), to the next whole one.",
           streamed),
    Family("DeepBench matrix products on V100",
           ("gemm-512-16-512", "gemm-1024-700-512", "gemm-2048-7000-2048", "gemm-8448-48000-2816"), None,
           "Launch and ramp of the V100 presets were fitted to these rows: all are in the sample.", gemm),
)  # fmt: skip

NOT_EXPRESSED = {
    "l2l-capacity": "the limit of another implementation, not of a machine",
    "zi-10b": "sixteen GPUs with states partitioned between them; the simulator has one device",
    "zi-100b": "sixteen GPUs and NVMe",
    "zi-peak": "a range over unnamed shapes of compute alone (62 to 78 TFLOPS; the preset sustains 105 in products)",
}
"""Rows that are not simulated, and why."""

EXPLAINED = {
    "adam-8b": "The measured rate falls with size (4.5, 3.9, 3.3 G parameters/s), which one bandwidth cannot follow.",
    "adam-1b": "As adam-8b, the other way.",
    "bert-squad-v100-32": "Its 6,144 tokens take longer than the 8,192 of the calibrating row in the same software's "
    "table, the optimizer's pass (added here) apart; what else its step spends is not said there.",
    "stream-8b-a100-512": "The preset's product rate is of the best shape; the A100 sustains less of it in training.",
}
"""What is known of rows that are off by more than the mean."""


def calibrated(family: Family, rows: dict[str, dict[str, str]]) -> float:
    """The factor with which the anchor comes out as measured, by bisection."""
    if family.anchor is None:
        return 1.0
    row = rows[family.anchor]
    wanted, rising = float(row["value"]), "time" not in row["metric"]
    low, high = 0.02, 3.0
    for _ in range(18):
        middle = (low * high) ** 0.5
        if (family.predict(row, middle) < wanted) == rising:
            low = middle
        else:
            high = middle
    return (low * high) ** 0.5


def uncalibrated(rows: dict[str, dict[str, str]]) -> dict[str, float]:
    """The predictions of the families that have no factor, by row."""
    return {
        case: family.predict(rows[case], 1.0) for family in FAMILIES if family.anchor is None for case in family.rows
    }


def page(rows: dict[str, dict[str, str]]) -> tuple[str, dict[str, Any]]:
    """The whole page, and the figures on it: each row's prediction, and the errors."""
    lines = [
        "# Predicted against published",
        "",
        "Written by `python benchmarks/validate_literature.py` from `benchmarks/data/validation.csv`. Each family has",
        "one factor on the device's compute and memory rates, set by the row marked *calibrates*; every other row is",
        "predicted. Conditions differ from ours (other software, other kernels), so this tests how the model carries",
        "over from one shape or machine to another, not whether it knows somebody's kernels.",
    ]
    errors: list[float] = []
    predictions: dict[str, float] = {}
    for family in FAMILIES:
        factor = calibrated(family, rows)
        note = f" Factor {factor:.3f}." if family.anchor else ""
        lines += ["", f"## {family.title}", "", f"{family.how}{note}", ""]
        lines += ["| row | metric | published | predicted | error | |", "|---|---|---|---|---|---|"]
        in_sample = "in the sample" in family.how
        for case in family.rows:
            row = rows[case]
            found, value = family.predict(row, factor), float(row["value"])
            predictions[case] = found
            error = found / value - 1
            mark = "calibrates" if case == family.anchor else ""
            if not mark and not (in_sample and (case == "adam-2b" or case.startswith("gemm"))):
                errors.append(abs(error))
            text = mark or (EXPLAINED.get(case, "") if abs(error) > 0.1 else "")
            figures = f"{value:.4g} {row['unit']} | {found:.4g} | {error:+.1%}"
            lines.append(f"| {case} | {row['metric']} | {figures} | {text} |")
        print("\n".join(lines[-len(family.rows) - 5 :]), flush=True)
    lines += ["", "## Not expressed", ""]
    lines += [f"* {case}: {reason}." for case, reason in NOT_EXPRESSED.items()]
    summary = (
        f"Of {len(errors)} rows that were neither calibrated on nor fitted to: mean error "
        f"**{statistics.mean(errors):.1%}**, worst {max(errors):.1%}."
    )
    lines[6:6] = ["", summary]
    print(summary)
    missing = set(rows) - {case for family in FAMILIES for case in family.rows} - set(NOT_EXPRESSED)
    if missing:
        raise SystemExit(f"rows that no family predicts and NOT_EXPRESSED does not list: {sorted(missing)}")
    figures = {"mean_error": statistics.mean(errors), "worst_error": max(errors), "predictions": predictions}
    return "\n".join(lines) + "\n", figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "validation.md")
    parser.add_argument("--quick", action="store_true", help="only the families without a factor; writes no page")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with DATA.open(encoding="utf-8") as file:
        rows = {row["case"]: row for row in csv.DictReader(file)}
    figures: dict[str, Any]
    if options.quick:
        figures = {"predictions": uncalibrated(rows)}
        for case, found in figures["predictions"].items():
            print(f"{case}: published {float(rows[case]['value']):.4g} {rows[case]['unit']}, predicted {found:.4g}")
    else:
        text, figures = page(rows)
        options.out.write_text(text, encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
