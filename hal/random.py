"""Counter-based randomness that every backend can reproduce bit for bit.

What it is for: dropout masks, uniforms and normals that depend on nothing but a `RandomKey` (seed, step,
segment, micro-batch), the op inside the segment and the position of the element. The forward pass, its
recomputation, a resumed run and every device therefore draw the same numbers in any order, and no generator
state has to be saved, sent or restored.

What it is not: a `torch.Generator`, a stream that advances as it is read, or a source of secrets.

Invariant: element `i` of a draw is output word `i % 4` of Philox4x32-10 under

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (i // 4, step, segment << 12 | op, microbatch)

so two draws share a counter only if they share all of step, segment, micro-batch and op. A program of several
segments is run under the key of its first segment, and numbers its draws `offset * 4096 + op`: the segment `offset`
after the first then draws what it would draw by itself. Words, masks and uniforms are exact on every backend; normals
pass through a logarithm and a cosine and agree to rounding.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the constants
and the known answers that the tests check are those of the authors' Random123 library.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from hal.numba_cache import compiled

__all__ = [
    "MAXIMUM_ELEMENTS",
    "OP_LIMIT",
    "RandomKey",
    "keep_mask",
    "keep_threshold",
    "normal",
    "philox4x32",
    "stream_words",
    "uniform",
    "words",
]

SEED_LIMIT = 2**64
STEP_LIMIT = 2**32
SEGMENT_LIMIT = 2**20
MICROBATCH_LIMIT = 2**32
OP_BITS = 12
OP_LIMIT = 2**OP_BITS
"""Draws inside one segment are numbered 0 to OP_LIMIT - 1; those of the segment after it go on from there."""

MAXIMUM_ELEMENTS = 4 * 2**32
"""Elements in one draw: the block index is one 32-bit counter word, and a block holds four elements."""

ROUNDS = 10
# Everything is held in 64-bit integers with the upper half zero: the product of two words then needs no
# widening, and compilers map it to the vector instruction that multiplies 32 by 32 bits into 64.
MULTIPLIER_0 = np.uint64(0xD2511F53)
MULTIPLIER_1 = np.uint64(0xCD9E8D57)
KEY_INCREMENT_0 = np.uint64(0x9E3779B9)
KEY_INCREMENT_1 = np.uint64(0xBB67AE85)
LOW_WORD = np.uint64(0xFFFFFFFF)
WORD_BITS = np.uint64(32)

UNIFORM_SHIFT = 8  # keeps 24 bits, which a float32 holds exactly
UNIFORM_STEP = 2.0**-24
CHUNK_ELEMENTS = 2**15  # words and float64 intermediates of one chunk stay in a core's own cache


@dataclass(frozen=True, slots=True)
class RandomKey:
    """Names the randomness of one segment running one micro-batch in one training step.

    seed: 0 to 2**64 - 1, chosen by the user. step: 0 to 2**32 - 1. segment: 0 to 2**20 - 1, the position of
    the layer in the model. microbatch: 0 to 2**32 - 1. All are plain ints.

    Raises ValueError, naming the field, when a field is out of its range or not an int.
    """

    seed: int
    step: int
    segment: int
    microbatch: int

    def __post_init__(self) -> None:
        # One expression for the good case: a key is made for every launch, so this must cost almost nothing.
        if not (
            isinstance(self.seed, int)
            and isinstance(self.step, int)
            and isinstance(self.segment, int)
            and isinstance(self.microbatch, int)
            and 0 <= self.seed < SEED_LIMIT
            and 0 <= self.step < STEP_LIMIT
            and 0 <= self.segment < SEGMENT_LIMIT
            and 0 <= self.microbatch < MICROBATCH_LIMIT
        ):
            self._explain()

    def _explain(self) -> None:
        _require_range("RandomKey.seed", self.seed, SEED_LIMIT)
        _require_range("RandomKey.step", self.step, STEP_LIMIT)
        _require_range("RandomKey.segment", self.segment, SEGMENT_LIMIT)
        _require_range("RandomKey.microbatch", self.microbatch, MICROBATCH_LIMIT)


def philox4x32(counter: Sequence[ArrayLike], key: Sequence[ArrayLike]) -> NDArray[np.uint32]:
    """Philox4x32-10 itself: four output words for every counter.

    counter: four words, key: two words; each an integer or an array of integers below 2**32, broadcast
    together. Returns uint32 of the broadcast shape with a last axis of 4 added. Exact. Source: Salmon et al.
    2011, section 4.
    """
    word_0, word_1, word_2, word_3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    key_0, key_1 = (np.asarray(word, dtype=np.uint64) for word in key)
    for _ in range(ROUNDS):
        product_0 = word_0 * MULTIPLIER_0
        product_1 = word_2 * MULTIPLIER_1
        word_0, word_1 = (product_1 >> WORD_BITS) ^ word_1 ^ key_0, product_1 & LOW_WORD
        word_2, word_3 = (product_0 >> WORD_BITS) ^ word_3 ^ key_1, product_0 & LOW_WORD
        key_0 = (key_0 + KEY_INCREMENT_0) & LOW_WORD
        key_1 = (key_1 + KEY_INCREMENT_1) & LOW_WORD
    broadcast = np.broadcast_arrays(word_0, word_1, word_2, word_3)
    return np.stack(broadcast, axis=-1).astype(np.uint32)


def words(key: RandomKey, op: int, count: int) -> NDArray[np.uint32]:
    """The first `count` raw words of a draw, by the plain numpy reference that backends are checked against.

    op: 0 to 4095. count: 0 to MAXIMUM_ELEMENTS. Returns uint32 of shape (count,), exact. Its temporaries are
    many times its result, so it is for checks rather than for training. Raises ValueError naming the bad
    argument.
    """
    _require_range("count", count, MAXIMUM_ELEMENTS + 1)
    step, segment_and_op, microbatch, seed_low, seed_high = stream_words(key, op)
    block = np.arange(-(-count // 4), dtype=np.uint64)
    blocks = philox4x32((block, step, segment_and_op, microbatch), (seed_low, seed_high))
    return blocks.reshape(-1)[:count]


def stream_words(key: RandomKey, op: int) -> tuple[int, int, int, int, int]:
    """What all blocks of a draw share, for kernels that draw by themselves.

    op: 0 to 4095, and from there on for the segments after the key's. Returns five ints below 2**32: counter words
    1, 2 and 3, then key words 0 and 1. Counter word 0 is the index of the block. Raises ValueError when op is out of
    range.
    """
    _require_range("op", op, (SEGMENT_LIMIT - key.segment) * OP_LIMIT)
    return key.step, (key.segment << OP_BITS) + op, key.microbatch, key.seed & 0xFFFFFFFF, key.seed >> 32


def keep_threshold(drop_probability: float) -> int:
    """The least word that keeps its element: round(drop_probability * 2**32), ties to even.

    drop_probability: 0 (keep all) to 1 (drop all). Returns 0 to 2**32 inclusive: for probability 1 no 32-bit
    word reaches the threshold, so compare in 64 bits. The probability realised is within 2**-33 of the one
    asked for. Raises ValueError when it is no number from 0 to 1.
    """
    if not (isinstance(drop_probability, (int, float, np.floating)) and 0.0 <= drop_probability <= 1.0):
        raise ValueError(
            f"drop_probability is not a probability: expected a number from 0 (keep all) to 1 (drop all), "
            f"received {drop_probability!r}. Pass the fraction of elements to drop."
        )
    return round(float(drop_probability) * 2**32)


def keep_mask(key: RandomKey, op: int, shape: Sequence[int], drop_probability: float) -> torch.Tensor:
    """The dropout mask of a draw: True keeps the element.

    op: 0 to 4095. shape: any, of at most MAXIMUM_ELEMENTS elements. drop_probability: 0 (keep all) to 1 (drop
    all). Returns a contiguous bool tensor of that shape on the CPU. An element is kept iff its word is at
    least keep_threshold(drop_probability): exact on every backend. The interpreter lock is released while it
    is filled. Raises ValueError naming the bad argument.
    """
    threshold = keep_threshold(drop_probability)
    stream = stream_words(key, op)
    extents = _extents(shape)
    count = math.prod(extents)
    mask = _empty(count, np.bool_)
    _compiled_fill()(mask, threshold, 0, *stream)
    return torch.from_numpy(mask[:count]).view(extents)


def uniform(key: RandomKey, op: int, shape: Sequence[int]) -> torch.Tensor:
    """Uniform numbers in [0, 1): (word >> 8) * 2**-24.

    op: 0 to 4095. shape: any, of at most MAXIMUM_ELEMENTS elements. Returns a contiguous float32 tensor of
    that shape on the CPU, exact on every backend: all values are multiples of 2**-24. Raises ValueError
    naming the bad argument.
    """
    return _converted_draw(key, op, shape, _write_uniform)


def normal(key: RandomKey, op: int, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal numbers by Box and Muller (1958), a pair of elements from a pair of words.

    With u = ((word[2k] >> 8) + 1) * 2**-24, in (0, 1], and v = (word[2k + 1] >> 8) * 2**-24:

        element 2k     = sqrt(-2 ln u) * cos(2 pi v)
        element 2k + 1 = sqrt(-2 ln u) * sin(2 pi v)

    op: 0 to 4095. shape: any, of at most MAXIMUM_ELEMENTS elements. Returns a contiguous float32 tensor of
    that shape on the CPU; no value exceeds 5.77 in size. Computed in float64 and rounded once, so within one
    float32 ulp (or 1e-15) of the exact formula; other backends promise float32 rounding, not the same bits.
    Raises ValueError naming the bad argument.
    """
    return _converted_draw(key, op, shape, _write_normal)


