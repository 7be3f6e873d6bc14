"""Published figures against the simulator's, family by family: writes docs/validation.md.

A family is a piece of software on a kind of machine. Each row is simulated once. What a row was faster or slower in
compute is its factor. Two questions are asked of the factors. With the factor of one row of a family, how far are its
other rows? With no row of the family, does the factor lie in the range that the other families give? Rows that the
simulator cannot express are listed with the reason; none is left out.

    python benchmarks/validate_literature.py [--out docs/validation.md] [--quick] [--json out.json]
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
import sys
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

sys.path.insert(0, str(Path(__file__).parent / "literature"))
from unfused_transformer import UnfusedTransformer

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks" / "data" / "validation.csv"
DATA_OF_MODELS = ROOT / "benchmarks" / "data" / "validation-2.csv"
PLENTY = 1e30
ADAM_BYTES = 30  # a parameter: fp32 states, a 16-bit copy written, gradients in fp32


@dataclass(frozen=True)
class Simulated:
    """A row as simulated: seconds, those of them in which the device computes, and the work that its speed counts."""

    seconds: float
    computing: float
    work: float = 1.0

    def speed(self, factor: float = 1.0) -> float:
        """Work a second with compute that many times as fast."""
        return self.work / (self.computing / factor + self.seconds - self.computing)

    def factor(self, speed: float) -> float:
        """The factor on compute with which the work is done at that speed; infinite where no factor is enough."""
        left = self.work / speed - (self.seconds - self.computing)
        return self.computing / left if left > 0 else math.inf


@dataclass(frozen=True)
class Family:
    """Rows of one software on one kind of machine. `anchor` is the row that gives the factor, if any does.

    `kind` is the kind of software of which the rows tell the factor; None for rows that are of parts of a step.
    """

    title: str
    rows: tuple[str, ...]
    anchor: str | None
    how: str
    simulate: Callable[[dict[str, str]], Simulated]
    kind: str | None = None


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


def unfused(row: dict[str, str], heads: int, vocabulary: int, causal: bool, batch: int, **more: Any) -> Any:
    """A row's run with attention op by op, on a V100."""
    with torch.device("meta"):
        model = UnfusedTransformer(
            int(row["layers"]), int(row["hidden"]), heads, int(row["ffn"]), int(row["seq"]), vocabulary, causal
        )
        ids = torch.zeros(batch, int(row["seq"]), dtype=torch.int64)
    machine = more.pop("machine").with_values("device", memory=1e13, reserved=0.0).with_values("host", memory=1e14)
    return relay.simulate(
        model, example={"input_ids": ids, "labels": ids}, device=machine, precision="fp16", loss_scale="fixed", **more
    )


def adam(row: dict[str, str]) -> Simulated:
    """Seconds of an Adam step on the host: fp32 states, a 16-bit copy written, gradients in fp32 (30 B a parameter)."""
    backend = registry.backend("sim")
    assert isinstance(backend, VirtualBackend)
    (device,) = backend.open_machines([spec.machine("v100-sxm2-32gb")], numerics=False)
    parameters = float(row["model"].split()[0])
    event = device.host().run(lambda: None, work=HostWork(int(30 * parameters)))
    event.wait()
    return Simulated(event.elapsed(), 0.0)


def offloaded(row: dict[str, str]) -> Simulated:
    """TFLOPS with parameters and optimizer on the host."""
    machine = spec.machine("v100-sxm2-32gb")
    return _streamed_gpt(row, machine)


def layer_to_layer(row: dict[str, str]) -> Simulated:
    """The same with one slot, so that loads are not hidden, and an optimizer that takes no time."""
    machine = spec.machine("v100-sxm2-32gb")
    machine = machine.with_values("host", optimizer_bandwidth=PLENTY, bandwidth_achieved=PLENTY)
    return _streamed_gpt(row, machine, slots=1)


