"""PyTorch's own samples of operators and modules train as layers of a relayed model as they do in plain PyTorch.

Loss, gradients and buffers are equal to the bit, or the sample is on the list of `refusals` and refused in those
words. A fixed sample runs by default; RELAY_FULL_SWEEP=1 (`make test-full`) runs them all, in parts.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.relay.capture.sweep.comparison import verdict
from tests.relay.capture.sweep.refusals import REFUSED, refusal_of
from tests.relay.capture.sweep.sample_layers import Operator, Sample, all_samples, sample_named

FULL = os.environ.get("RELAY_FULL_SWEEP") == "1"
PARTS = 60

FIXED = (
    "add/1", "abs_/0", "addmm/0", "amax/1", "as_strided_scatter/1", "bernoulli/1", "copysign/0", "cov/1", "cumprod/1",
    "fft.rfft/1", "index_put/1", "linalg.svd/0", "masked.prod/1", "masked_select/0", "nn.functional.batch_norm/1",
    "nn.functional.conv2d/1", "nn.functional.dropout/1", "nn.functional.hardshrink/0",
    "nn.functional.interpolate.bicubic/1", "nn.functional.max_unpool1d.grad/0", "nn.functional.rrelu/0",
    "norm.fro/1", "normal/0", "sort/1", "tensor_split/0", "to_sparse/0", "unsqueeze_/0", "var_mean/1",
    "view_as_complex/0", "nn.BatchNorm2d/0", "nn.CrossEntropyLoss/7", "nn.LayerNorm/1", "nn.LazyConv2d/0",
    "nn.LinearCrossEntropyLoss/215", "nn.LSTM/3", "nn.MultiheadAttention/5", "nn.PReLU/1",
    "nn.TransformerEncoderLayer/2", "sparse.sampled_addmm/1",
)  # fmt: skip
"""Some of each kind: in place, by data, complex, sparse, random, with state, lazy, recurrent."""

if not hasattr(nn, "LinearCrossEntropyLoss"):  # before torch 2.13
    FIXED = tuple(name for name in FIXED if "LinearCrossEntropyLoss" not in name)


def judged(samples: list[Sample]) -> tuple[list[str], Counter[str]]:
    """What is not as expected of some samples, and how many are of which kind."""
    wrong, kinds = [], Counter[str]()
    for sample in samples:
        found, refusal = verdict(sample), refusal_of(sample.name)
        kinds[found.kind] += 1
        as_expected = found.kind == ("equal" if refusal is None else "refused") and (refusal or "") in found.detail
        if found.kind != "no sample" and not as_expected:
            wrong.append(f"{sample.name}: {found.kind}, expected {refusal or 'equal'}. {found.detail}")
    return wrong, kinds


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.sample(3)
def test_a_sample_trains_as_in_pytorch_or_is_refused_by_name(name: str) -> None:
    wrong, kinds = judged([sample_named(name)])
    assert wrong == []
    assert kinds["no sample"] == 0


@pytest.mark.skipif(not FULL, reason="part of make test-full")
@pytest.mark.parametrize("part", range(PARTS))
def test_every_sample_trains_as_in_pytorch_or_is_refused_by_name(part: int) -> None:
    samples = list(all_samples(slice(part, None, PARTS)))
    wrong, kinds = judged(samples)
    assert wrong == []
    assert kinds["equal"] + kinds["refused"] >= 0.6 * len(samples), "too few of the samples are samples"


@pytest.mark.skipif(not FULL, reason="part of make test-full")
def test_at_least_94_of_100_samples_are_not_on_the_list() -> None:
    names = [sample.name for sample in all_samples()]
    operators = [name for name in names if not name.startswith("nn.") or name.startswith("nn.functional")]
    refused = [name for name in names if refusal_of(name) is not None]
    assert len(operators) >= 500
    assert len(refused) <= 0.06 * len(names)
    known = set(itertools.chain(names, (name.rpartition("/")[0] for name in names)))
    assert set(REFUSED) <= known


SPARSE_INSIDE = {
    "made from a dense one": lambda value: (value.to_sparse() * 2).to_dense(),
    "compressed rows": lambda value: value.to_sparse_csr().to_dense(),
    "compressed blocks": lambda value: value.to_sparse_bsr((2, 2)).to_dense(),
    "product with a constant": lambda value: torch.sparse.mm((torch.eye(4) * 2).to_sparse_csr(), value),
    "product": lambda value: torch.sparse.mm(value.to_sparse_csr(), torch.ones(4, 4)),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Sparse BSR")
@pytest.mark.parametrize("function", SPARSE_INSIDE.values(), ids=list(SPARSE_INSIDE))
def test_layers_that_are_sparse_inside_train_as_in_pytorch(function: Callable[[Tensor], Tensor]) -> None:
    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        layer = Operator(function, ((torch.randn(4, 4, requires_grad=True),), {}))
        return layer, layer.take_example()

    assert verdict(Sample("sparse", make)).kind == "equal"
