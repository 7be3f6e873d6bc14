"""The compiled half of the fused optimizers: one walk over a range, a block at a time, that moves each byte once.

For each block: inputs that are not float32 are widened into small buffers that stay in a core's own cache, one
float32 loop does the optimizer's arithmetic, and results are rounded back. Every loop does one simple thing, which
is what compilers turn into vector code.

It is not the interface (`relay.optim.fused` is, and imports this late, since importing numba takes about a second).
Invariant: what happens to an element depends on its own values, its 256-block, its place in the range and the key,
never on where a range was cut.

Arithmetic: nothing is contracted or reordered but where `fma` says so. For float32 states Adam and SGD take the
same steps as torch's fused kernels as their compiler contracted them, which differs between whole vectors and the
last `size % 8` elements: hence `vector_end`.
"""

# Kernels are straight-line arithmetic on many operands: annotations would be noise, and numba infers the types.
from __future__ import annotations

import numba
import numpy as np
from numba import types

from hal.numba_cache import compiled
from relay.optim import numba_intrinsics, split_kernels
from relay.optim.numba_intrinsics import (
    INFINITE,
    LINE,
    LOW_16,
    MAGNITUDE,
    as_float,
    bytes_at,
    doubles_at,
    fence,
    float_of_word,
    floats_at,
    fma,
    random_word,
    round_randomly,
    round_to_nearest,
    shorts_at,
    stack_floats,
    stream_bfloat16,
    stream_float16,
    widen,
    words_at,
)
from relay.optim.split_kernels import BLOCK, join_block, split_block

ROOM = 4 * BLOCK
GROUP = 256  # elements of an 8-bit state that share a scale

ABSENT, FLOAT32, BFLOAT16, FLOAT16, INT8, SPLIT = range(6)
ADAM, SGD, LION, LAMB_MOMENTS, LAMB_APPLY = range(5)

HALF = np.float32(0.5)
ONE = np.float32(1)
ZERO = np.float32(0)
MANTISSA_DROPPED = np.uint32(20)  # an 8-bit code keeps three mantissa bits of 23
TOP_MANTISSA = np.uint32(0x700000)  # 1.875, the largest mantissa of a code
LEAST_SCALE = np.uint32((127 - 90) << 23)
LARGEST_SCALE = np.uint32((127 + 126) << 23)
SIGNED_OFFSET = np.uint32((127 - 15) << 3)
UNSIGNED_OFFSET = np.uint32((127 - 31) << 3)
SUBNORMAL_STEP = np.float32(2.0**-17)
SUBNORMAL_INVERSE = np.float32(2.0**17)
WORD_FRACTION = np.float32(2.0**-16)

_inlined = numba.njit(nogil=True, error_model="numpy")


@_inlined
def _decode(signed, codes_at, scale, count, target):
    """One group of 8-bit codes to float32."""
    codes = bytes_at(codes_at, count)
    if signed:
        floats = floats_at(target, count)
        words = words_at(target, count)
        for i in range(count):
            code = np.uint32(codes[i]) & np.uint32(0x7F)
            words[i] = np.uint32((code + SIGNED_OFFSET) << MANTISSA_DROPPED)
        for i in range(count):
            code = np.int32(codes[i]) & np.int32(0x7F)
            value = floats[i] if code >= 8 else np.float32(code) * SUBNORMAL_STEP
            value = value * scale
            floats[i] = -value if codes[i] >= 128 else value
    else:
        floats = floats_at(target, count)
        words = words_at(target, count)
        for i in range(count):
            words[i] = np.uint32((np.uint32(codes[i]) + UNSIGNED_OFFSET) << MANTISSA_DROPPED)
        for i in range(count):
            floats[i] = floats[i] * scale


