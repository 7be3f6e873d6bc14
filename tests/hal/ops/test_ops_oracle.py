"""Every op of the table, on generated shapes: numpy's against PyTorch's, and the table's rules against both."""

from typing import Any

import numpy as np
import pytest
import torch

from hal.conformance.samples.op_samples import SAMPLES, expected_of, sample
from hal.kit.arrays.dtypes import Arrays
from hal.kit.arrays.numpy_arrays import as_array, numpy_arrays
from hal.kit.arrays.ops import FUNCTIONS
from hal.ops import OPS, Kind, Spec, spec_of

SEEDS = range(12)


def as_arrays(argument: Any, arrays: Arrays) -> Any:
    if isinstance(argument, torch.Tensor):
        return arrays.load(as_array(argument.contiguous()), argument.dtype)
    if isinstance(argument, list):
        return [as_arrays(item, arrays) for item in argument]
    return argument


def as_specs(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return spec_of(argument)
    return [as_specs(item) for item in argument] if isinstance(argument, list) else argument


def computed(name: str, args: list[Any], kwargs: dict[str, Any], arrays: Arrays) -> list[Any]:
    with np.errstate(all="ignore"):
        result = FUNCTIONS[name](arrays, *(as_arrays(argument, arrays) for argument in args), **kwargs)
    return [part for part in result if part is not None] if isinstance(result, tuple) else [result]


def test_the_table_the_functions_and_the_samples_speak_of_the_same_ops() -> None:
    assert set(FUNCTIONS) == set(OPS) == set(SAMPLES)
    assert len(OPS) >= 90


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_op_gives_what_pytorch_gives_in_float64(name: str) -> None:
    arrays = numpy_arrays(np.float64)
    for seed in SEEDS:
        args, kwargs = sample(name, seed, torch.float64)
        expected = expected_of(name, args, kwargs)
        for mine, theirs in zip(computed(name, args, kwargs, arrays), expected, strict=True):
            tensor = torch.from_numpy(np.array(mine))
            if theirs.dtype.is_floating_point:
                # hal.random's numbers and what was cast are float32.
                torch.testing.assert_close(tensor.double(), theirs.double(), rtol=1e-11, atol=1e-12, equal_nan=True)
            else:
                assert torch.equal(tensor, theirs), (seed, args)


@pytest.mark.parametrize("name", sorted(OPS))
def test_an_op_gives_what_the_oracle_gives_in_float32(name: str) -> None:
    single, double = numpy_arrays(np.float32), numpy_arrays(np.float64)
    for seed in SEEDS:
        args, kwargs = sample(name, seed)
        pairs = zip(computed(name, args, kwargs, single), computed(name, args, kwargs, double), strict=True)
        for mine, oracle in pairs:
            assert mine.dtype == (np.float32 if oracle.dtype == np.float64 else oracle.dtype), seed
            np.testing.assert_allclose(mine, oracle, rtol=2e-5, atol=2e-6, err_msg=str((seed, args)))


@pytest.mark.parametrize("floating", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(OPS))
def test_the_rule_of_an_op_gives_the_shapes_and_dtypes_that_pytorch_gives(name: str, floating: torch.dtype) -> None:
    for seed in SEEDS:
        args, kwargs = sample(name, seed, floating)
        results = OPS[name].results(*map(as_specs, args), **kwargs)
        parts = [results] if isinstance(results, Spec) else [part for part in results if part is not None]
        for part, theirs in zip(parts, expected_of(name, args, kwargs), strict=True):
            assert part == spec_of(theirs), (seed, args, kwargs)


@pytest.mark.parametrize("name", sorted(OPS))
def test_bytes_and_flops_are_counts(name: str) -> None:
    row = OPS[name]
    args, kwargs = sample(name, 1)
    specs = [as_specs(argument) for argument in args]
    assert row.flops(*specs, **kwargs) >= 0
    moved = row.moved(*specs, **kwargs)
    assert moved == 0 if row.kind is Kind.VIEW else moved >= 0


def test_flops_of_a_matrix_product_are_two_a_multiply_add() -> None:
    left, right = Spec((3, 5), torch.float32), Spec((5, 7), torch.float32)
    assert OPS["aten.mm.default"].flops(left, right) == 2 * 3 * 5 * 7
    assert OPS["aten.mm.default"].moved(left, right) == 4 * (3 * 5 + 5 * 7 + 3 * 7)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten.add.Tensor", (Spec((2,), torch.float32), Spec((2,), torch.float64))),
        ("aten.add.Tensor", (Spec((2,), torch.float32), Spec((3,), torch.float32))),
        ("aten.add.Scalar", (Spec((2,), torch.int64), 0.5)),
        ("aten.mm.default", (Spec((2, 3), torch.float32), Spec((2, 3), torch.float32))),
        ("aten.view.default", (Spec((2, 3), torch.float32), [5])),
        ("aten.permute.default", (Spec((2, 3), torch.float32), [0, 0])),
        ("aten.slice.Tensor", (Spec((2, 3), torch.float32), 1, 0, 4, 1)),
        ("aten.embedding.default", (Spec((2, 3), torch.float32), Spec((2,), torch.int32))),
        ("aten.where.self", (Spec((2,), torch.int64), Spec((2,), torch.float32), Spec((2,), torch.float32))),
        ("aten.exp.default", (Spec((2,), torch.int64),)),
        ("aten.sum.dim_IntList", (Spec((2,), torch.bool), [0], False)),
        ("aten.cat.default", ([Spec((2, 3), torch.float32), Spec((2, 4), torch.float32)], 0)),
    ],
)
def test_a_rule_refuses_what_the_op_cannot_take(name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each rule words its own
        OPS[name].results(*arguments)


def test_bf16_is_stored_as_pytorch_rounds_it() -> None:
    arrays = numpy_arrays(np.float32)
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    values = torch.cat([bits.view(torch.float32), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.4e38, -3.4e38])])
    memory = torch.empty(len(values), dtype=torch.bfloat16)
    arrays.store(values.numpy(), torch.bfloat16, as_array(memory))
    torch.testing.assert_close(memory, values.bfloat16(), rtol=0, atol=0, equal_nan=True)
    back = arrays.load(as_array(memory), torch.bfloat16)
    torch.testing.assert_close(torch.from_numpy(back), memory.float(), rtol=0, atol=0, equal_nan=True)