def _streamed_gpt(row: dict[str, str], machine: Machine, **more: Any) -> Simulated:
    batch = int(row["batch"])
    pieces = batch // int(row["microbatch"])
    found = unfused(row, int(row["hidden"]) // 64, 50257, True, batch, machine=machine, microbatches=pieces, **more)
    return Simulated(found.step_seconds, found.timeline.busy["compute"], found.timeline.flops / 1e12)


def bert(row: dict[str, str]) -> Simulated:
    """Sequences a second, everything in device memory, the optimizer's pass of a fine-tuning step included."""
    software = "fused" if row["case"] == "bert-ds-s128" else "eager"
    machine = in_memory(spec.machine("v100-sxm2-32gb", software=software))
    batch = int(row["batch"] or 64)
    found = unfused(row, 16, 30522, False, batch, machine=machine, microbatches=1, recompute=False)
    seconds, computing = float(found.step_seconds), found.timeline.busy["compute"]
    if row["case"] == "bert-squad-v100-32":  # pretraining accumulates over hundreds of such pieces before it steps
        added = ADAM_BYTES * found.memory.parameters / machine.device["bandwidth_achieved"]
        seconds, computing = seconds + added, computing + added
    return Simulated(seconds, computing, batch)


def llm_c(row: dict[str, str]) -> Simulated:
    """Seconds a step on each of eight devices: 64 sequences of 1,024 tokens, in four micro-batches."""
    machine = in_memory(spec.machine("a100-sxm-80gb", software="fused"))
    found = simulated(row, machine, "bf16", 64, 4, recompute=False)
    return Simulated(found.step_seconds, found.timeline.busy["compute"])


def mpt(row: dict[str, str]) -> Simulated:
    """Tokens a second of one device of eight, for one of the micro-batches that it accumulates."""
    batch, sequence = int(row["microbatch"]), int(row["seq"])
    layers, hidden, heads, vocabulary = (int(row[name]) for name in ("layers", "hidden", "heads", "vocab"))
    shape = ModelShape(layers, hidden, heads, vocabulary=vocabulary, tied=True)
    found = simulated(
        row, in_memory(spec.machine(row["device"])), "bf16", batch, 1, shape=shape,
        recompute=row["checkpointing"] == "True",
    )  # fmt: skip
    return Simulated(found.step_seconds, found.timeline.busy["compute"], batch * sequence)


STREAMED = {"3090": "rtx-3090", "a100": "a100-sxm-80gb", "h100": "h100-sxm"}


def streamed(row: dict[str, str]) -> Simulated:
    """Tokens a second of Llama-8B with its layers streamed, bf16 states, 65,536 tokens a step."""
    preset = next(preset for part, preset in STREAMED.items() if part in row["case"])
    batch = 65536 // int(row["seq"])
    recomputed = re.search(r"recompute ([0-9.]+) %", row["source"])
    assert recomputed is not None
    found = simulated(
        row, spec.machine(preset), "bf16", batch, max(1, 65536 // 8192), shape=MODELS["llama-3-8b"],
        state_dtype="bf16", recompute=round(float(recomputed[1]) / 100 * int(row["layers"])),
    )  # fmt: skip
    return Simulated(found.step_seconds, found.timeline.busy["compute"], 65536)


def gemm(row: dict[str, str]) -> Simulated:
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
    return Simulated(event.elapsed(), event.elapsed())


def rows_of_data() -> dict[str, dict[str, str]]:
    """Every published row by its name; those of models by family, sizes and sequence."""
    with DATA.open(encoding="utf-8") as file:
        rows = {row["case"]: row for row in csv.DictReader(file)}
    with DATA_OF_MODELS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            length = row["seq"] or f"on-{row['devices']}"
            case = f"{row['family'].split('-')[0]}-{row['layers']}x{row['hidden']}-{length}"
            rows[case] = {**row, "case": case, "metric": "tokens_per_second", "unit": "tok/s",
                          "value": row["tokens_per_second_per_device"]}  # fmt: skip
    return rows


MPT = tuple(case for case in rows_of_data() if case.startswith("mpt-"))
FAMILIES = (
    Family("Adam on two Xeon 8168", ("adam-1b", "adam-2b", "adam-8b"), None,
           "The host preset's optimizer rate comes from adam-2b, so that row is in the sample.", adam),
    Family("ZeRO-Offload on V100", ("zo-1b", "zo-4b", "zo-8b", "zo-11b", "zo-13b"), "zo-4b",
           "TFLOPS with recompute counted; attention op by op, in heads of 64 (the source has none).", offloaded,
           "eager"),
    Family("L2L as ZeRO-Offload measured it", ("l2l-1b", "l2l-4b", "l2l-8b", "l2l-13b"), "l2l-4b",
           "One slot: loads are not hidden. The optimizer ran on the GPU; here it takes no time. Attention op by op.",
           layer_to_layer, "eager"),
    Family("BERT-Large in V100 memory", ("bert-pretrain-v100-32", "bert-squad-v100-32", "bert-ds-s128"),
           "bert-pretrain-v100-32", "Nothing is recomputed; attention op by op. bert-ds-s128 is simulated with "
           "`--software fused`.", bert, "eager"),
    Family("MPT with FSDP on eight A100-40GB", MPT, "mpt-24x2048-2048",
           "One micro-batch of one device; exchanging parameters and gradients is in the factor.", mpt, "eager"),
    Family("llm.c on eight A100", ("gpt2-124m-a100", "gpt2-350m-a100"), "gpt2-124m-a100",
           "An eighth of the batch on one device, `--software fused`; exchanging gradients is in the factor.", llm_c,
           "fused"),
    Family("Streamed Llama-8B (ml_dataflow)",
           ("stream-8b-3090-512", "stream-8b-3090-8192", "stream-8b-a100-512", "stream-8b-h100-8192"),
           "stream-8b-3090-512", "As many layers recompute as the source says (11 to 19 %), to the next whole one.",
           streamed, "fused"),
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

ROUNDPIPE = "RoundPipe names no sequence length; asynchronous, on one to eight RTX 4090 (tokens a second of all cards)"

EXPLAINED = {
    "adam-8b": "The measured rate falls with size (4.5, 3.9, 3.3 G parameters/s), which one bandwidth cannot follow.",
    "adam-1b": "As adam-8b, the other way.",
    "zo-11b": "Micro-batches of 8 and less came out slower than those of 16 and 32; their cause is not in the model.",
    "zo-13b": "As zo-11b.",
    "l2l-13b": "As zo-11b.",
    "stream-8b-a100-512": "The preset's product rate is of the best shape; the A100 sustains less of it in training.",
    "mpt-12x768-32768": "Heads of 64: attention has one efficiency here, and heads of 128 reach more of it.",
}
"""What is known of rows that are off by more than the mean."""


def published_speed(row: dict[str, str]) -> float:
    """What was published, as work a second."""
    value = float(row["value"])
    return 1 / value if "time" in row["metric"] else value


def window(families: dict[str, list[float]]) -> tuple[float, float, float]:
    """The range of a factor of two that holds most rows, each family weighing the same, and the middle of the families.

    It is centred on the rows that it holds. The middle is the geometric mean of the families' medians, within it.
    """
    values = sorted((value, 1 / len(rows)) for rows in families.values() for value in rows)
    held = max(
        ([(value, weight) for value, weight in values if low <= value <= 2 * low] for low, _ in values),
        key=lambda within: sum(weight for _, weight in within),
    )
    centre = math.sqrt(held[0][0] * held[-1][0])
    low, high = centre / math.sqrt(2), centre * math.sqrt(2)
    middle = statistics.geometric_mean([statistics.median(rows) for rows in families.values()])
    return low, min(max(middle, low), high), high


def simulate_all(rows: dict[str, dict[str, str]]) -> dict[str, Simulated]:
    """Each row of each family, simulated."""
    return {case: family.simulate(rows[case]) for family in FAMILIES for case in family.rows}


def page(rows: dict[str, dict[str, str]], found: dict[str, Simulated]) -> tuple[str, dict[str, Any]]:
    """The whole page, and the figures on it."""
    speeds = {case: published_speed(rows[case]) for case in found}
    factors = {case: found[case].factor(speeds[case]) for case in found}
    of_steps = [family for family in FAMILIES if family.kind is not None]
    by_family = {family.title: [factors[case] for case in family.rows] for family in of_steps}
    kinds = {kind: window({family.title: by_family[family.title] for family in of_steps if family.kind == kind})
             for kind in ("eager", "fused")}  # fmt: skip
    errors: list[float] = []
    held = counted = 0
    sections: list[str] = []
    for family in FAMILIES:
        factor = factors[family.anchor] if family.anchor else 1.0
        note = f" Factor {factor:.3f}." if family.anchor else ""
        without = None
        if family.kind is not None:
            others = {other.title: by_family[other.title] for other in of_steps
                      if other is not family and other.kind == family.kind}  # fmt: skip
            without = window(others)
            note += f" Range without this family: {without[0]:.2f} to {without[2]:.2f}."
        sections += ["", f"## {family.title}", "", f"{family.how}{note}", ""]
        sections += ["| row | metric | published | predicted | error | its factor | |", "|---|---|---|---|---|---|---|"]
        for case in family.rows:
            row, value = rows[case], float(rows[case]["value"])
            speed = found[case].speed(factor)
            predicted = 1 / speed if "time" in row["metric"] else speed
            error = predicted / value - 1
            mark = "calibrates" if case == family.anchor else ""
            if not mark and not ("in the sample" in family.how and (case == "adam-2b" or case.startswith("gemm"))):
                errors.append(abs(error))
            own = "" if family.kind is None else f"{factors[case]:.3f}"
            if without is not None:
                counted += 1
                inside = without[0] <= factors[case] <= without[2]
                held += inside
                own += "" if inside else ", outside"
            text = mark or (EXPLAINED.get(case, "") if abs(error) > 0.1 else "")
            figures = f"{value:.4g} {row['unit']} | {predicted:.4g} | {error:+.1%}"
            sections.append(f"| {case} | {row['metric']} | {figures} | {own} | {text} |")
    sections += ["", "## Not expressed", ""]
    sections += [f"* {case}: {reason}." for case, reason in NOT_EXPRESSED.items()]
    sections += [f"* {case}: {float(row['value']):,.0f} tokens/s published. {ROUNDPIPE}."
                 for case, row in rows.items() if case.startswith("roundpipe")]  # fmt: skip
    missing = set(rows) - set(found) - set(NOT_EXPRESSED) - {case for case in rows if case.startswith("roundpipe")}
    if missing:
        raise SystemExit(f"rows that no family predicts and NOT_EXPRESSED does not list: {sorted(missing)}")
    lines = [
        "# Predicted against published",
        "",
        "Written by `python benchmarks/validate_literature.py` from the tables in `benchmarks/data`. Conditions differ",
        "from ours (other software, other kernels), so this tests how the model carries over from one shape or machine",
        "to another. The factor of a row is how many times as fast as simulated its device computed.",
        "",
        f"**With one row of a family giving its factor** (*calibrates*), {len(errors)} other rows, to which nothing",
        f"was fitted: mean error **{statistics.mean(errors):.1%}**, worst {max(errors):.1%}.",
        "",
        "**With no row of the family**, the range of a factor of two that holds most rows of the other families of the",
        f"kind of software holds {held} of {counted} rows (**{held / counted:.1%}**), {len(MPT)} of them of one"
        " family.",
        "ZeRO-Offload and L2L were measured by the same people on the same machine.",
        "",
        "The ranges that the simulator prints come from all families of a kind, by the same rule:",
        "",
        "| software | low | middle | high |",
        "|---|---|---|---|",
        *(f"| {kind} | {low:.2f} | {middle:.2f} | {high:.2f} |" for kind, (low, middle, high) in kinds.items()),
        *sections,
    ]
    figures = {"mean_error": statistics.mean(errors), "worst_error": max(errors), "rows_in_range": held / counted,
               "factors": factors, "ranges": kinds}  # fmt: skip
    return "\n".join(lines) + "\n", figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "validation.md")
    parser.add_argument("--quick", action="store_true", help="only the families without a factor; writes no page")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rows = rows_of_data()
    figures: dict[str, Any]
    if options.quick:
        quick = {case: family.simulate(rows[case]) for family in FAMILIES if not family.anchor for case in family.rows}
        figures = {"predictions": {case: found.seconds for case, found in quick.items()}}
        for case, seconds in figures["predictions"].items():
            print(f"{case}: published {float(rows[case]['value']):.4g} s, predicted {seconds:.4g}")
    else:
        text, figures = page(rows, simulate_all(rows))
        options.out.write_text(text, encoding="utf-8")
        print(text.partition("## ")[0])
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
