"""What numba lacks, for kernels that work on addresses: fused multiply-add, 16-bit floats, streaming stores.

No arithmetic of an optimizer is here. Addresses are plain integers; nothing checks them.
"""

from __future__ import annotations

import numba
import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.extending import intrinsic

_features = binding.get_host_cpu_features()
if not all(_features.get(feature, True) for feature in ("fma", "f16c")):
    raise ImportError("this processor has no fused multiply-add or no half-precision conversions (FMA, F16C)")

_compiled = numba.njit(nogil=True, error_model="numpy")

LOW_16 = np.uint32(0xFFFF)
MAGNITUDE = np.uint32(0x7FFFFFFF)
INFINITE = np.uint32(0x7F800000)
NOT_A_NUMBER = np.uint32(0x7FC00000)

LINE = 32  # 16-bit numbers in 64 bytes


@intrinsic
def fma(typing_context, a, b, c):
    """a * b + c rounded once."""

    def generate(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def pointer(typing_context, address):
    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), generate


@intrinsic
def stack_floats(typing_context, count):
    """The address of room for `count` float32, a constant, in the caller's frame.

    Not an array of numba's: those are freed after the last use of their name, and this is used by address.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, arguments):
        with builder.goto_entry_block():
            room = builder.alloca(ir.ArrayType(ir.FloatType(), count.literal_value))
        room.align = 64
        return builder.ptrtoint(room, context.get_value_type(types.intp))

    return types.intp(count), generate


@intrinsic
def as_float(typing_context, value):
    """A float32 as it is, or the one whose upper half these 16 bits are (a bfloat16)."""

    def generate(context, builder, signature, arguments):
        if signature.args[0] == types.float32:
            return arguments[0]
        word = builder.shl(builder.zext(arguments[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(word, ir.FloatType())

    if value in (types.float32, types.uint16):
        return types.float32(value), generate
    return None


def _streamed(narrow):
    """An intrinsic that stores LINE narrowed numbers past the caches: a plain store would first read the line."""

    def typed(typing_context, source, target):
        def generate(context, builder, signature, arguments):
            line = ir.VectorType(ir.FloatType(), LINE)
            narrowed = narrow(builder, builder.load(builder.inttoptr(arguments[0], line.as_pointer()), align=4))
            target_at = builder.inttoptr(arguments[1], narrowed.type.as_pointer())
            store = builder.store(narrowed, target_at, align=2 * LINE)
            store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    return intrinsic(typed)


def _narrow_to_bfloat16(builder, values):
    """As `round_to_nearest` does it."""
    kind = ir.VectorType(ir.IntType(32), LINE)

    def constant(number):
        return ir.Constant(kind, [int(number)] * LINE)

    word = builder.bitcast(values, kind)
    odd = builder.and_(builder.lshr(word, constant(16)), constant(1))
    rounded = builder.add(builder.add(word, constant(0x7FFF)), odd)
    ordered = builder.icmp_unsigned("<=", builder.and_(word, constant(MAGNITUDE)), constant(INFINITE))
    chosen = builder.lshr(builder.select(ordered, rounded, constant(NOT_A_NUMBER)), constant(16))
    return builder.trunc(chosen, ir.VectorType(ir.IntType(16), LINE))


def _narrow_to_float16(builder, values):
    return builder.fptrunc(values, ir.VectorType(ir.HalfType(), LINE))


stream_bfloat16 = _streamed(_narrow_to_bfloat16)
stream_float16 = _streamed(_narrow_to_float16)


@intrinsic
def fence(typing_context):
    """Streamed stores are seen by whoever is told that they were made."""

    def generate(context, builder, signature, arguments):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def float_of_word(typing_context, word):
    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def float_of_half(typing_context, bits):
    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def half_of_float(typing_context, value):
    """Rounded to nearest, ties to even."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@_compiled
def floats_at(address, count):
    return numba.carray(pointer(address), (count,), np.float32)


@_compiled
def doubles_at(address, count):
    return numba.carray(pointer(address), (count,), np.float64)


@_compiled
def words_at(address, count):
    return numba.carray(pointer(address), (count,), np.uint32)


@_compiled
def shorts_at(address, count):
    return numba.carray(pointer(address), (count,), np.uint16)


@_compiled
def bytes_at(address, count):
    return numba.carray(pointer(address), (count,), np.uint8)


@_compiled
def widen(brain, source, count, target):
    """`count` float32 at address `target` from bfloat16 (`brain`) or float16 at address `source`."""
    shorts = shorts_at(source, count)
    if brain:
        words = words_at(target, count)
        for i in range(count):
            words[i] = np.uint32(shorts[i]) << np.uint32(16)
    else:
        floats = floats_at(target, count)
        for i in range(count):
            floats[i] = float_of_half(shorts[i])


@_compiled
def round_to_nearest(brain, source, count, target):
    """bfloat16 (`brain`) or float16 at address `target` from float32, to nearest, ties to even."""
    shorts = shorts_at(target, count)
    if brain:
        # In integers: the processor's own instruction would flush subnormal numbers to zero.
        words = words_at(source, count)
        for i in range(count):
            word = words[i]
            rounded = np.uint32(word + np.uint32(0x7FFF) + ((word >> np.uint32(16)) & np.uint32(1)))
            word = rounded if (word & MAGNITUDE) <= INFINITE else NOT_A_NUMBER
            shorts[i] = np.uint16(word >> np.uint32(16))
    else:
        floats = floats_at(source, count)
        for i in range(count):
            shorts[i] = half_of_float(floats[i])


@_compiled
def random_word(element, key):
    """32 bits from an element's place and a key: two rounds of multiply and xor-shift (C. Wellons, lowbias32)."""
    word = np.uint32(element + key)
    word = np.uint32((word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D))
    word = np.uint32((word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(word ^ (word >> np.uint32(16)))


@_compiled
def round_randomly(source, count, target, first, key):
    """bfloat16 from float32, up or down with the probabilities that make the mean exact."""
    words = words_at(source, count)
    shorts = shorts_at(target, count)
    for i in range(count):
        word = words[i]
        rounded = np.uint32(word + (random_word(np.uint32(first + np.uint32(i)), key) & LOW_16))
        word = rounded if (word & MAGNITUDE) <= INFINITE else NOT_A_NUMBER
        shorts[i] = np.uint16(word >> np.uint32(16))