@_inlined
def _encode(signed, source, count, codes_at, first, key):
    """One group of float32 to 8-bit codes, rounded at random without bias; returns the scale.

    The scale is the power of two that lets the largest value fit: scaling is then exact, and a value that is
    already on the grid stays where it is.
    """
    words = words_at(source, count)
    floats = floats_at(source, count)
    codes = bytes_at(codes_at, count)
    largest = np.uint32(0)
    for i in range(count):
        largest = max(largest, np.uint32(words[i] & MAGNITUDE))
    if largest == 0:
        for i in range(count):
            codes[i] = 0
        return ZERO
    exponent = np.uint32(largest & INFINITE)
    if (largest & np.uint32(0x7FFFFF)) > TOP_MANTISSA:
        exponent = np.uint32(exponent + np.uint32(1 << 23))
    exponent = min(max(exponent, LEAST_SCALE), LARGEST_SCALE)
    scale = float_of_word(exponent)
    inverse = ONE / scale
    for i in range(count):
        floats[i] = floats[i] * inverse
    if signed:
        for i in range(count):
            word = words[i]
            noise = random_word(np.uint32(first + np.uint32(i)), key) >> np.uint32(16)
            normal = np.int32((np.uint32(word & MAGNITUDE) + (noise << np.uint32(4))) >> MANTISSA_DROPPED)
            normal -= np.int32(SIGNED_OFFSET)
            value = abs(floats[i])
            small = np.int32(value * SUBNORMAL_INVERSE + np.float32(np.int32(noise)) * WORD_FRACTION)
            code = normal if normal >= 8 else min(small, np.int32(8))
            codes[i] = np.uint8(np.uint32(code) | ((word >> np.uint32(24)) & np.uint32(0x80)))
    else:
        for i in range(count):
            noise = random_word(np.uint32(first + np.uint32(i)), key) & LOW_16
            code = np.int32((words[i] + (noise << np.uint32(4))) >> MANTISSA_DROPPED) - np.int32(UNSIGNED_OFFSET)
            codes[i] = np.uint8(max(code, np.int32(0)))
    return scale if largest < INFINITE else np.float32(np.nan)


