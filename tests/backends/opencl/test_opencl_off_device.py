"""What the OpenCL backend works out without a device: errors from codes, platforms from names, indices from shapes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.opencl import OpenClBackend, platforms
from backends.opencl.codegen.indices import Index, Ranges, Split, linear, reshaped_strides, variable
from backends.opencl.errors import translated
from hal.errors import CompileError, DeviceLost, HalError, OutOfMemory, Unavailable


def test_codes_of_the_driver_become_the_errors_of_the_relay() -> None:
    def native(code: int) -> RuntimeError:
        failure = RuntimeError(f"code {code}")
        failure.code = code  # type: ignore[attr-defined]
        return failure

    for code, kind in ((-2, DeviceLost), (-5, DeviceLost), (-4, OutOfMemory), (-11, CompileError), (-30, HalError)):
        error = translated(native(code), "a run", "opencl:3")
        assert type(error) is kind
        assert error.__cause__ is not None
        assert "opencl:3" in str(error)


def test_two_platforms_with_one_name_and_a_dead_driver_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(number: int, version: str) -> platforms.Found:
        native = SimpleNamespace(name="processor", platform=SimpleNamespace(version=version))
        return platforms.Found(number, native, "Same Name", True)

    both = [found(0, "1.0"), found(1, "2.0")]
    monkeypatch.setattr(platforms, "find", lambda: both)
    monkeypatch.setattr(platforms, "broken", lambda found: "no compiler" if found.number == 0 else "")
    assert platforms.choose("").number == 1
    with pytest.raises(Unavailable, match=r"no compiler.*opencl:1 \(processor on Same Name \(2.0\)\)"):
        platforms.choose("0")
    with pytest.raises(Unavailable, match="There is no device 'opencl:2'"):
        platforms.choose("2")
    first = OpenClBackend().probe()[0]
    assert (first.available, first.reason) == (False, "no compiler")


def test_reshaped_strides_are_those_that_pytorch_finds() -> None:
    base = torch.empty(4, 6, 10)
    for tensor in (base, base.transpose(0, 1), base[:, ::2], base.expand(4, 6, 10)[..., :5], base[:, :1]):
        for shape in ([-1], [2, 2, -1], [tensor.shape[0], -1], [tensor.shape[0], tensor.shape[1], -1, 5]):
            try:
                expected: Any = tensor.view(shape)
            except RuntimeError:
                expected = None
            wanted = tuple(tensor.reshape(shape).shape)
            mine = reshaped_strides(tuple(tensor.shape), tensor.stride(), wanted)
            assert (mine is None) == (expected is None)
            if mine is not None:
                same = [a == b for a, b, n in zip(mine, expected.stride(), wanted, strict=True) if n != 1]
                assert all(same)


def test_divisions_that_come_out_even_vanish_and_loops_are_split_for_others() -> None:
    ranges = Ranges({"i": 4, "j": 12}, {"i", "j"})
    flat = linear([("i", 12), ("j", 1)])
    assert ranges.divided(flat, 12) == (variable("i"), variable("j"))
    with pytest.raises(Split) as caught:
        ranges.divided(flat, 4)
    assert (caught.value.name, caught.value.inner) == ("j", 4)
    assert ranges.divided(linear([("j", 1)], 1), 5) is None
    assert ranges.divided(Index((), 17), 5) == (Index((), 3), Index((), 2))
