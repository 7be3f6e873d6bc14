"""Wide pieces of layers over chunks of positions: equal to plain PyTorch whose layers run the same chunks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay
from relay.errors import PartitionError
from tests.support.devices import require

HIDDEN, HEADS, WIDE, CLASSES, LENGTH = 8, 2, 64, 11, 9


class Layer(nn.Module):
    """Attention and a feed-forward network. With `size`, what follows the attention runs over chunks of positions."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.size: int | None = None
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention_in, self.attention_out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.feed_in, self.feed_out = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor) -> Tensor:
        parts = self.attention_in(self.first(stream)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True).transpose(1, 2).flatten(2)
        if self.size is None:
            return self.rest(stream, mixed)
        rows = zip(stream.flatten(0, 1).split(self.size), mixed.flatten(0, 1).split(self.size), strict=True)
        return torch.cat([self.rest(*chunk) for chunk in rows]).view_as(stream)

    def rest(self, stream: Tensor, mixed: Tensor) -> Tensor:
        stream = stream + self.attention_out(mixed)
        return stream + self.dropout(self.feed_out(F.gelu(self.feed_in(self.second(stream)))))


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, HIDDEN)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(2))
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, ids: Tensor) -> Any:
        stream = self.embedding(ids)
        for layer in self.layers:
            stream = layer(stream)
        return SimpleNamespace(loss=F.cross_entropy(self.head(stream).flatten(0, 1), ids.flatten()))


def batch() -> dict[str, Tensor]:
    return {"ids": torch.randint(0, CLASSES, (4, LENGTH), generator=torch.Generator().manual_seed(1))}


def trained(model: nn.Module, size: int | None, **options: Any) -> tuple[nn.Module, int]:
    mine = copy.deepcopy(model)
    with relay.Trainer(mine, optimizer=relay.SGD(lr=0.1), mlp_chunk_tokens=size, **options) as trainer:
        peak = trainer.step(batch()).device_peak_bytes
    return mine, peak


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)


@pytest.mark.parametrize(
    ("size", "options"),
    [
        (5, {}),
        pytest.param(1, {}, marks=pytest.mark.exhaustive),
        pytest.param(6, {"recompute": False}, marks=pytest.mark.exhaustive),
        pytest.param(4, {"stash": "host", "device": "cpu:discrete"}, marks=pytest.mark.exhaustive),
    ],
)
def test_chunks_of_a_layer_equal_plain_pytorch_over_the_same_chunks_to_the_bit(
    size: int, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    for layer in plain.layers:
        layer.size = size
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(**batch()).loss.backward()
    optimizer.step()
    mine, _ = trained(model, size, microbatches=1, **options)
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), plain.parameters(), strict=True))
    whole, _ = trained(model, None, microbatches=1)
    assert distance(mine, whole) < 1e-6


@pytest.mark.parametrize(
    "device", ["numpy", "sim", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("opencl:0", "onnx:cpu"))]
)
@pytest.mark.sample("numpy")
def test_every_device_runs_layers_in_chunks(device: str) -> None:
    require(device)
    torch.manual_seed(0)
    model = Model()
    mine, _ = trained(model, 5, microbatches=2, device=device)
    whole, _ = trained(model, None, microbatches=2)
    assert distance(mine, whole) < 1e-6


def test_a_layer_in_chunks_needs_less_memory_and_draws_the_same_masks() -> None:
    torch.manual_seed(0)
    model = Model(dropout=0.3)
    mine, less = trained(model, 4, microbatches=1)
    whole, more = trained(model, None, microbatches=1)
    assert distance(mine, whole) < 1e-6
    assert less < 0.75 * more


@pytest.mark.exhaustive
def test_in_bf16_the_gradients_of_a_layer_in_chunks_are_as_exact_as_whole() -> None:
    torch.manual_seed(0)
    model = Model()
    exact = copy.deepcopy(model).double()
    exact(**batch()).loss.backward()

    def error(size: int | None) -> float:
        mine, _ = trained(model, size, microbatches=1, precision="bf16")
        moved = [(before - after) / 0.1 for before, after in zip(model.parameters(), mine.parameters(), strict=True)]
        pairs = zip(moved, exact.parameters(), strict=True)
        return sum(((ours - theirs.grad) ** 2).sum().item() for ours, theirs in pairs) ** 0.5

    assert error(4) <= 1.25 * error(None)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, stream: Tensor) -> Tensor:
        found: Tensor = self.inner(stream)
        return found


def test_a_layer_without_wide_pieces_is_left_as_it_is_and_a_model_without_any_is_refused() -> None:
    torch.manual_seed(0)
    model = Model()
    model.layers.append(Narrow())
    mine, _ = trained(model, 5, microbatches=1)
    whole, _ = trained(model, None, microbatches=1)
    assert distance(mine, whole) < 1e-6
    model.layers = nn.ModuleList([Narrow(), Narrow()])
    with pytest.raises(PartitionError, match=r"mlp_chunk_tokens=5: no layer of the model has a piece.*'layers.0'"):
        trained(model, 5, microbatches=1)
    with pytest.raises(PartitionError, match="mlp_chunk_tokens=5: no layer"):
        relay.simulate(model, example=batch(), microbatches=1, mlp_chunk_tokens=5)


@pytest.mark.parametrize("name", ["mlp_chunk_tokens", "head_chunk_tokens"])
@pytest.mark.parametrize("wrong", [0, -3, 2.5, True])
def test_chunks_of_less_than_one_position_are_refused_when_the_trainer_is_built(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={wrong!r} must be a whole number of at least 1"):
        relay.Trainer([nn.Linear(2, 2)], nn.functional.mse_loss, **{name: wrong})
