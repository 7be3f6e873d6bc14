"""What a backend cannot do yet, as data: tests of the conformance suite that it does not pass, each with its reason.

A backend keeps its gaps in a file of its own and names them in `Backend.gaps`. The suite does not run them; its verify
mode does, and fails where one has closed, so that the table stays true. A gap without a reason cannot be written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gap:
    """Tests that a device does not pass. `*` and `?` are wildcards; brackets are themselves.

    `test` is matched with a test's file and name, such as `test_ops.py::*[aten.topk.default-*]`, and `device` with the
    device string. Raises ValueError where the reason is empty.
    """

    test: str
    reason: str
    device: str = "*"

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError(f"the gap {self.test!r} has no reason. Say why the device does not pass it.")

    def covers(self, test: str, device: str) -> bool:
        """Whether it speaks of that test on that device."""
        return _matches(self.test, test) and _matches(self.device, device)


def _matches(pattern: str, text: str) -> bool:
    expression = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(expression, text) is not None
