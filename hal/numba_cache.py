"""Machine code from Python functions: compiled by numba, and cached on disk where a folder can be written.

It is not a wrapper of numba: importing it costs nothing (numba takes about a second to import, and is imported at the
first compilation), and kernels are written with numba's own tools. Invariant: a cache saves time and never decides
whether code runs, nor which code.

numba writes the index of a function's cache before the file with its code. A process that reads in between, or after
another process died there, gets the old content of the file: code of an older source, with other constants or another
order of arguments. So the code of each source has files of its own here.
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
    """Compile a function. The code runs without the interpreter lock and does not reorder arithmetic.

    Division by zero gives an infinity or NaN, as in C.

    Args:
        function: the Python function.
        signatures: numba signatures that it is compiled for.
        sources: files, besides its own, whose code it includes.

    Raises:
        Exception: any error of numba's, if the function cannot be compiled.
    """
    import numba

    # numba names its files by this, and the function's line.
    function.__qualname__ = f"{function.__name__}_{_fingerprint([inspect.getsourcefile(function), *sources])}"
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        # The cache goes to NUMBA_CACHE_DIR, else next to the function's file, else into the user's cache folder.
        return numba.njit(list(signatures), cache=True, **options)(function)
    except Exception as problem:
        # No folder to write to, a full disk, a damaged entry. If compiling itself fails, the second attempt raises.
        logger.info("%s is compiled in each process, because its cache cannot be used: %s", function.__name__, problem)
        return numba.njit(list(signatures), **options)(function)


def _fingerprint(sources: Sequence[str | None]) -> str:
    """A hash of the files' contents; a file that cannot be read (in an archive, say) counts as empty."""
    digest = hashlib.sha256()
    for source in sources:
        try:
            digest.update(Path(source or "").read_bytes())
        except OSError:
            continue
    return digest.hexdigest()[:16]
