"""A dtype that a device lacks is refused when compiling, by name and with the program's; what it has is compiled.

A device that computed in a narrower dtype than it was asked for would give other results without a word. What is
computed in which precision is for `test_ops`, whose oracle would notice.
"""

import pytest
import torch

from hal.device import NATIVE, Device
from hal.dtypes import ALL, computes
from hal.errors import Unsupported
from hal.kit.program_builder import GraphBuilder, for_device, run
from hal.program import Program


def has(device: Device, dtype: torch.dtype) -> bool:
    """Whether a device's own `DeviceInfo` promises programs in that dtype."""
    return dtype in device.info.storage and computes(device.info, dtype)


def through(dtype: torch.dtype) -> Program:
    """A program with values of a dtype within it alone: float32, cast there and back."""
    builder = GraphBuilder(f"layer through {dtype}")
    inside = builder.call("aten._to_copy.default", builder.input((3,)), dtype=dtype)
    flipped = builder.call("aten.flip.default", inside, [0])
    return builder.program([builder.call("aten._to_copy.default", flipped, dtype=torch.float32)])


def of(dtype: torch.dtype) -> Program:
    """A program whose input and output are of a dtype."""
    builder = GraphBuilder(f"layer of {dtype}")
    return builder.program([builder.call("aten.flip.default", builder.input((3,), dtype), [0])])


def constant(dtype: torch.dtype) -> Program:
    """A program with a constant of a dtype."""
    builder = GraphBuilder(f"layer with a constant of {dtype}")
    builder.input((3,))
    constant = builder.constant(torch.ones(3, dtype=dtype))
    return builder.program([builder.call("aten._to_copy.default", constant, dtype=torch.float32)])


@pytest.mark.parametrize("make", [of, through, constant], ids=["inputs", "inside", "constants"])
def test_a_dtype_that_is_not_promised_is_refused_by_name_and_one_that_is_compiles(device: Device, make: object) -> None:
    assert callable(make)
    for dtype in sorted(ALL, key=str):
        program = for_device(make(dtype), device)
        if has(device, dtype):
            device.compile(program)
        elif make is of or NATIVE not in device.info.tags:  # what PyTorch runs within a native program is its own
            with pytest.raises(Unsupported) as refused:
                device.compile(program)
            name = str(dtype).removeprefix("torch.")
            for part in (program.name, name, device.info.name):
                assert part in str(refused.value), f"the refusal does not name {part!r}"
            assert refused.value.dtype.removeprefix("torch.") == name


def test_what_is_promised_is_held_in_full(device: Device) -> None:
    """Numbers that no narrower dtype holds, through a program and back."""
    for dtype in (torch.float64, torch.float32, torch.int64, torch.int32):
        if has(device, dtype):
            unit = torch.ones(3, dtype=dtype)
            step = torch.finfo(dtype).eps if dtype.is_floating_point else torch.iinfo(dtype).max - 1
            given = unit + step * torch.tensor([0, 1, 1], dtype=dtype)
            assert torch.equal(run(device, of(dtype), [given])[0], given.flip(0)), f"{dtype} lost some of its bits"
