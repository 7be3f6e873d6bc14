"""Layers given values rounded to bf16 or fp16 train as under PyTorch's autocast, to the last bit."""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import relay
from relay.errors import PartitionError
from tests.support import matrix, mixed_reference, reference
from tests.support.zoo.plain_models import Build

MIXED = ["bf16", "fp16"]

Make = Callable[[], nn.Module]


class PreNorm(nn.Module):
    """A block whose norm is the first to see the rounded stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.linear(torch.relu(self.norm(value)))


class Frozen(nn.BatchNorm1d):
    """A BatchNorm that stays as in evaluation while the rest is trained."""

    def train(self, mode: bool = True) -> "Frozen":
        return super().train(False)


class First(nn.Module):
    """Of the outputs of a layer, given its input as often as it asks, the first."""

    def __init__(self, layer: nn.Module, times: int = 1) -> None:
        super().__init__()
        self.layer = layer
        self.times = times

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(*[value] * self.times)[0]


def after_linear(norm: Make) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), norm(), nn.Tanh())


def in_rows(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 4)), norm, nn.Flatten())


def frozen() -> nn.Module:
    return Frozen(8).train()


NORMS: dict[str, Make] = {
    "layer norm": functools.partial(nn.LayerNorm, 8),
    "layer norm without bias": functools.partial(nn.LayerNorm, 8, bias=False),
    "layer norm without parameters": functools.partial(nn.LayerNorm, 8, elementwise_affine=False),
    "rms norm": functools.partial(nn.RMSNorm, 8),
    "group norm": functools.partial(nn.GroupNorm, 2, 8),
    "group norm without parameters": functools.partial(nn.GroupNorm, 2, 8, affine=False),
    "batch norm": functools.partial(nn.BatchNorm1d, 8),
    "batch norm without parameters": functools.partial(nn.BatchNorm1d, 8, affine=False),
    "batch norm without statistics": functools.partial(nn.BatchNorm1d, 8, track_running_stats=False),
    "batch norm, frozen": frozen,
    "instance norm": lambda: in_rows(nn.InstanceNorm1d(2, affine=True)),
    "instance norm without parameters": lambda: in_rows(nn.InstanceNorm1d(2)),
}

BLOCKS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 8), (5, 8)),
    "norm first": (PreNorm, (5, 8)),
    "convolution": (lambda: nn.Conv2d(8, 8, 3, padding=1), (8, 4, 4)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(8, 8, 3, padding=1), (8, 5)),
    "convolution and batch norm": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)),
        (8, 4, 4),
    ),
    "attention": (lambda: First(nn.MultiheadAttention(8, 2, batch_first=True), 3), (5, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (5, 8)),
    "encoder, norm first": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
        (5, 8),
    ),
    "gru": (lambda: First(nn.GRU(8, 8, batch_first=True)), (5, 8)),
    "lstm": (lambda: First(nn.LSTM(8, 8, batch_first=True)), (5, 8)),
    "gru cell": (lambda: nn.GRUCell(8, 8), (8,)),
}


class Output(NamedTuple):
    """What the whole model returns."""

    loss: Tensor
    values: Tensor


class Stack(nn.Module):
    """A model given whole: a rounded stream goes into its blocks, and comes out rounded."""

    def __init__(self, make: Make, shape: tuple[int, ...]) -> None:
        super().__init__()
        images = len(shape) > 1 and shape[0] == 8
        kind = {3: nn.Conv2d, 2: nn.Conv1d}[len(shape)] if images else nn.Linear
        self.entry = kind(8, 8, 1) if images else nn.Linear(8, 8)
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.entry(inputs)
        for layer in self.layers:
            value = layer(value)
        return Output(small_loss(value, targets), value)


def small_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Small enough that no gradient overflows in fp16: a skipped step takes back the statistics, which plain keeps."""
    return nn.functional.mse_loss(values.float(), targets) / 1024


def pairs(*shape: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{name: torch.randn(6, *shape, generator=generator) for name in ("inputs", "targets")} for _ in range(2)]