def _require_range(name: str, value: object, limit: int) -> None:
    if not isinstance(value, int):
        raise ValueError(
            f"{name} has the wrong type: expected an int from 0 to {limit - 1}, received {value!r} of type "
            f"{type(value).__name__}. Convert it with int()."
        )
    if not 0 <= value < limit:
        raise ValueError(
            f"{name} is out of range: expected 0 to {limit - 1}, received {value}. "
            f"It has to fit its bits of the random counter; pass a value within that range."
        )


def _extents(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        extents = tuple(index(extent) for extent in shape)
    except TypeError as problem:
        raise ValueError(
            f"shape has the wrong type: expected a sequence of ints, received {shape!r}. "
            f"StageProgram a tuple, such as (4, 128) or (), or a torch.Size."
        ) from problem
    if min(extents, default=0) < 0 or math.prod(extents) > MAXIMUM_ELEMENTS:
        raise ValueError(
            f"shape is out of range: expected extents of at least 0 and at most {MAXIMUM_ELEMENTS} "
            f"elements in all, received {extents}. Cut a larger draw into several ops."
        )
    return extents


def _empty(count: int, dtype: type[np.generic]) -> NDArray[Any]:
    """Uninitialised memory for `count` elements and up to three more, so that it holds whole blocks.

    From numpy and not from torch, whose `empty` writes it all once when deterministic algorithms are on.
    """
    return np.empty(-(-count // 4) * 4, dtype=dtype)


def _converted_draw(
    key: RandomKey,
    op: int,
    shape: Sequence[int],
    write: Callable[[NDArray[np.uint32], NDArray[np.float32]], None],
) -> torch.Tensor:
    """Draws words a chunk at a time, each turned into floats by `write`, so that no second copy exists."""
    stream = stream_words(key, op)
    extents = _extents(shape)
    count = math.prod(extents)
    result = _empty(count, np.float32)
    scratch = np.empty(min(CHUNK_ELEMENTS, result.size), dtype=np.uint32)
    fill = _compiled_fill()
    for start in range(0, result.size, CHUNK_ELEMENTS):
        target = result[start : start + CHUNK_ELEMENTS]
        chunk = scratch[: target.size]
        fill(chunk, None, start // 4, *stream)
        write(chunk, target)
    return torch.from_numpy(result[:count]).view(extents)


def _write_uniform(chunk: NDArray[np.uint32], target: NDArray[np.float32]) -> None:
    np.right_shift(chunk, UNIFORM_SHIFT, out=chunk)
    # The signed view has the same value, and processors convert signed integers faster.
    np.multiply(chunk.view(np.int32), UNIFORM_STEP, out=target, dtype=np.float32, casting="same_kind")


def _write_normal(chunk: NDArray[np.uint32], target: NDArray[np.float32]) -> None:
    unit = (chunk >> UNIFORM_SHIFT) * UNIFORM_STEP  # float64, and exact
    radius = np.sqrt(-2.0 * np.log(unit[0::2] + UNIFORM_STEP))
    angle = (2.0 * math.pi) * unit[1::2]
    target[0::2] = radius * np.cos(angle)
    target[1::2] = radius * np.sin(angle)


def _fill(
    out: NDArray[Any],
    threshold: np.uint64 | None,
    first_block: np.uint64,
    counter_1: np.uint64,
    counter_2: np.uint64,
    counter_3: np.uint64,
    seed_low: np.uint64,
    seed_high: np.uint64,
) -> None:
    """Fills whole blocks of `out`: raw words where threshold is None, else whether each word reaches it.

    Compiled, never called as it stands. Its shape is what lets the compiler turn the loop over blocks into
    vector code: the rounds have a constant count and are unrolled, the branch on None is settled by the
    argument's type, and indices are unsigned, since a signed one may be negative and would be wrapped around
    at each access.
    """
    for block in range(np.uint64(out.size // 4)):
        word_0 = first_block + block
        word_1 = counter_1
        word_2 = counter_2
        word_3 = counter_3
        key_0 = seed_low
        key_1 = seed_high
        for _ in range(ROUNDS):
            product_0 = word_0 * MULTIPLIER_0
            product_1 = word_2 * MULTIPLIER_1
            word_0 = (product_1 >> WORD_BITS) ^ word_1 ^ key_0
            word_1 = product_1 & LOW_WORD
            word_2 = (product_0 >> WORD_BITS) ^ word_3 ^ key_1
            word_3 = product_0 & LOW_WORD
            key_0 = (key_0 + KEY_INCREMENT_0) & LOW_WORD
            key_1 = (key_1 + KEY_INCREMENT_1) & LOW_WORD
        element = np.uint64(4) * block
        if threshold is None:
            out[element] = word_0
            out[element + np.uint64(1)] = word_1
            out[element + np.uint64(2)] = word_2
            out[element + np.uint64(3)] = word_3
        else:
            out[element] = word_0 >= threshold
            out[element + np.uint64(1)] = word_1 >= threshold
            out[element + np.uint64(2)] = word_2 >= threshold
            out[element + np.uint64(3)] = word_3 >= threshold


_fill_lock = threading.Lock()
_fill_compiled: Callable[..., None] | None = None


def _compiled_fill() -> Callable[..., None]:
    """The compiled form of `_fill`, made on first use since importing the compiler takes about a second."""
    global _fill_compiled
    if _fill_compiled is None:
        with _fill_lock:
            if _fill_compiled is None:
                _fill_compiled = _compile_fill()
    return _fill_compiled


def _compile_fill() -> Callable[..., None]:
    import numba

    word = numba.types.uint64
    stream = (word,) * 6
    signatures = [
        numba.types.void(numba.types.uint32[::1], numba.types.none, *stream),
        numba.types.void(numba.types.boolean[::1], word, *stream),
    ]
    return compiled(_fill, signatures)
