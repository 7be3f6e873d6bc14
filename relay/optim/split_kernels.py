"""The compiled half of split master weights: float32 from its two halves and back, a block at a time.

A float32 with the pattern `b` is stored as `high`, the bfloat16 nearest to it (ties to even), and `low`, the lower
half of `b`. Modulo 2**32, `b = (high << 16) + low - ((low & 0x8000) << 1)`, for every pattern but one kind: a tie that
was rounded down to even, `(b & 0x1FFFF) == 0x8000`, is 0x10000 more than that. Such ties are in a bitmap, with a flag
for every block of 2,048 values, so that the bitmap is touched only where a block has one. A NaN stays a NaN, and
loses its payload.

It is not the interface (`relay.optim.split_master` is, and imports this late). Invariant: joining what was split gives
the same pattern, for every float32 that is not a NaN.
"""

# Kernels are straight-line arithmetic on many operands: annotations would be noise, and numba infers the types.
from __future__ import annotations

import numba
import numpy as np
from numba import types

from hal.numba_cache import compiled
from relay.optim import numba_intrinsics
from relay.optim.numba_intrinsics import LOW_16, bytes_at, round_to_nearest, shorts_at, words_at

BLOCK = 2048
TIE_BYTES = BLOCK // 8  # of the bitmap, for each block

SIGN_OF_LOW = np.uint32(0x8000)
ONE_OF_HIGH = np.uint32(0x10000)
PATTERN_OF_TIE = np.uint32(0x1FFFF)
HALF_WAY = np.uint16(0x8000)

_inlined = numba.njit(nogil=True, error_model="numpy")


@_inlined
def join_block(high, low, flags, ties, start, count, target):
    """The float32 of the block from element `start` on, at address `target`. The others are addresses of the halves."""
    highs, lows = shorts_at(high + 2 * start, count), shorts_at(low + 2 * start, count)
    words = words_at(target, count)
    for i in range(count):
        rest = np.uint32(lows[i])
        words[i] = np.uint32((np.uint32(highs[i]) << np.uint32(16)) + rest - ((rest & SIGN_OF_LOW) << np.uint32(1)))
    block = start // BLOCK
    if bytes_at(flags + block, 1)[0]:
        bits = bytes_at(ties + TIE_BYTES * block, (count + 7) // 8)
        for i in range(count):
            if (bits[i >> 3] >> np.uint8(i & 7)) & np.uint8(1):
                words[i] = np.uint32(words[i] + ONE_OF_HIGH)


@_inlined
def split_block(source, high, low, flags, ties, start, count):
    """Store the `count` float32 at address `source` as the block from element `start` on."""
    words, lows = words_at(source, count), shorts_at(low + 2 * start, count)
    round_to_nearest(True, source, count, high + 2 * start)
    for i in range(count):
        lows[i] = np.uint16(words[i] & LOW_16)
    # A loop of its own, which vectorises; counting ties above would make the whole a quarter slower.
    least = np.uint16(0xFFFF)
    for i in range(count):
        least = min(least, np.uint16(lows[i] ^ HALF_WAY))
    block = start // BLOCK
    flag = bytes_at(flags + block, 1)
    found = 0
    if least == 0:
        for i in range(count):
            found += (words[i] & PATTERN_OF_TIE) == SIGN_OF_LOW
    if found:
        bits = bytes_at(ties + TIE_BYTES * block, (count + 7) // 8)
        for i in range(bits.size):
            bits[i] = 0
        for i in range(count):
            if (words[i] & PATTERN_OF_TIE) == SIGN_OF_LOW:
                bits[i >> 3] |= np.uint8(np.uint8(1) << np.uint8(i & 7))
        flag[0] = 1
    elif flag[0]:
        flag[0] = 0


def _join(begin, end, high, low, flags, ties, target):
    """The float32 of the elements `begin` to `end`, written over an array that begins at address `target`."""
    for start in range(begin, end, BLOCK):
        join_block(high, low, flags, ties, start, min(BLOCK, end - start), target + 4 * start)


def _split(begin, end, high, low, flags, ties, source):
    """Store the elements `begin` to `end` of the float32 array at address `source`."""
    for start in range(begin, end, BLOCK):
        split_block(source + 4 * start, high, low, flags, ties, start, min(BLOCK, end - start))


_SOURCES = [numba_intrinsics.__file__]
_ADDRESSES = [types.void(*(types.intp,) * 7)]
join = compiled(_join, _ADDRESSES, _SOURCES)
split = compiled(_split, _ADDRESSES, _SOURCES)
