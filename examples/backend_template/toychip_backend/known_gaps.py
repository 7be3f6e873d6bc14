"""What the chip cannot do: ops that it lacks, and so the tests that it does not pass, with reasons."""

from hal.known_gaps import KnownGap

LACKING = frozenset({"aten.sort.default", "aten.topk.default"})

KNOWN_GAPS = tuple(KnownGap(f"test_ops.py::*[{op}-*]", "the chip has no sorting network") for op in sorted(LACKING))