@pytest.mark.parametrize(("norm", "precision"), matrix.sampled(MIXED, NORMS))
@pytest.mark.sample(3)
def test_a_norm_of_rounded_values_hands_its_backward_what_the_kernel_gave(
    build: Build, norm: str, precision: str
) -> None:
    torch.manual_seed(0)
    plain = [nn.Linear(8, 8), *(after_linear(NORMS[norm]) for _ in range(3)), nn.Linear(8, 8)]
    ours = copy.deepcopy(plain)
    batches = [(batch["inputs"], batch["targets"]) for batch in pairs(8)]
    found = mixed_reference.train(plain, batches, 2, loss=small_loss, precision=precision)
    assert not any(found.skipped)
    trainer = build(ours, loss=small_loss, precision=precision, microbatches=2, recompute=False)
    assert [trainer.step(batch).loss for batch in batches] == found.losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


@pytest.mark.parametrize(("block", "precision"), matrix.sampled(MIXED, BLOCKS))
@pytest.mark.sample("linear-bf16", "norm first-fp16", "convolution and batch norm-bf16", "attention-fp16")
def test_blocks_of_a_whole_model_take_a_rounded_stream(build: Build, block: str, precision: str) -> None:
    torch.manual_seed(0)
    make, shape = BLOCKS[block]
    plain = Stack(make, shape)
    batches = pairs(*shape)
    models = [copy.deepcopy(plain) for _ in range(2)]
    found = mixed_reference.train(plain, batches, 2, precision=precision)
    assert not any(found.skipped)
    for model, recompute in zip(models, (True, False), strict=True):
        trainer = build(model, precision=precision, microbatches=2, recompute=recompute)
        assert [trainer.step(batch).loss for batch in batches] == found.losses
        reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


@pytest.mark.parametrize("precision", MIXED)
def test_values_between_the_blocks_of_a_whole_model_have_the_dtype_that_autocast_gives_them(
    build: Build, precision: str
) -> None:
    low = mixed_reference.LOW[precision]
    seen: list[torch.dtype] = []

    class Watched(Stack):
        def forward(self, inputs: Tensor, targets: Tensor) -> Output:
            value = inputs
            for layer in self.layers:
                value = layer(value)
                seen.append(value.dtype)
            return Output(small_loss(value, targets), value)

    build(Watched(lambda: nn.Linear(8, 8), (8,)), precision=precision).step(pairs(8)[0])
    assert set(seen) == {low}


@pytest.mark.parametrize("device", ["numpy", "onnx:cpu"])
@pytest.mark.parametrize("norm", ["layer norm", "group norm", "group norm without parameters"])
@pytest.mark.parametrize("precision", MIXED)
@pytest.mark.sample("bf16-layer norm-onnx:cpu", "fp16-group norm without parameters-numpy")
def test_norms_of_rounded_values_train_on_devices_that_take_core_programs(
    build: Build, precision: str, norm: str, device: str
) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), *(after_linear(NORMS[norm]) for _ in range(2)), nn.Linear(8, 3)]
    plain = copy.deepcopy(layers)
    batches = [(torch.randn(8, 6), torch.randn(8, 3)) for _ in range(4)]
    options = {"loss_scale": 1.0} if precision == "fp16" else {}
    trainer = build(
        layers, loss=nn.functional.mse_loss, microbatches=2, precision=precision, device=device,
        optimizer=relay.SGD(lr=0.1), **options,
    )  # fmt: skip
    found = mixed_reference.train(
        plain, batches, 2, precision=precision, loss=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    # Rounded to 8 or 11 bits on the way, in another order of summation.
    assert [trainer.step(batch).loss for batch in batches] == pytest.approx(found.losses, rel=5e-3)


class OwnAutocast(nn.Module):
    """A model that decides by itself in which precision its blocks run."""

    def __init__(self, **autocast: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PreNorm() for _ in range(3))
        self.autocast = autocast

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        value = inputs
        with torch.autocast("cpu", **self.autocast):
            for layer in self.layers:
                value = layer(value)
        return Loss(nn.functional.mse_loss(value.float(), targets))


class Loss(NamedTuple):
    loss: Tensor


@pytest.mark.parametrize(
    ("precision", "autocast"),
    [("fp32", {"dtype": torch.bfloat16}), ("bf16", {"enabled": False}), ("bf16", {"dtype": torch.float16})],
)
def test_blocks_under_an_autocast_of_the_models_own_are_refused_by_name(
    build: Build, precision: str, autocast: dict[str, Any]
) -> None:
    trainer = build(OwnAutocast(**autocast), microbatches=2, precision=precision)
    with pytest.raises(PartitionError, match=r"'layers\.0' under a torch\.autocast of its own.*precision="):
        trainer.step({"inputs": torch.randn(4, 8), "targets": torch.randn(4, 8)})
