"""The simulated driver, in place of a vendor's library. Every call blocks; memory is named by handles.

Delete this file when you have a real driver. It does not use the relay.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np


class Chip:
    """A chip with memory of its own, which the host reaches by copies alone."""

    def __init__(self) -> None:
        self._memory: dict[int, Any] = {}
        self._handles = itertools.count(1)

    def allocate(self, size: int) -> int:
        """A handle of `size` bytes. Raises MemoryError."""
        memory = np.empty(size, np.uint8)
        handle = next(self._handles)
        self._memory[handle] = memory
        return handle

    def release(self, handle: int) -> None:
        """Free the memory. A later use of the handle is an error."""
        del self._memory[handle]

    def write(self, handle: int, offset: int, data: Any) -> None:
        self._memory[handle][offset : offset + data.size] = data

    def read(self, handle: int, offset: int, data: Any) -> None:
        data[...] = self._memory[handle][offset : offset + data.size]

    def array(self, handle: int, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """Memory as a kernel sees it."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self._memory[handle][offset : offset + size].view(dtype).reshape(shape)

    def launch(self, function: Callable[..., None], arguments: list[Any]) -> None:
        with np.errstate(all="ignore"):
            function(*arguments)
