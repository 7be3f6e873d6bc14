"""Layers and losses that cannot be graphs: exact on devices that execute PyTorch, refused by name on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import relay
from hal.errors import Unsupported

pytestmark = pytest.mark.filterwarnings("ignore:layer")

Loss = Callable[[Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """A linear layer, and a function of what it makes."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.then = then

    def forward(self, values: Tensor) -> Tensor:
        return self.then(self.linear(values))


class Apply(nn.Module):
    """A function, as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: Tensor) -> Tensor:
        return self.function(values)


def regular(values: Tensor) -> Tensor:
    """A square matrix that has an inverse."""
    return 2 * torch.eye(8) + 0.01 * values.T @ values


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "item": lambda: Layer(lambda values: values * values.mean().item()),
    "a branch": lambda: Layer(lambda values: values if values.mean() > 0 else -values),
    "nonzero": lambda: Layer(lambda values: values + values.nonzero().sum()),
    "bincount": lambda: Layer(lambda values: values + torch.bincount(values.long().abs().flatten()).sum()),
    "an inverse": lambda: Layer(lambda values: values @ torch.linalg.inv(regular(values))),
    "a solution": lambda: Layer(lambda values: torch.linalg.solve(regular(values), values.T).T),
}
"""Layers that autograd can run and a graph cannot hold: the data decide, or an op looks at them to raise an error."""

LOSSES: dict[str, Loss] = {
    "gaussian_nll_loss": lambda outputs, targets: functional.gaussian_nll_loss(outputs, targets, outputs**2 + 1),
    "item": lambda outputs, targets: (outputs - targets).square().mean() * outputs.mean().exp().item(),
    "a branch": lambda outputs, targets: outputs.square().mean() if targets.sum() > 0 else outputs.mean(),
}


def modules(middle: Callable[[], nn.Module] = nn.Tanh) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 8), middle(), nn.Linear(8, 3)]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator)


def relayed(layers: list[nn.Module], loss: Loss, device: str) -> list[float]:
    with relay.Trainer(layers, loss, device=device, optimizer=relay.SGD(lr=0.1), microbatches=1) as trainer:
        return [trainer.step(batch()).loss for _ in range(2)]


def plain(layers: list[nn.Module], loss: Loss) -> list[float]:
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        value = loss(model(batch()[0]), batch()[1])
        losses.append(value.item())
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_is_no_graph_trains_as_in_pytorch(layer: str) -> None:
    assert relayed(modules(LAYERS[layer]), functional.mse_loss, "cpu") == plain(
        modules(LAYERS[layer]), functional.mse_loss
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_is_no_graph_trains_as_in_pytorch(loss: str) -> None:
    assert relayed(modules(), LOSSES[loss], "cpu") == plain(modules(), LOSSES[loss])


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_that_is_no_graph_is_refused_by_name_where_only_graphs_run(layer: str) -> None:
    message = r"device 'numpy' .*layer '1' would have to run eagerly, .* since aten\.\w+"
    with pytest.raises(Unsupported, match=message) as refused:
        relayed(modules(LAYERS[layer]), functional.mse_loss, "numpy")
    assert refused.value.op.startswith("aten.")
    assert refused.value.device == "numpy"


UNDERIVED: dict[str, Callable[[Tensor], Tensor]] = {
    "_unique2": lambda values: values + values.unique().sum(),
    "unique_dim": lambda values: values + values.unique(dim=0).sum(),
    "unique_consecutive": lambda values: values + values.flatten().unique_consecutive().sum(),
    "bincount": lambda values: values + torch.bincount(torch.arange(values.shape[1]) % 3, weights=values[0]).sum(),
    "igamma": lambda values: torch.special.gammainc(values.abs() + 1, values.abs() + 1),
}
"""Functions of which PyTorch has no derivative, by the op without one; all but the last are no graphs either."""


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("op", UNDERIVED)
def test_a_gradient_that_pytorch_does_not_have_is_refused_before_the_step(op: str, index: int) -> None:
    """In the first module too, whose inputs need none, and in the last, which runs with the loss."""
    layers = modules()
    layers[index] = nn.Sequential(layers[index], Layer(UNDERIVED[op]) if index == 1 else Apply(UNDERIVED[op]))
    with pytest.raises((NotImplementedError, RuntimeError), match=rf"derivative for .*{op}"):
        plain(layers, functional.mse_loss)
    nn.Sequential(*layers).zero_grad()
    before = [value.clone() for value in nn.Sequential(*layers).state_dict().values()]
    with pytest.raises(relay.CaptureError, match=rf"layer '{index}' needs a gradient through aten\.{op}.*detach"):
        relayed(layers, functional.mse_loss, "cpu")
    after = nn.Sequential(*layers).state_dict().values()
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("op", [op for op in UNDERIVED if op != "igamma"])
def test_where_no_gradient_is_asked_for_the_same_ops_train_as_in_pytorch(op: str) -> None:
    def make() -> list[nn.Module]:
        return modules(lambda: Layer(lambda values: values + 0.1 * UNDERIVED[op](values.detach())))

    assert relayed(make(), functional.mse_loss, "cpu") == plain(make(), functional.mse_loss)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_that_is_no_graph_is_refused_where_only_graphs_run(loss: str) -> None:
    with pytest.raises(Unsupported, match=r"layer '2' \(or the loss, which runs with it\) would have to run eagerly"):
        relayed(modules(), LOSSES[loss], "numpy")


def test_a_loss_that_fails_in_itself_is_an_error_of_the_loss() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs @ targets).mean()

    with pytest.raises(relay.CaptureError, match="'loss' cannot be captured"):
        relayed(modules(), loss, "cpu")


@pytest.mark.parametrize("loss", [lambda *_: 1.0, lambda outputs, targets: outputs.sum().item()])
def test_a_loss_that_is_no_tensor_is_refused_in_words_whatever_it_asks_of_the_data(loss: Any) -> None:
    with pytest.raises(relay.PartitionError, match="must be a scalar tensor; got float"):
        relayed(modules(), loss, "cpu")


class Renormalising(nn.Module):
    """Changes its own weight in the forward; as a graph, or `eagerly`, as the data decide what else it does."""

    def __init__(self, eagerly: bool, frozen: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8, max_norm=0.5)
        self.table.weight.requires_grad_(not frozen)
        self.eagerly = eagerly

    def forward(self, values: Tensor) -> Tensor:
        if self.eagerly and values.sum() > 1e9:
            return values
        return values + self.table(torch.arange(values.shape[0]) % 5)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("device", ["cpu", "numpy"])
def test_a_layer_that_changes_its_own_parameter_is_refused_by_its_name(
    device: str, eagerly: bool, frozen: bool
) -> None:
    with pytest.raises(relay.CaptureError, match=r"layer '1' changes its parameter '\w*\.?table\.weight'"):
        relayed(modules(lambda: Renormalising(eagerly, frozen)), functional.mse_loss, device)


@pytest.mark.parametrize("device", ["cpu", "numpy"])
def test_a_rectifier_that_is_told_not_to_draw_is_a_leaky_one(device: str) -> None:
    layers = modules(lambda: Layer(lambda values: functional.rrelu(values, 0.1, 0.4, training=False)))
    expected = plain(modules(lambda: Layer(lambda values: functional.leaky_relu(values, 0.25))), functional.mse_loss)
    assert relayed(layers, functional.mse_loss, device) == pytest.approx(expected, rel=1e-6)


def test_a_rectifier_that_draws_is_refused_by_devices_that_do_not_execute_pytorch() -> None:
    layers = modules(lambda: Layer(lambda values: functional.rrelu(values, training=True)))
    with pytest.raises(relay.CaptureError, match=r"layer '1' draws random numbers by aten\.rrelu"):
        relayed(layers, functional.mse_loss, "numpy")