@_inlined
def _load(kind, signed, state, scales_at, start, count, buffer):
    """The address of a block of a state as float32: where it lies, or `buffer`, filled."""
    if kind == FLOAT32:
        return state + 4 * start
    if kind == BFLOAT16:
        widen(True, state + 2 * start, count, buffer)
    elif kind == INT8:
        scales = floats_at(scales_at + 4 * (start // GROUP), (count + GROUP - 1) // GROUP)
        for group in range(scales.size):
            at = group * GROUP
            _decode(signed, state + start + at, scales[group], min(GROUP, count - at), buffer + 4 * at)
    return buffer


@_inlined
def _store(kind, signed, state, scales_at, start, count, buffer, key):
    """Round a block of a state back to where it lies. `buffer` is spent."""
    first = np.uint32(start & 0xFFFFFFFF)
    key = np.uint32(key + np.uint32(start >> 32) * np.uint32(0x9E3779B9))
    if kind == BFLOAT16:
        round_randomly(buffer, count, state + 2 * start, first, key)
    elif kind == INT8:
        scales = floats_at(scales_at + 4 * (start // GROUP), (count + GROUP - 1) // GROUP)
        for group in range(scales.size):
            at = group * GROUP
            scales[group] = _encode(
                signed,
                buffer + 4 * at,
                min(GROUP, count - at),
                state + start + at,
                np.uint32(first + np.uint32(at)),
                key,
            )


@_inlined
def _with_decay(gradient, parameter, decay):
    # Without the case of zero, a parameter that has overflowed would turn into NaN instead of staying infinite.
    return fma(parameter, decay, gradient) if decay != ZERO else gradient


@_inlined
def _first_moment(first, gradient, slope, from_first):
    return fma(slope, gradient - first, first if from_first else gradient)


@_inlined
def _moments(begin, end, in_vectors, parameters, gradients, firsts, seconds, c):
    """exp_avg and exp_avg_sq of Adam and AdamW."""
    factor, decay, l2, weight, beta2, rest2 = c[0], c[1], c[2], c[3], c[4], c[5]
    small = weight < HALF
    slope = weight if small else weight - ONE
    for i in range(begin, end):
        gradient = _with_decay(as_float(gradients[i]) * factor, parameters[i] * decay, l2)
        firsts[i] = _first_moment(firsts[i], gradient, slope, small)
        if in_vectors:
            seconds[i] = fma(rest2 * gradient, gradient, seconds[i] * beta2)
        else:
            seconds[i] = fma(seconds[i], beta2, rest2 * gradient * gradient)


@_inlined
def _adam_step(begin, end, parameters, firsts, seconds, c):
    decay, root_correction, epsilon, step_size = c[1], c[6], c[7], c[8]
    for i in range(begin, end):
        denominator = np.sqrt(seconds[i]) / root_correction + epsilon
        parameters[i] = parameters[i] * decay - step_size * firsts[i] / denominator


@_inlined
def _adam(count, parameters, gradients, firsts, seconds, c):
    """`_moments` and `_adam_step` in one loop, for whole vectors: a block of four arrays outgrows the nearest cache."""
    factor, decay, l2, weight, beta2, rest2 = c[0], c[1], c[2], c[3], c[4], c[5]
    root_correction, epsilon, step_size = c[6], c[7], c[8]
    small = weight < HALF
    slope = weight if small else weight - ONE
    for i in range(count):
        parameter = parameters[i] * decay
        gradient = _with_decay(as_float(gradients[i]) * factor, parameter, l2)
        first = _first_moment(firsts[i], gradient, slope, small)
        second = fma(rest2 * gradient, gradient, seconds[i] * beta2)
        firsts[i] = first
        seconds[i] = second
        parameters[i] = parameter - step_size * first / (np.sqrt(second) / root_correction + epsilon)


@_inlined
def _keep_largest(count, seconds, largest):
    for i in range(count):
        largest[i] = largest[i] if largest[i] > seconds[i] else seconds[i]


@_inlined
def _adam_rule(count, vectors, parameters, gradients, firsts, seconds, largest, start, c):
    if largest == 0:
        _adam(vectors, parameters, gradients, firsts, seconds, c)
        _moments(vectors, count, False, parameters, gradients, firsts, seconds, c)
        _adam_step(vectors, count, parameters, firsts, seconds, c)
    else:
        maxima = floats_at(largest + 4 * start, count)
        _moments(0, vectors, True, parameters, gradients, firsts, seconds, c)
        _moments(vectors, count, False, parameters, gradients, firsts, seconds, c)
        _keep_largest(count, seconds, maxima)
        _adam_step(0, count, parameters, firsts, maxima, c)


@_inlined
def _sgd(count, vectors, parameters, gradients, momenta, has_momentum, first_step, nesterov, c):
    factor, l2, momentum, rest, rate = c[0], c[1], c[2], c[3], c[4]
    if not has_momentum:
        for i in range(count):
            gradient = _with_decay(gradients[i] * factor, parameters[i], l2)
            parameters[i] = fma(gradient, -rate, parameters[i])
        return
    if first_step:
        for i in range(count):
            momenta[i] = _with_decay(gradients[i] * factor, parameters[i], l2)
    else:
        for i in range(vectors):
            gradient = _with_decay(gradients[i] * factor, parameters[i], l2)
            momenta[i] = fma(gradient, rest, momenta[i] * momentum)
        for i in range(vectors, count):
            gradient = _with_decay(gradients[i] * factor, parameters[i], l2)
            momenta[i] = fma(momenta[i], momentum, gradient * rest)
    if nesterov:
        for i in range(count):
            gradient = _with_decay(gradients[i] * factor, parameters[i], l2)
            parameters[i] = fma(fma(momenta[i], momentum, gradient), -rate, parameters[i])
    else:
        for i in range(count):
            parameters[i] = fma(momenta[i], -rate, parameters[i])


@_inlined
def _lion(count, parameters, gradients, momenta, c):
    factor, decay, beta1, rest1, beta2, rest2, rate = c[0], c[1], c[2], c[3], c[4], c[5], c[6]
    for i in range(count):
        gradient = gradients[i] * factor
        direction = fma(momenta[i], beta1, gradient * rest1)
        sign = (ONE if direction > ZERO else ZERO) - (ONE if direction < ZERO else ZERO)
        parameters[i] = fma(sign, -rate, parameters[i] * decay)
        momenta[i] = fma(momenta[i], beta2, gradient * rest2)


@_inlined
def _lamb_direction(parameter, first, second, c):
    return _with_decay(first / c[10] / (np.sqrt(second) / c[6] + c[7]), parameter, c[9])


@_inlined
def _squares(count, values):
    """The sum of squares in float64, in sixteen lanes so that it vectorises."""
    lanes = np.zeros(16, np.float64)
    whole = count - count % 16
    for start in range(0, whole, 16):
        for lane in range(16):
            value = np.float64(values[start + lane])
            lanes[lane] += value * value
    for i in range(whole, count):
        lanes[i - whole] += np.float64(values[i]) * np.float64(values[i])
    return lanes.sum()


@_inlined
def _lamb_norms(count, parameters, firsts, seconds, c, directions, sums):
    """Squared norms of the parameters and of the direction they are to go."""
    for i in range(count):
        directions[i] = _lamb_direction(parameters[i], firsts[i], seconds[i], c)
    sums[0] = _squares(count, parameters)
    sums[1] = _squares(count, directions)


@_inlined
def _lamb_apply(count, parameters, firsts, seconds, c):
    for i in range(count):
        direction = _lamb_direction(parameters[i], firsts[i], seconds[i], c)
        parameters[i] = fma(direction, -c[8], parameters[i])


def _update(
    rule, begin, end, vector_end, flags,
    master, gradient, gradient_kind,
    first, first_kind, first_scales, second, second_kind, second_scales, largest,
    weight, weight_kind, tie_flags, ties, constants, sums, first_key, second_key,
):  # fmt: skip
    """One rule on elements `begin` to `end`. Operands are addresses; a kind says what lies there.

    Where `weight_kind` is SPLIT, the float32 weights are in two halves, at `weight` and `master`.
    """
    gradient_buffer = stack_floats(ROOM)
    first_buffer = gradient_buffer + 4 * BLOCK
    second_buffer = first_buffer + 4 * BLOCK
    master_buffer = second_buffer + 4 * BLOCK
    c = floats_at(constants, 16)
    for start in range(begin, end, BLOCK):
        count = min(BLOCK, end - start)
        vectors = max(min(count, vector_end - start), 0)
        master_at = master + 4 * start
        if weight_kind == SPLIT:
            join_block(weight, master, tie_flags, ties, start, count, master_buffer)
            master_at = master_buffer
        parameters = floats_at(master_at, count)
        gradient_at = gradient + 4 * start
        # Adam, the rule that most wait for, widens a bfloat16 on the way.
        if gradient_kind == FLOAT16 or (gradient_kind == BFLOAT16 and rule != ADAM):
            widen(gradient_kind == BFLOAT16, gradient + 2 * start, count, gradient_buffer)
            gradient_at = gradient_buffer
        gradients = floats_at(gradient_at, count)
        first_at = _load(first_kind, True, first, first_scales, start, count, first_buffer)
        firsts = floats_at(first_at, count)
        second_at = _load(second_kind, False, second, second_scales, start, count, second_buffer)
        seconds = floats_at(second_at, count)
        if rule == ADAM:
            if gradient_kind == BFLOAT16:
                brains = shorts_at(gradient + 2 * start, count)
                _adam_rule(count, vectors, parameters, brains, firsts, seconds, largest, start, c)
            else:
                _adam_rule(count, vectors, parameters, gradients, firsts, seconds, largest, start, c)
        elif rule == SGD:
            _sgd(count, vectors, parameters, gradients, firsts, flags & 1, flags & 2, flags & 4, c)
        elif rule == LION:
            _lion(count, parameters, gradients, firsts, c)
        elif rule == LAMB_MOMENTS:
            _moments(0, count, True, parameters, gradients, firsts, seconds, c)
        else:
            _lamb_apply(count, parameters, firsts, seconds, c)
        if rule != LAMB_APPLY:
            _store(first_kind, True, first, first_scales, start, count, first_buffer, first_key)
            _store(second_kind, False, second, second_scales, start, count, second_buffer, second_key)
        if rule == LAMB_MOMENTS:
            # From the states as they were rounded, for that is what the second walk will find.
            _load(first_kind, True, first, first_scales, start, count, first_buffer)
            _load(second_kind, False, second, second_scales, start, count, second_buffer)
            block_sums = doubles_at(sums + 16 * (start // BLOCK), 2)
            _lamb_norms(count, parameters, firsts, seconds, c, floats_at(gradient_buffer, count), block_sums)
        elif weight_kind == SPLIT:
            # From the buffer, since in the halves a tie could not be told.
            split_block(master_buffer, weight, master, tie_flags, ties, start, count)
        elif weight_kind in (BFLOAT16, FLOAT16):
            weight_at = weight + 2 * start
            streamed = count - count % LINE if weight_at % (2 * LINE) == 0 else 0
            for i in range(0, streamed, LINE):
                if weight_kind == BFLOAT16:
                    stream_bfloat16(master + 4 * (start + i), weight_at + 2 * i)
                else:
                    stream_float16(master + 4 * (start + i), weight_at + 2 * i)
            rest = master + 4 * (start + streamed)
            round_to_nearest(weight_kind == BFLOAT16, rest, count - streamed, weight_at + 2 * streamed)
    fence()


_SOURCES = [numba_intrinsics.__file__, split_kernels.__file__]
update = compiled(_update, [types.void(*(types.intp,) * 21, types.uint32, types.uint32)], _SOURCES)
