"""The table of all rewrites of ATen ops to core form.

Part of the core lowering (`relay.capture.core.lowering`). Ops that have a row in `hal.ops` and no entry here need none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relay.capture.core.arithmetic import ARITHMETIC
from relay.capture.core.builder import Builder
from relay.capture.core.call import Call
from relay.capture.core.indexing import INDEXING
from relay.capture.core.mathematics import MATHEMATICS
from relay.capture.core.reductions import REDUCTIONS
from relay.capture.core.views import VIEWS

REWRITES: dict[Any, Callable[[Builder, Call], Any]] = {**VIEWS, **ARITHMETIC, **MATHEMATICS, **REDUCTIONS, **INDEXING}
