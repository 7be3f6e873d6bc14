"""Losses that compare the samples of a batch, in micro-batches: the head runs once, over the whole batch.

The reference is plain PyTorch: on the whole batch, to rounding; and with the same micro-batches through the layers and
their outputs joined by `torch.cat`, to the bit.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from hal.errors import OutOfMemory
from tests.support.zoo.contrastive import (
    BATCH,
    LOSSES,
    OUT,
    RATE,
    WIDTH,
    Loss,
    Pair,
    Towers,
    drawn,
    image_and_text,
    in_batch_negatives,
    towers,
    triplet_by_distances,
    variance_and_covariance,
)

Build = Callable[..., relay.Trainer]
Result = tuple[float, list[Tensor]]


@functools.cache
def on_the_whole_batch(loss: Loss) -> Result:
    model, (inputs, targets) = towers(), drawn()
    value: Any = inputs
    for module in model:
        value = module(value)
    found = loss(value, targets)
    found.backward()
    return found.item(), [one.grad for module in model for one in module.parameters()]  # type: ignore[misc]


def in_pieces(loss: Loss, microbatches: int) -> Result:
    """Plain PyTorch: layers for each micro-batch, outputs joined, the loss once, gradients handed back in pieces."""
    model, (inputs, targets) = towers(), drawn()
    step = -(-BATCH // microbatches)
    made = []
    for start in range(0, BATCH, step):
        value: Any = tuple(one[start : start + step] for one in inputs)
        for module in model:
            value = module(value)
        made.append(value)
    leaves = [[side.detach().requires_grad_() for side in value] for value in made]
    found = loss(tuple(torch.cat(side) for side in zip(*leaves, strict=True)), targets)  # type: ignore[arg-type]
    found.backward()
    for value, leaf in zip(made, leaves, strict=True):
        pairs = [(one, end.grad) for one, end in zip(value, leaf, strict=True) if end.grad is not None]
        torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
    return found.item(), [one.grad for module in model for one in module.parameters()]  # type: ignore[misc]


def trained(build: Build, loss: Loss, **options: Any) -> Result:
    model = towers()
    parameters = [one for module in model for one in module.parameters()]
    before = [one.detach().clone() for one in parameters]
    trainer = build(model, loss=loss, optimizer=relay.SGD(lr=RATE), **options)
    found = trainer.step(drawn()).loss
    return found, [(old - new.detach()) / RATE for old, new in zip(before, parameters, strict=True)]


def assert_close(ours: Result, plain: Result, relative: float = 1e-6) -> None:
    assert ours[0] == pytest.approx(plain[0], rel=max(relative, 1e-6))
    wanted = [torch.zeros_like(one) if other is None else other for one, other in zip(ours[1], plain[1], strict=True)]
    one, other = (torch.cat([gradient.flatten() for gradient in each]) for each in (ours[1], wanted))
    assert float((one - other).norm()) <= relative * float(other.norm())


def name_of(value: Any) -> str:
    return value.__name__ if callable(value) else str(value)


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
@pytest.mark.sample(3)
def test_a_loss_over_samples_is_that_of_the_whole_batch(build: Build, loss: Loss) -> None:
    assert_close(trained(build, loss, microbatches=4), on_the_whole_batch(loss))


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", "cpu:discrete", "sim", "opencl:0", "onnx:cpu"])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 7])
@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_it_is_on_every_device_in_any_number_of_micro_batches(
    build: Build, loss: Loss, microbatches: int, device: str
) -> None:
    if not any(one.name == device or device == "cpu:discrete" for one in relay.devices() if one.available):
        pytest.skip(f"{device} is not here")
    for stash in ("device", "host"):
        found = trained(build, loss, microbatches=microbatches, device=device, stash=stash)
        # Distances are differences of near numbers, which OpenCL and ONNX Runtime round otherwise than PyTorch.
        cancels = loss is triplet_by_distances and device in ("opencl:0", "onnx:cpu")
        assert_close(found, on_the_whole_batch(loss), 3e-6 if cancels else 1e-6)


@pytest.mark.parametrize("device", ["cpu:discrete", "sim", "numpy"])
@pytest.mark.sample(2)
def test_it_is_on_devices_of_other_kinds(build: Build, device: str) -> None:
    found = trained(build, image_and_text, microbatches=4, device=device, stash="host")
    assert_close(found, on_the_whole_batch(image_and_text), 1e-6)


@pytest.mark.parametrize("loss", [image_and_text, triplet_by_distances, variance_and_covariance], ids=name_of)
@pytest.mark.sample("variance_and_covariance")
def test_it_is_equal_to_the_bit_to_plain_pytorch_that_joins_the_same_micro_batches(build: Build, loss: Loss) -> None:
    wanted = in_pieces(loss, 4)
    for options in ({}, {"stash": "host", "slots": 1, "device": "cpu:discrete"}, {"recompute": False}):
        found, gradients = trained(build, loss, microbatches=4, **options)
        assert found == wanted[0]
        for ours, plain in zip(gradients, wanted[1], strict=True):
            assert torch.equal(ours, torch.zeros_like(ours) if plain is None else plain)


def test_a_loss_that_python_computes_runs_over_the_whole_batch(build: Build) -> None:
    def looped(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
        chosen = [one for one, kept in zip(pair[0], targets["kept"], strict=True) if kept.item() > 0]
        return torch.stack(chosen).std(0).sum()

    with pytest.warns(UserWarning, match="runs eagerly"):
        found = trained(build, looped, microbatches=4, loss_over="batch")
    assert_close(found, on_the_whole_batch(looped))


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair: Pair) -> Pair:
        left = self.linear(pair[0])
        return left - left.mean(0), pair[1]


def test_a_layer_that_mixes_samples_is_refused_by_name_before_the_head(build: Build) -> None:
    first, _, last = towers()
    trainer = build([first, Centred(), last], loss=image_and_text, microbatches=4)
    with pytest.raises(relay.PartitionError, match=r"sub in layer '1' .*comes after the last layer.*microbatches=1"):
        trainer.step(drawn())


def test_the_last_module_joins_the_head_if_it_mixes_samples(build: Build) -> None:
    def model() -> list[nn.Module]:
        first, second, last = towers()
        return [first, second, nn.Sequential(Centred(), last)]

    modules, plain = model(), model()
    value: Any = drawn()[0]
    for module in plain:
        value = module(value)
    expected = in_batch_negatives(value, {})
    found = build(modules, loss=in_batch_negatives, microbatches=4).step(drawn())
    assert found.loss == pytest.approx(expected.item(), rel=1e-6)


def test_pieces_and_weights_have_no_whole_batch(build: Build) -> None:
    inputs, targets = drawn()
    half = tuple(one[:5] for one in inputs), {name: one[:5] for name, one in targets.items()}
    trainer = build(towers(), loss=image_and_text, loss_over="batch", microbatches=2)
    with pytest.raises(relay.BatchError, match=r"pieces= are batches of their own.*loss_over='microbatch'"):
        trainer.step(pieces=[half, half])
    with pytest.raises(relay.BatchError, match="each with a weight"):
        trainer.step(pieces=[half, half], weights=[0.5, 0.5])
    with pytest.raises(ValueError, match=r"loss_weight=.*loss_over='batch'"):
        relay.Trainer(towers(), loss=image_and_text, loss_over="batch", loss_weight="sum")
    with pytest.raises(relay.PartitionError, match=r"mixes samples: .*Give one batch"):
        build(towers(), loss=image_and_text).step(pieces=[half, half])


def test_a_head_that_does_not_fit_is_refused_with_what_would(build: Build) -> None:
    def wide(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
        return (pair[0][:, None] * pair[1][None, :]).exp().sum(-1).log().mean()

    size = 96
    trainer = build(towers(), loss=wide, microbatches=12, device="cpu:discrete")
    trainer.prepare(drawn(size))
    needed = trainer.step(drawn(size)).device_peak_bytes
    small = build(towers(), loss=wide, microbatches=12, device="cpu:discrete", capacity=needed // 3)
    with pytest.raises(OutOfMemory, match=r"head over the whole batch.*a batch of up to (\d+) samples") as refused:
        small.step(drawn(size))
    fits = int(str(refused.value).split("a batch of up to ")[1].split()[0])
    assert 0 < fits < size
    assert small.step(drawn(fits)).device_peak_bytes <= needed // 3


def test_the_layers_need_the_memory_of_one_micro_batch(build: Build) -> None:
    """With the stash on the host a deeper model needs as much of the device as a flat one."""
    peaks = set()
    for depth in (2, 6):
        torch.manual_seed(0)
        layers = [Towers(2 * WIDTH, 8, False), *(Towers(8, 8, False) for _ in range(depth)), Towers(8, OUT, True)]
        trainer = build(layers, loss=image_and_text, microbatches=4, stash="host", device="cpu:discrete")
        peaks.add(trainer.step(drawn()).device_peak_bytes)
    assert len(peaks) == 1
