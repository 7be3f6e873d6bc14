"""Tokens, classes and positions outside of their domain are an IndexError on every device, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from hal.errors import HalError
from relay.errors import IndexOutOfRange
from relay.models import GPT
from tests.support.devices import require

DEVICES = ["cpu", "cpu:discrete", "numpy", "opencl", "onnx:cpu", "sim"]
TOKENS, CLASSES, WIDTH = 10, 4, 8


class Picks(nn.Module):
    """A module that takes rows or elements of its input by given indices."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.pick = pick
        self.table = nn.Parameter(torch.randn(TOKENS, WIDTH))

    def forward(self, index: Tensor) -> Tensor:
        return self.pick(self.table, index)


PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda table, index: nn.functional.embedding(index, table),
    "shifted embedding": lambda table, index: nn.functional.embedding(index.clamp(max=99) + 0, table),
    "index_select": lambda table, index: table.index_select(0, index.flatten()).unflatten(0, index.shape),
    "gather": lambda table, index: table.gather(0, index.flatten()[:, None].expand(-1, WIDTH)).unflatten(
        0, index.shape
    ),
    "index": lambda table, index: table[index],
    "scatter": lambda table, index: (
        torch.zeros(TOKENS).scatter(0, index.flatten(), 1.0).sum() + nn.functional.embedding(index.clamp(0, 9), table)
    ),
}


def trainer_of(pick: str, device: str) -> relay.Trainer:
    torch.manual_seed(0)
    layers = [
        Picks(PICKS[pick]),
        *(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
        nn.Flatten(),
        nn.Linear(3 * WIDTH, CLASSES),
    ]
    return relay.Trainer(
        layers, nn.functional.cross_entropy, device=device, optimizer=relay.SGD(lr=0.1), microbatches=1
    )


def batch(token: int = 1, label: int = 0) -> tuple[Tensor, Tensor]:
    return torch.tensor([[1, 2, token], [3, 4, 5]]), torch.tensor([0, label])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.sample(3)
def test_a_token_or_a_class_outside_is_refused_by_layer_and_value_and_nothing_changes(device: str) -> None:
    require(device)
    with closing(trainer_of("embedding", device)) as trainer:
        trainer.step(batch())
        before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
        for token, label, layer, value in (
            (TOKENS, 0, "0", TOKENS),
            (-1, 0, "0", -1),
            (2_000_000_000, 0, "0", 2_000_000_000),
            (1, CLASSES, "5", CLASSES),
            (1, -1, "5", -1),
        ):
            for call in (trainer.step, trainer.evaluate):
                with pytest.raises(IndexOutOfRange, match=f"Layer '{layer}' indexes with {value} in micro-batch 0"):
                    call(batch(token, label))
        after = trainer.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        trainer.step(batch(TOKENS - 1, -100))  # a target that does not count is no index


@pytest.mark.parametrize("device", ["cpu", "numpy"])
@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.sample(3)
def test_whatever_indexes_refuses_what_pytorch_refuses(pick: str, device: str) -> None:
    refused = {}
    for token in (-TOKENS - 1, -1, 0, TOKENS - 1, TOKENS):
        try:
            PICKS[pick](torch.randn(TOKENS, WIDTH), batch(token)[0])
        except (IndexError, RuntimeError):
            refused[token] = True
    with closing(trainer_of(pick, device)) as trainer:
        for token in (-TOKENS - 1, -1, 0, TOKENS - 1, TOKENS):
            if refused.get(token):
                with pytest.raises(IndexError, match=f"indexes with {token}"):
                    trainer.step(batch(token))
            else:
                trainer.step(batch(token))


COMPUTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda x, index: x.gather(1, index[:, None].expand(-1, 2)),
    "index": lambda x, index: x[:, index],
    "scatter_add": lambda x, index: x.scatter_add(1, index[:, None], x[:, :1]),
    "index_add": lambda x, index: x.index_add(1, index, x[:, : len(index)]),
    "index_copy": lambda x, index: x.index_copy(1, index, x[:, : len(index)]),
}


class ComputesAnIndex(nn.Module):
    """A layer whose index is the rounded sum of a row of its input."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, x.sum(1).detach().round().long())


@pytest.mark.parametrize("device", ["numpy", "opencl", "onnx:cpu", "sim"])
@pytest.mark.parametrize("use", COMPUTED)
@pytest.mark.sample(5)
def test_an_index_that_a_layer_computes_is_refused_by_layer_and_value_where_pytorch_refuses_it(
    use: str, device: str
) -> None:
    require(device)
    layers = [ComputesAnIndex(COMPUTED[use]), nn.LazyLinear(1)]
    inputs = torch.ones(2, 4) / 4
    nn.Sequential(*layers)(inputs)
    with closing(relay.Trainer(layers, nn.functional.mse_loss, device=device, microbatches=1)) as trainer:
        for index in (1, 4, -1, -5):
            given = (inputs * index, torch.zeros(2, 1))
            try:
                with torch.no_grad():
                    expected = float(nn.functional.mse_loss(nn.Sequential(*layers)(given[0]), given[1]))
            except (IndexError, RuntimeError):
                with pytest.raises((IndexError, HalError), match=rf"0.*{index}"):
                    trainer.evaluate(given)
            else:
                assert trainer.evaluate(given).loss == pytest.approx(expected, rel=1e-5)


def test_the_labels_of_a_whole_model_are_checked_in_every_micro_batch() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=32, sequence=8, layers=2, hidden=16, heads=2)
    text = torch.randint(0, 32, (4, 9))
    given: dict[str, Any] = {"input_ids": text[:, :-1], "labels": text[:, 1:].clone()}
    with closing(relay.Trainer(model, device="numpy", microbatches=2)) as trainer:
        trainer.step(given)
        given["labels"][3, 2] = 32
        with pytest.raises(IndexError, match="indexes with 32 in micro-batch 1"):
            trainer.step(given)
        given["labels"][3, 2] = -100
        trainer.step(given)
