"""The op table over numpy: the arithmetic of the reference device, and a first kernel for a new backend.

It is not a device: memory, queues and events are elsewhere. Invariant: sums are taken in float64, whatever dtype the
arithmetic has, because numpy adds up in the dtype of its operands with an error that grows with their number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hal import random as counter_random
from hal.kit.arrays.dtypes import Arrays
from hal.numba_cache import compiled


def as_array(tensor: torch.Tensor) -> Any:
    """The memory of a contiguous host tensor as a numpy array that shares it; bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


def numpy_arrays(real: type[np.floating[Any]]) -> Arrays:
    """The op table over numpy arrays.

    Args:
        real: the dtype of floating-point arithmetic, such as `numpy.float32`. Sums are float64 always.
    """
    draws = {name: _draw(getattr(counter_random, name)) for name in ("keep_mask", "uniform", "normal")}
    return Arrays(np, _erf, draws, np.dtype(real), np.dtype(np.float64))


def numpy_constants(arrays: Arrays, constants: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A program's constants as numpy arrays in the dtypes that `arrays` computes in, by name."""
    return {
        name: arrays.load(as_array(constant.detach().contiguous()), constant.dtype)
        for name, constant in constants.items()
    }


def _draw(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda *args: function(*args).numpy()


def _erf(values: Any) -> Any:
    """The error function, which numpy lacks: the C library's, over an array."""
    flat = np.ascontiguousarray(values).reshape(-1)
    result = np.empty_like(flat)
    _compiled_erf()(flat, result)
    return result.reshape(values.shape)


@functools.cache
def _compiled_erf() -> Callable[..., None]:
    import numba

    arrays = [numba.types.float32[::1], numba.types.float64[::1]]
    return compiled(_fill_erf, [numba.types.void(array, array) for array in arrays])


def _fill_erf(values: Any, result: Any) -> None:
    for index in range(values.size):
        result[index] = math.erf(values[index])
