"""The conformance tests that simulated machines do not pass, derived from the catalogue of presets.

`sim`, a generic machine, passes all of them. A preset charges memory in the pieces of its allocator, and refuses
arithmetic that its hardware does not have, as the hardware would.
"""

from __future__ import annotations

from collections.abc import Iterator

from hal import spec
from hal.known_gaps import KnownGap
from hal.spec import Spec

_SIZES = (
    "test_memory.py::test_a_buffer_has_the_size_that_was_asked_for[1]",
    "test_memory.py::test_a_buffer_has_the_size_that_was_asked_for[63]",
    "test_memory.py::test_a_buffer_has_the_size_that_was_asked_for[64]",
    "test_memory.py::test_a_buffer_has_the_size_that_was_asked_for[65]",
    "test_memory.py::test_a_buffer_has_the_size_that_was_asked_for[1000]",
    "test_memory.py::test_beyond_the_capacity_is_out_of_memory_with_its_figures",
    "test_memory.py::test_the_peak_is_the_most_there_was",
)
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_PRODUCTS = ("mm", "bmm", "addmm", "convolution", "convolution_backward")
_IN_FLOAT32 = (
    "test_memory.py::test_a_kernel_whose_workspace_does_not_fit_is_refused",
    "test_programs.py::test_a_program_gives_what_its_ops_give_one_by_one[feed forward]",
    "test_programs.py::test_a_program_gives_what_its_ops_give_one_by_one[attention]",
    "test_programs.py::test_one_run_after_another_gives_the_same_bits",
    "test_programs.py::test_inputs_are_not_written_to",
    "test_training.py::*",
)


def all_known_gaps() -> tuple[KnownGap, ...]:
    """Of all presets."""
    return tuple(gap for name, device in spec.presets("device").items() for gap in _of(f"sim:{name}*", device))


def _of(device: str, described: Spec) -> Iterator[KnownGap]:
    piece = int(described["granularity"])
    for test in _SIZES if piece > 1 else ():
        yield KnownGap(test, f"its allocator gives memory in pieces of {piece} bytes, and those are charged", device)
    for kind, dtype in _DTYPES.items():
        if described.computes(kind):
            continue
        reason = f"{described.title} does no arithmetic in {kind}"
        for op in _PRODUCTS:
            yield KnownGap(f"test_ops.py::*[aten.{op}.default-{dtype}]", reason, device)
        tests = _IN_FLOAT32 if kind == "fp32" else (f"test_programs.py::test_half_*rounded*[torch.{dtype}]",)
        for test in tests:
            yield KnownGap(test, reason, device)
