"""PyTorch's own samples of operators and modules on devices that execute core graphs, and on the simulator.

Each is equal to eager PyTorch within `device_comparison.NEAR` and `FAR`, or refused by name before anything runs, as
the list of `device_refusals` allows. A fixed sample runs by default; RELAY_FULL_SWEEP=1 (`make test-full`) runs them
all, in parts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from hal import registry
from hal.device import Device
from hal.errors import Unavailable
from hal.ops import OPS as OPS_OF_THE_TABLE
from tests.relay.capture.sweep.device_comparison import verdicts
from tests.relay.capture.sweep.device_refusals import OPS, allowed
from tests.relay.capture.sweep.sample_layers import Sample, module_samples, operator_samples, sample_named

PARTS = 12
FULL = os.environ.get("RELAY_FULL_SWEEP") == "1"
DEVICES = ("numpy", "onnx:cpu", "sim", "opencl")

FIXED = (
    "addmm/0", "amax/1", "cdist/0", "cross/1", "cumprod/0", "cumprod/1", "fft.rfft/1", "index_put/1", "kthvalue/0",
    "linalg.svd/0", "masked_select/0", "nn.functional.conv2d/1", "nn.functional.dropout/1",
    "nn.functional.interpolate.bicubic/1", "nn.functional.soft_margin_loss/0", "scatter_add/1", "var_mean/1",
    "nn.BatchNorm2d/0", "nn.CrossEntropyLoss/7", "nn.LayerNorm/1", "nn.MultiheadAttention/5",
)  # fmt: skip
ON_OPENCL = ("cumprod/0", "index_put/1", "linalg.svd/0", "nn.LayerNorm/1")
"""Those that OpenCL runs by default too, as its compiler takes a tenth of a second for each kernel."""


@pytest.fixture(scope="module")
def opened() -> Iterator[dict[str, Device]]:
    found = {}
    for name in DEVICES:
        with contextlib.suppress(Unavailable):
            found[name] = registry.open(name)
    yield found
    for device in found.values():
        device.close()


def judged(samples: list[Sample], opened: dict[str, Device]) -> tuple[list[str], Counter[tuple[str, str]]]:
    """What is neither equal nor refused as the list allows, and how many samples are of which kind on which device."""
    wrong, kinds = [], Counter[tuple[str, str]]()
    for sample in samples:
        for name, found in verdicts(sample, opened).items():
            kinds[name, found.kind] += 1
            if not (found.kind in ("equal", "no sample") or (found.kind == "refused" and allowed(found.detail))):
                wrong.append(f"{sample.name} on {name}: {found.kind}. {found.detail}")
    return wrong, kinds


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.sample(4)
def test_a_sample_is_eager_pytorchs_on_core_devices_or_is_refused_by_name(name: str, opened: dict[str, Device]) -> None:
    asked = {device: one for device, one in opened.items() if device != "opencl" or name in ON_OPENCL}
    wrong, kinds = judged([sample_named(name)], asked)
    assert wrong == []
    assert all(kind != "no sample" for _, kind in kinds)


def test_no_op_of_the_list_is_one_of_the_table() -> None:
    assert OPS & OPS_OF_THE_TABLE.keys() == set()


@pytest.mark.skipif(not FULL, reason="part of make test-full")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_sample_is_eager_pytorchs_on_core_devices_or_is_refused_by_name(
    part: int, opened: dict[str, Device]
) -> None:
    wrong, kinds = judged(list(all_samples())[part::PARTS], opened)
    assert wrong == []
    for name in opened:
        tried = kinds[name, "equal"] + kinds[name, "refused"]
        assert kinds[name, "equal"] >= 0.75 * tried, f"too few samples run on {name}: {kinds}"


@pytest.mark.skipif(not FULL, reason="part of make test-full")
def test_600_samples_of_operators_are_tried() -> None:
    assert len([sample for sample in operator_samples() if not sample.name.endswith("_/0")]) >= 600


def all_samples() -> Iterator[Sample]:
    """Two samples of each operator, without the forms in place, and all of each module."""
    operators = (sample for sample in operator_samples() if not sample.name.endswith("_/0"))
    return itertools.chain(operators, module_samples())
