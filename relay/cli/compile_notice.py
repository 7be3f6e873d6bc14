"""The notice that `relay train` shows while the model is compiled: in the progress bar, or as a line.

The model compiler logs a record with the attribute `event="compile"` (logger `relay`, level info), and the session one
with `event="residents"` about the layers that stay on the device; this handler shows both, and warnings and errors:
with a handler, logging prints those no more by itself. It compiles nothing.
Invariant: the logger is afterwards as it was before.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


class CompileNotice(logging.Handler):
    """Shows records of compilation in `bar`, or passes them to `log` as a line while there is no bar."""

    def __init__(self, log: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self.log = log
        self.bar: tqdm | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Called by the logger for each record."""
        event = getattr(record, "event", None)
        if event == "compile" and self.bar is not None:
            self.bar.set_postfix_str("compiling", refresh=True)
        elif event not in ("compile", "residents") and record.levelno < logging.WARNING:
            return
        elif self.bar is not None:
            self.bar.write(record.getMessage(), file=sys.stderr)
        else:
            self.log(record.getMessage())


@contextmanager
def compile_notices(log: Callable[[str], None]) -> Iterator[CompileNotice]:
    """Show records of compilation inside the `with` block."""
    logger = logging.getLogger("relay")
    notice, level = CompileNotice(log), logger.level
    logger.addHandler(notice)
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    try:
        yield notice
    finally:
        logger.removeHandler(notice)
        logger.setLevel(level)
