"""Known gaps: tests of the conformance suite that a device does not pass, each with its reason.

A backend lists them in `Backend.known_gaps`, best from a file of its own. The suite does not run them unless
`--verify-known-gaps` is given; then it runs them and fails where one passes, so that the list stays true. They are not
a way to leave out what fails now and then. Invariant: every known gap has a reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class KnownGap:
    """Tests that a device does not pass. In patterns `*` and `?` are wildcards; brackets stand for themselves.

    Args:
        test: a pattern of the test's file and name, such as `test_ops.py::*[aten.topk.default-*]`.
        reason: why the device does not pass these tests, for the users of the device.
        device: a pattern of the device string, such as `onnx:*`; unless given, every device of the backend.

    Raises:
        ValueError: the reason is empty.
    """

    test: str
    reason: str
    device: str = "*"

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ValueError(
                f"the known gap {self.test!r} has no reason. Give the reason why the device does not pass it."
            )

    def covers(self, test: str, device: str) -> bool:
        """Whether both patterns match, the test given as `file::name` and the device as its device string."""
        return _matches(self.test, test) and _matches(self.device, device)


def _matches(pattern: str, text: str) -> bool:
    expression = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(expression, text) is not None
