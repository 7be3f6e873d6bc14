"""The pretend driver: what a vendor's library would give you. Every call blocks; memory is named by handles.

Delete this file when you have a real driver. It knows nothing of the relay.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np


class ChipError(Exception):
    """What the driver raises."""


class Chip:
    """A chip with memory of its own, which the host reaches by copies alone."""

    MEMORY = 1 << 32  # bytes

    def __init__(self) -> None:
        self._memory: dict[int, Any] = {}
        self._handles = itertools.count(1)

    def allocate(self, size: int) -> int:
        """A handle of `size` bytes."""
        if size > self.MEMORY - sum(memory.size for memory in list(self._memory.values())):
            raise ChipError("CHIP_OUT_OF_MEMORY")
        handle = next(self._handles)
        self._memory[handle] = np.empty(size, np.uint8)
        return handle

    def release(self, handle: int) -> None:
        """Give the memory back: whoever still used it would crash."""
        del self._memory[handle]

    def write(self, handle: int, offset: int, data: Any) -> None:
        """Host bytes to the chip."""
        self._memory[handle][offset : offset + data.size] = data

    def read(self, handle: int, offset: int, data: Any) -> None:
        """The chip's bytes to the host."""
        data[...] = self._memory[handle][offset : offset + data.size]

    def launch(self, function: Callable[..., None], arguments: list[Any]) -> None:
        """Run a compiled function. Arguments are (handle, offset, shape, dtype) for memory, or plain values."""
        with np.errstate(all="ignore"):
            function(*[self._operand(*entry) if isinstance(entry, tuple) else entry for entry in arguments])

    def _operand(self, handle: int, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self._memory[handle][offset : offset + size].view(dtype).reshape(shape)
