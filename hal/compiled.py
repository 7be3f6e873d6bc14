"""Machine code from Python functions: compiled by numba once, kept in its cache where one can be written.

It is not a wrapper of numba: importing it costs nothing (numba takes about a second to import, and is imported at
the first compilation), and kernels are written with numba's own tools. Invariant: a cache saves time and never
decides whether code runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger(__name__)


def compiled(function: Callable[..., Any], signatures: Sequence[Any]) -> Callable[..., Any]:
    """`function` compiled for `signatures`, without the interpreter lock and without reordering arithmetic.

    Division by zero gives an infinity or NaN, as in C. Raises what numba raises when it cannot compile at all.
    """
    import numba

    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        # The cache goes to NUMBA_CACHE_DIR, else next to the function's file, else into the user's cache folder.
        return numba.njit(list(signatures), cache=True, **options)(function)
    except Exception as problem:
        # No place to write to, a full disk, a damaged entry. If compiling itself is at fault, the second attempt
        # says so.
        logger.info(
            "%s is compiled anew in each process, for want of a cache: %s", function.__name__, problem
        )
        return numba.njit(list(signatures), **options)(function)
