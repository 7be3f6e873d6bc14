"""The draws of `hal.random` as PyTorch ops, for accelerators: nothing is drawn on the host, sent, or waited for.

Philox4x32-10 on int64, whose multiplication wraps, so that the upper half of a product is what is left after a shift
and a mask. Masks and uniform numbers are the same bits as everywhere else. Long draws are made in pieces, since each
round's words are eight bytes where the mask is one. On CUDA a draw is one kernel of Triton's instead, where Triton is
(`backends.torch_device.triton_random`). On the host the compiled form of `hal.random` is faster.
"""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hal import random as counter_random
from hal.random import RandomKey

logger = logging.getLogger(__name__)

PIECE = 2**20
"""Blocks of four elements drawn at once: about 100 MB of temporaries."""

_LOW = 0xFFFFFFFF
_MULTIPLIERS = int(counter_random.MULTIPLIER_0), int(counter_random.MULTIPLIER_1)
_INCREMENTS = int(counter_random.KEY_INCREMENT_0), int(counter_random.KEY_INCREMENT_1)


def keep_mask(
    key: RandomKey, number: int, shape: Sequence[int], probability: float, device: torch.device
) -> torch.Tensor:
    """`hal.random.keep_mask` on the device."""
    fused = _by_one_kernel("keep_mask", device, key, number, shape, probability)
    if fused is not None:
        return fused
    threshold = counter_random.keep_threshold(probability)
    return _drawn(key, number, shape, torch.bool, lambda word: word >= threshold, device)


def uniform(key: RandomKey, number: int, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """`hal.random.uniform` on the device."""
    fused = _by_one_kernel("uniform", device, key, number, shape)
    if fused is not None:
        return fused

    def convert(word: torch.Tensor) -> torch.Tensor:
        return (word >> counter_random.UNIFORM_SHIFT).to(torch.float32) * counter_random.UNIFORM_STEP

    return _drawn(key, number, shape, torch.float32, convert, device)


ON_DEVICE: dict[Any, Callable[..., torch.Tensor]] = {
    counter_random.keep_mask: keep_mask,
    counter_random.uniform: uniform,
}
"""The draw on the device for each draw on the host. Normal numbers need float64, which not all devices have."""


@functools.cache
def _fused() -> Any:
    """The module of Triton's kernels, or None where there is no Triton."""
    try:
        return importlib.import_module("backends.torch_device.triton_random")
    except ImportError:
        return None


_failed: list[str] = []
"""Why Triton's kernels do not run here, once they have failed."""


def _by_one_kernel(name: str, device: torch.device, *arguments: Any) -> torch.Tensor | None:
    """A draw by Triton, or None where it is to be made of PyTorch's ops."""
    if device.type != "cuda" or _failed or _fused() is None:
        return None
    try:
        drawn: torch.Tensor = getattr(_fused(), name)(*arguments, device)
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except Exception as failure:  # no compiler for the launcher, or a card that this Triton does not know
        _failed.append(f"{type(failure).__name__}: {failure}".splitlines()[0])
        logger.warning("random numbers are drawn by many kernels instead of one of Triton's: %s", _failed[0])
        return None
    return drawn


def _drawn(
    key: RandomKey,
    number: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    convert: Callable[[torch.Tensor], torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    count = math.prod(shape)
    blocks = -(-count // 4)
    made = torch.empty((blocks, 4), dtype=dtype, device=device)
    for start in range(0, blocks, PIECE):
        piece = made[start : start + PIECE]
        for column, word in enumerate(_words(key, number, start, len(piece), device)):
            piece[:, column] = convert(word)
    return made.view(-1)[:count].view(tuple(shape))


def _words(key: RandomKey, number: int, start: int, blocks: int, device: torch.device) -> list[torch.Tensor]:
    """The four words of each block from `start` on, as int64 below 2**32. What all blocks share begins as a number."""
    step, segment_and_op, microbatch, key_0, key_1 = counter_random.stream_words(key, number)
    word_0: Any = torch.arange(start, start + blocks, dtype=torch.int64, device=device)
    word_1: Any = step
    word_2: Any = segment_and_op
    word_3: Any = microbatch
    for _ in range(counter_random.ROUNDS):
        product_0, product_1 = word_0 * _MULTIPLIERS[0], word_2 * _MULTIPLIERS[1]
        word_0, word_1 = ((product_1 >> 32) & _LOW) ^ word_1 ^ key_0, product_1 & _LOW
        word_2, word_3 = ((product_0 >> 32) & _LOW) ^ word_3 ^ key_1, product_0 & _LOW
        key_0, key_1 = (key_0 + _INCREMENTS[0]) & _LOW, (key_1 + _INCREMENTS[1]) & _LOW
    return [word_0, word_1, word_2, word_3]
