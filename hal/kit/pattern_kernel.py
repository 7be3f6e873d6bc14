"""A kernel with one function for each pattern of accumulation, made when the pattern is first run.

Whether an output is added to its memory or replaces it is known only at each run (`KernelCall.accumulate`), and code
differs between the two. A backend says how the function for a pattern is made; this class stores the functions. It is
not a cache of kernels, which `hal.kit.accounted_device` has. Invariant: each pattern's function is made once, whatever
the number of threads that ask for it.
"""

from __future__ import annotations

import abc
import threading
from typing import Generic, TypeVar

from hal.program import Kernel, Program

Function = TypeVar("Function")
"""What the backend makes for a pattern: most often a Python function of the call's arguments."""


class PatternKernel(Kernel, Generic[Function]):
    """A program and what the backend made of it, by pattern of accumulation."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._functions: dict[tuple[bool, ...], Function] = {}
        self._making = threading.Lock()

    @abc.abstractmethod
    def make(self, accumulate: tuple[bool, ...]) -> Function:
        """Make the function for a pattern.

        Args:
            accumulate: for each output, True where it is added to its memory. Empty where every output replaces what
                its memory holds; a pattern of nothing but False never comes here.
        """

    def function(self, accumulate: tuple[bool, ...]) -> Function:
        """The function for the pattern of a call (`KernelCall.accumulate`). Raises what `make` raises."""
        if not any(accumulate):
            accumulate = ()
        function = self._functions.get(accumulate)
        if function is None:
            with self._making:
                function = self._functions.get(accumulate)
                if function is None:
                    function = self._functions[accumulate] = self.make(accumulate)
        return function
