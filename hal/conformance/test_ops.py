"""Every op of `hal.ops` in every dtype that the device has, on generated shapes, against PyTorch in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hal.conformance.samples.edge_cases import Sample, samples, tried
from hal.conformance.samples.oracle import assert_near, evaluate
from hal.device import Device
from hal.kit.program_builder import GraphBuilder, run
from hal.ops import OPS, Kind
from hal.program import Program

CASES = list(tried())
PASSING_ON = ["neg.default", "abs.default", "exp.default", "relu.default", "sqrt.default", "tanh.default"]


def lacks(device: Device, dtype: torch.dtype) -> str:
    """Why this dtype is skipped on the device; empty if it is tested."""
    if dtype not in device.info.storage:
        return f"{dtype} is not in DeviceInfo.storage"
    if dtype is torch.float64 and dtype not in device.info.compute:
        return "float64 is not in DeviceInfo.compute"
    return ""


def program_of(name: str, sample: Sample) -> tuple[Program, list[torch.Tensor]]:
    """A program of that one call, and its inputs."""
    builder = GraphBuilder(f"one {name}")
    inputs: list[torch.Tensor] = []

    def as_node(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            inputs.append(value)
            return builder.input(tuple(value.shape), value.dtype)
        if isinstance(value, list):
            return [as_node(item) for item in value]
        return value

    args = [as_node(argument) for argument in sample.args]
    if not inputs:
        inputs.append(torch.zeros(1))
        builder.input((1,))  # no program is without one
    result = builder.call(name, *args, **sample.kwargs)
    outputs = [part for part in (result if isinstance(result, tuple) else (result,)) if part is not None]
    return builder.program(outputs, accumulates=False), inputs


@pytest.mark.parametrize(
    ("op", "dtype"), CASES, ids=[f"{op}-{str(dtype).removeprefix('torch.')}" for op, dtype in CASES]
)
def test_an_op_gives_what_the_oracle_gives(
    request: pytest.FixtureRequest, device: Device, op: str, dtype: torch.dtype
) -> None:
    reason = lacks(device, dtype)
    if reason:
        pytest.skip(reason)
    tried_samples = 0
    # Where not all are wanted, each dtype starts with another, so that most are tried in some dtype.
    every = list(enumerate(samples(op, dtype)))
    start = [candidate for name, candidate in CASES if name == op].index(dtype) % len(every)
    for number, sample in [*every[start:], *every[:start]]:
        if tried_samples == request.config.getoption("samples"):
            break
        if any(lacks(device, other) for other in sample.kwargs.values() if isinstance(other, torch.dtype)):
            continue
        program, inputs = program_of(op, sample)
        found = run(device, program, inputs)
        for position, (ours, theirs) in enumerate(zip(found, evaluate(program, inputs), strict=True)):
            assert_near(ours, theirs, ours.dtype, f"sample {number}, result {position} of {op}")
        tried_samples += 1
    assert tried_samples


@pytest.mark.parametrize("op", PASSING_ON)
def test_infinities_and_nan_are_results_like_any_other(device: Device, op: str) -> None:
    given = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1.0, -1.0, 1e30, -1e30, 1e-30])
    program, inputs = program_of(f"aten.{op}", Sample((given,)))
    (found,) = run(device, program, inputs)
    wanted = evaluate(program, inputs, exact=False)[0]
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.isinf(), wanted.isinf())


@pytest.mark.parametrize("op", ["add.Tensor", "mul.Tensor", "maximum.default", "minimum.default"])
def test_nan_beside_a_number_stays_nan(device: Device, op: str) -> None:
    program, inputs = program_of(
        f"aten.{op}", Sample((torch.tensor([math.nan, 1.0, math.inf]), torch.tensor([2.0, math.nan, -math.inf])))
    )
    (found,) = run(device, program, inputs)
    assert torch.equal(found.isnan(), evaluate(program, inputs)[0].isnan())


def test_every_op_of_the_table_has_samples() -> None:
    drawn = {name for name, row in OPS.items() if row.kind is Kind.RANDOM}  # test_randomness.py
    assert {op for op, _ in CASES} | drawn == set(OPS)
