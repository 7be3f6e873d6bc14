"""Randomness is the same bits on every device: masks, uniform numbers, and normal ones to rounding."""

from __future__ import annotations

import pytest
import torch

from hal import random as counter_random
from hal.device import Device
from hal.kit.program_builder import GraphBuilder, run
from hal.program import Program
from hal.random import RandomKey

KEYS = [
    RandomKey(0, 0, 0, 0),
    RandomKey(2**64 - 1, 2**32 - 1, 2**20 - 1, 2**32 - 1),
    RandomKey(0x0123456789ABCDEF, 17, 4095, 3),
]
SHAPES = [(), (1,), (3,), (5, 7), (3, 5, 7), (1031,), (64, 129)]


def drawing(kind: str, number: int, shape: tuple[int, ...], *probability: float) -> Program:
    """A program that draws and does nothing else."""
    builder = GraphBuilder(f"{kind} {number} {shape} {probability}")
    builder.input((1,))
    key = builder.random_key()
    drawn = builder.call(f"hal.random.{kind}", key, number, list(shape), *probability)
    return builder.program([drawn], accumulates=False)


@pytest.mark.parametrize("key", KEYS, ids=str)
@pytest.mark.parametrize("number", [0, 4095])
def test_masks_are_the_same_bits_everywhere(device: Device, key: RandomKey, number: int) -> None:
    for shape in SHAPES:
        for probability in (0.1, 0.5):
            (found,) = run(device, drawing("keep_mask", number, shape, probability), [torch.zeros(1)], key)
            assert torch.equal(found, counter_random.keep_mask(key, number, shape, probability)), (shape, probability)


@pytest.mark.parametrize("probability", [0.0, 1.0, 2.0**-33, 1 - 2.0**-33, 1 / 3])
def test_masks_are_right_at_the_ends(device: Device, probability: float) -> None:
    (found,) = run(device, drawing("keep_mask", 1, (4099,), probability), [torch.zeros(1)], KEYS[2])
    assert torch.equal(found, counter_random.keep_mask(KEYS[2], 1, (4099,), probability))


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_uniform_numbers_are_the_same_bits_everywhere(device: Device, key: RandomKey) -> None:
    for shape in SHAPES:
        (found,) = run(device, drawing("uniform", 7, shape), [torch.zeros(1)], key)
        assert torch.equal(found, counter_random.uniform(key, 7, shape)), shape


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_normal_numbers_are_the_same_to_rounding(device: Device, key: RandomKey) -> None:
    for shape in SHAPES:
        (found,) = run(device, drawing("normal", 7, shape), [torch.zeros(1)], key)
        assert torch.allclose(found, counter_random.normal(key, 7, shape), rtol=1e-4, atol=1e-6), shape


def test_a_mask_inside_a_fused_chain_is_the_same_mask(device: Device) -> None:
    """Dropout as layers have it, on a permuted value, with a second draw beside it."""
    builder = GraphBuilder("dropout")
    x = builder.input((5, 33))
    key = builder.random_key()
    turned = builder.call("aten.permute.default", x, [1, 0])
    results = []
    for number in (0, 1):
        mask = builder.call("hal.random.keep_mask", key, number, [33, 5], 0.25)
        scale = builder.call("aten.mul.Scalar", builder.call("aten._to_copy.default", mask, dtype=torch.float32), 4.0)
        results.append(builder.call("aten.mul.Tensor", turned, scale))
    program = builder.program(results)
    given = torch.randn(5, 33, generator=torch.Generator().manual_seed(1))
    for number, found in enumerate(run(device, program, [given], KEYS[2])):
        assert torch.equal(found, given.t() * (counter_random.keep_mask(KEYS[2], number, (33, 5), 0.25) * 4.0))


def test_the_key_is_taken_anew_at_each_run_of_one_kernel(device: Device) -> None:
    program = drawing("keep_mask", 3, (257,), 0.5)
    kernel = device.compile(program)  # kept, so that every run is of this one
    for step in range(4):
        key = RandomKey(9, step, 2, 1)
        (found,) = run(device, program, [torch.zeros(1)], key)
        assert torch.equal(found, counter_random.keep_mask(key, 3, (257,), 0.5)), step
    assert kernel is device.compile(program)


def test_drawing_without_a_key_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match="key"):
        run(device, drawing("keep_mask", 3, (8,), 0.5), [torch.zeros(1)])
