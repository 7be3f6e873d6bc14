"""The draws of `hal.random` as array code, for array libraries whose memory is the device's: nothing is sent.

Philox4x32-10 on 64-bit integers with the upper half zero, as `hal.random` has it; masks and uniform numbers are the
same bits. It is written for numpy and CuPy; numpy's own device draws with the compiled form, which is faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hal import random as counter_random
from hal.random import RandomKey

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def words(xp: Any, key: RandomKey, number: int, count: int) -> Any:
    """The first `count` words of a draw, uint64 below 2**32."""
    step, segment_and_op, microbatch, seed_low, seed_high = counter_random.stream_words(key, number)
    blocks = -(-count // 4)
    word_0 = xp.arange(blocks, dtype=np.uint64)
    word_1, word_2, word_3 = (xp.full(blocks, word, dtype=np.uint64) for word in (step, segment_and_op, microbatch))
    key_0, key_1 = seed_low, seed_high
    for _ in range(counter_random.ROUNDS):
        product_0 = word_0 * counter_random.MULTIPLIER_0
        product_1 = word_2 * counter_random.MULTIPLIER_1
        word_0, word_1 = (product_1 >> _HALF) ^ word_1 ^ np.uint64(key_0), product_1 & _LOW
        word_2, word_3 = (product_0 >> _HALF) ^ word_3 ^ np.uint64(key_1), product_0 & _LOW
        key_0 = (key_0 + int(counter_random.KEY_INCREMENT_0)) & 0xFFFFFFFF
        key_1 = (key_1 + int(counter_random.KEY_INCREMENT_1)) & 0xFFFFFFFF
    return xp.stack([word_0, word_1, word_2, word_3], axis=-1).reshape(-1)[:count]


def draws(xp: Any) -> dict[str, Callable[..., Any]]:
    """`keep_mask`, `uniform` and `normal` over an array module, as `hal.kit.arrays.dtypes.Arrays` takes them."""

    def keep_mask(key: RandomKey, number: int, shape: Sequence[int], probability: float) -> Any:
        threshold = np.uint64(counter_random.keep_threshold(probability))
        return (words(xp, key, number, math.prod(shape)) >= threshold).reshape(tuple(shape))

    def uniform(key: RandomKey, number: int, shape: Sequence[int]) -> Any:
        drawn = words(xp, key, number, math.prod(shape)) >> np.uint64(counter_random.UNIFORM_SHIFT)
        return (drawn.astype(np.float32) * np.float32(counter_random.UNIFORM_STEP)).reshape(tuple(shape))

    def normal(key: RandomKey, number: int, shape: Sequence[int]) -> Any:
        count = math.prod(shape)
        drawn = words(xp, key, number, count + count % 2) >> np.uint64(counter_random.UNIFORM_SHIFT)
        unit = drawn.astype(np.float64) * counter_random.UNIFORM_STEP
        radius = xp.sqrt(-2.0 * xp.log(unit[0::2] + counter_random.UNIFORM_STEP))
        angle = (2.0 * math.pi) * unit[1::2]
        pairs = xp.stack([radius * xp.cos(angle), radius * xp.sin(angle)], axis=-1).astype(np.float32)
        return pairs.reshape(-1)[:count].reshape(tuple(shape))

    return {"keep_mask": keep_mask, "uniform": uniform, "normal": normal}
