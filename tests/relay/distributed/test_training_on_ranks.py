"""Training on several ranks, against plain PyTorch in one process."""

from __future__ import annotations

import functools

import pytest
import torch

import relay
from tests.support.ranks.jobs import train, train_all, train_model
from tests.support.ranks.models import batch, layers, plain_steps, shares
from tests.support.ranks.start import run_ranks

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.01, fused=True)
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)
MINE = {"adamw": relay.AdamW(lr=1e-2, weight_decay=0.01), "sgd": relay.SGD(lr=0.1, momentum=0.9)}
THEIRS = {"adamw": ADAMW, "sgd": SGD}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("sizes", "optimizer", "device"),
    [
        ((6, 6), "adamw", "cpu"),
        ((5, 4, 3), "adamw", "cpu:discrete"),
        ((4, 0, 1, 2), "sgd", "cpu:discrete"),
    ],
)
def test_ranks_train_as_plain_pytorch_that_sums_in_rank_order(
    sizes: tuple[int, ...], optimizer: str, device: str
) -> None:
    batches = [shares(batch(step, sum(sizes), masked=step), sizes) for step in range(3)]
    options = {"optimizer": MINE[optimizer], "microbatches": 2, "device": device}
    results = run_ranks(len(sizes), train, batches, options)
    losses, parameters = plain_steps(batches, 2, THEIRS[optimizer])
    for result in results:
        assert not isinstance(result, str), result
        assert result["losses"] == losses
        assert_equal(result["parameters"], parameters)


@pytest.mark.parametrize("defer", [False, True])
@pytest.mark.sample("True")
def test_clipping_by_norm_is_plain_pytorchs_to_rounding_and_equal_on_all_ranks(defer: bool) -> None:
    sizes = (5, 3)
    batches = [shares(batch(step, sum(sizes)), sizes) for step in range(4)]
    options = {"optimizer": MINE["adamw"], "microbatches": 2, "clip_grad_norm": 0.5, "defer_updates": defer}
    results = run_ranks(2, train, batches, options)
    norms: list[torch.Tensor] = []

    def clip(gradients: list[torch.Tensor]) -> torch.Tensor:
        norms.append(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients])))
        return torch.clamp(0.5 / (norms[-1] + 1e-6), max=1.0)

    losses, parameters = plain_steps(batches, 2, ADAMW, clip)
    for result in results:
        assert not isinstance(result, str), result
        assert result["losses"] == pytest.approx(losses, rel=1e-6)
        assert result["norms"] == pytest.approx([float(norm) for norm in norms], rel=1e-6)
        for name, value in parameters.items():
            assert torch.allclose(result["parameters"][name], value, rtol=1e-5, atol=1e-6), name
    assert results[0]["norms"] == results[1]["norms"]
    assert_equal(results[0]["parameters"], results[1]["parameters"])


MATRIX = {
    "AdamW in bf16 with split masters, dropout": (
        "dropout", {"optimizer": relay.AdamW(lr=1e-2), "precision": "bf16", "master_weights": "split"},
    ),
    "SGD in fp16, clipped by value": (
        "plain", {"optimizer": relay.SGD(lr=0.1), "precision": "fp16", "clip_grad_value": 1e-3},
    ),
    "Muon": ("plain", {"optimizer": relay.Muon(lr=1e-2)}),
    "LAMB, discrete, host stash": (
        "dropout", {"optimizer": relay.LAMB(lr=1e-2), "device": "cpu:discrete", "stash": "host"},
    ),
    "Lion, one slot": ("plain", {"optimizer": relay.Lion(lr=1e-3), "slots": 1, "device": "cpu:discrete"}),
    "Muon in bf16 with split masters": (
        "plain", {"optimizer": relay.Muon(lr=1e-2), "precision": "bf16", "master_weights": "split"},
    ),
    "AdamW in bf16": ("plain", {"optimizer": relay.AdamW(lr=1e-2), "precision": "bf16"}),
    "Adafactor": ("plain", {"optimizer": relay.Adafactor(lr=1e-2)}),
    "Adam with 8-bit states": ("plain", {"optimizer": relay.Adam(lr=1e-2), "state_dtype": "int8"}),
    "AdamW with bfloat16 states": ("plain", {"optimizer": relay.AdamW(lr=1e-2), "state_dtype": "bf16"}),
    "torch.optim.RMSprop": ("plain", {"optimizer": functools.partial(torch.optim.RMSprop, lr=1e-3)}),
    "AdamW in fp16, deferred": (
        "plain", {"optimizer": relay.AdamW(lr=1e-2), "precision": "fp16", "defer_updates": True},
    ),
    "two devices a rank": ("plain", {"optimizer": relay.AdamW(lr=1e-2), "device": ["cpu:discrete", "cpu:discrete"]}),
    "parameter groups": (
        "plain", {"optimizer": relay.AdamW(lr=1e-2), "param_groups": [{"params": ["*.bias"], "weight_decay": 0.0}]},
    ),
}  # fmt: skip
SAMPLE = (
    "AdamW in bf16 with split masters, dropout",
    "SGD in fp16, clipped by value",
    "Muon",
    "LAMB, discrete, host stash",
)


@pytest.mark.parametrize("names", [SAMPLE, pytest.param(tuple(MATRIX)[len(SAMPLE) :], marks=pytest.mark.exhaustive)])
def test_two_ranks_with_one_micro_batch_each_are_one_process_with_two(names: tuple[str, ...]) -> None:
    jobs = [(model, {**options, "microbatches": 1}) for model, options in map(MATRIX.__getitem__, names)]
    results = run_ranks(2, train_all, jobs)
    for number, name in enumerate(names):
        model, options = MATRIX[name]
        alone = train_model(0, 1, model, {**options, "microbatches": 2})
        for of_rank in results:
            assert not isinstance(of_rank[number], str), (name, of_rank[number])
            assert of_rank[number]["losses"] == alone["losses"], name
            assert of_rank[number]["norms"] == pytest.approx(alone["norms"], rel=1e-6), name
            assert_equal(of_rank[number]["parameters"], alone["parameters"])


def test_the_norm_is_the_same_to_the_bit_on_two_three_and_four_ranks() -> None:
    whole = [batch(step, 8) for step in range(2)]
    options = {"optimizer": MINE["adamw"], "microbatches": 1, "clip_grad_norm": 0.1}
    found = []
    for count in (2, 3, 4):
        batches = [shares(one, [8] + [0] * (count - 1)) for one in whole]  # so that the gradients are equal
        found.append(run_ranks(count, train, batches, options)[-1])
    for result in found[1:]:
        assert result["norms"] == found[0]["norms"]
        assert_equal(result["parameters"], found[0]["parameters"])


def test_a_rank_holds_its_share_of_the_optimizer_states_and_of_the_masters() -> None:
    sizes = (4, 4, 4, 4)
    options = {"optimizer": MINE["adamw"], "microbatches": 1, "precision": "bf16", "master_weights": "split"}
    results = run_ranks(4, train, [shares(batch(0, 16), sizes)], options)
    elements = sum(parameter.numel() for module in layers() for parameter in module.parameters())
    moments = [result["ledger"]["first moments", torch.float32] // 4 for result in results]
    assert sum(moments) == elements
    largest_layer = max(sum(parameter.numel() for parameter in module.parameters()) for module in layers())
    assert max(moments) <= elements / 4 + largest_layer / 4
    remainders = [result["ledger"]["weight remainders", torch.uint8] for result in results]
    assert max(remainders) <= 2.5 * (elements / 4 + largest_layer / 4)
