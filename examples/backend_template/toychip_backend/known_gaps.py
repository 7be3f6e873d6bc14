"""The ops that the chip lacks, and the conformance tests that it therefore does not pass, with reasons."""

from hal.known_gaps import KnownGap

LACKING = frozenset({"aten.sort.default", "aten.topk.default"})

KNOWN_GAPS = tuple(KnownGap(f"test_ops.py::*[{op}-*]", "the chip has no sorting network") for op in sorted(LACKING))
