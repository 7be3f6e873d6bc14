"""Machine code from Python functions: compiled by numba once, kept in its cache where one can be written.

It is not a wrapper of numba: importing it costs nothing (numba takes about a second to import, and is imported at
the first compilation), and kernels are written with numba's own tools. Invariant: a cache saves time and never
decides whether code runs, nor which.

numba writes which file holds a function's code before it writes that file. Whoever reads in between, or after a
process that died there, is given what the file held before: code of an older source, with other constants or another
order of arguments. So code of each source has files of its own here.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def compiled(
    function: Callable[..., Any], signatures: Sequence[Any], sources: Sequence[str | None] = ()
) -> Callable[..., Any]:
    """`function` compiled for `signatures`, without the interpreter lock and without reordering arithmetic.

    `sources` are the files, besides its own, whose code it takes in. Division by zero gives an infinity or NaN, as in
    C. Raises what numba raises when it cannot compile at all.
    """
    import numba

    # numba names its files by this, and the function's line.
    function.__qualname__ = f"{function.__name__}_{_fingerprint([inspect.getsourcefile(function), *sources])}"
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        # The cache goes to NUMBA_CACHE_DIR, else next to the function's file, else into the user's cache folder.
        return numba.njit(list(signatures), cache=True, **options)(function)
    except Exception as problem:
        # No place to write to, a full disk, a damaged entry. If compiling itself is at fault, the second attempt
        # says so.
        logger.info("%s is compiled anew in each process, for want of a cache: %s", function.__name__, problem)
        return numba.njit(list(signatures), **options)(function)


def _fingerprint(sources: Sequence[str | None]) -> str:
    """Of what these files hold; a file that cannot be read (in an archive, say) counts as empty."""
    digest = hashlib.sha256()
    for source in sources:
        try:
            digest.update(Path(source or "").read_bytes())
        except OSError:
            continue
    return digest.hexdigest()[:16]
