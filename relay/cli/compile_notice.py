"""What `relay train` says while it compiles: a word in the progress bar, or a line where there is no bar yet.

The trainer says so to the log (logger `relay`, level info); this turns it into something to look at. Invariant: the
logger is afterwards as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

COMPILING = "compiling for "
"""How the trainer's message begins."""


class CompileNotice(logging.Handler):
    """Shows the trainer's message in `bar`, or as a line by `tell` while there is none."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.tell = tell
        self.bar: tqdm | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logger."""
        message = record.getMessage()
        if not message.startswith(COMPILING):
            return
        if self.bar is not None:
            self.bar.set_postfix_str("compiling", refresh=True)
        else:
            self.tell(message)


@contextmanager
def compile_notices(tell: Callable[[str], None]) -> Iterator[CompileNotice]:
    """While open, show when the trainer compiles."""
    logger = logging.getLogger("relay")
    notice, level = CompileNotice(tell), logger.level
    logger.addHandler(notice)
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    try:
        yield notice
    finally:
        logger.removeHandler(notice)
        logger.setLevel(level)
