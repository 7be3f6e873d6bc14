"""The draws of `hal.random` as one Triton kernel each. It imports Triton, so it is imported only where that is.

`backends.torch_device.random` computes the same bits by about a hundred launches of PyTorch's own ops, each of which
reads and writes eight bytes an element where the mask is one. Numbers that change from launch to launch are 32-bit
words that Triton does not specialise on, so that each kernel is compiled once. It decides nothing about where it is
used. Invariant: the bits are those of `hal.random`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from hal import random as counter_random
from hal.random import RandomKey

BLOCKS = 512
"""Blocks of four elements that one program of a kernel draws."""

_once = triton.jit(do_not_specialize=["count", "step", "segment_and_op", "microbatch", "key_0", "key_1", "bound"])


@triton.jit
def _words(count, step, segment_and_op, microbatch, key_0, key_1, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    word_0 = block.to(tl.uint32)
    zero = word_0 * 0
    first, second, third, fourth = tl.philox_impl(
        word_0,
        zero + step.to(tl.uint32, bitcast=True),
        zero + segment_and_op.to(tl.uint32, bitcast=True),
        zero + microbatch.to(tl.uint32, bitcast=True),
        key_0.to(tl.uint32, bitcast=True),
        key_1.to(tl.uint32, bitcast=True),
    )
    words = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    offsets = tl.program_id(0).to(tl.int64) * (4 * BLOCKS) + tl.arange(0, 4 * BLOCKS)
    return words, offsets, offsets < count


@_once
def write_mask(made, count, step, segment_and_op, microbatch, key_0, key_1, bound, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether each word is above a bound."""
    words, offsets, inside = _words(count, step, segment_and_op, microbatch, key_0, key_1, BLOCKS)
    tl.store(made + offsets, words > bound.to(tl.uint32, bitcast=True), inside)


@_once
def write_uniform(made, count, step, segment_and_op, microbatch, key_0, key_1, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The upper 24 bits of each word, times 2**-24."""
    words, offsets, inside = _words(count, step, segment_and_op, microbatch, key_0, key_1, BLOCKS)
    tl.store(made + offsets, (words >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08, inside)


def keep_mask(
    key: RandomKey, number: int, shape: Sequence[int], probability: float, device: torch.device
) -> torch.Tensor:
    """`hal.random.keep_mask` on the device."""
    threshold = counter_random.keep_threshold(probability)
    if threshold == 0:
        return torch.ones(tuple(shape), dtype=torch.bool, device=device)
    # A threshold may be 2**32, which is no word: the kernel compares with what is one below it.
    return _launched(write_mask, key, number, shape, torch.bool, device, _signed(threshold - 1))


def uniform(key: RandomKey, number: int, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """`hal.random.uniform` on the device."""
    return _launched(write_uniform, key, number, shape, torch.float32, device)


def _launched(
    kernel: Any,
    key: RandomKey,
    number: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *bound: int,
) -> torch.Tensor:
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    count = math.prod(shape)
    if count:
        words = (_signed(word) for word in counter_random.stream_words(key, number))
        kernel[(-(-count // (4 * BLOCKS)),)](made.view(-1), count, *words, *bound, BLOCKS)
    return made


def _signed(word: int) -> int:
    """The number of 32 bits with a sign that has the bits of a word: Triton's type is then one, whatever the word."""
    return word - 2**32 if word >= 2**31 else word
