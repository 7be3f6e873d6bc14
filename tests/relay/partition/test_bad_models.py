"""Models that Relay refuses, before or during a step: the error names what is wrong, and the step changes nothing."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import relay
from relay.errors import CaptureError, NonFiniteLoss, PartitionError
from tests.support import reference
from tests.support.zoo.plain_models import Build
from tests.support.zoo.unspoiled import a_list, gpt, list_batch, text


class Output(NamedTuple):
    loss: Any
    value: Tensor


class Stack(nn.Module):
    """Repeated layers of any kind, with a loss of any kind."""

    def __init__(self, layers: list[nn.Module], loss: Callable[[Tensor], Any] = torch.mean) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.loss = loss

    def forward(self, inputs: Tensor) -> Output:
        for layer in self.layers:
            inputs = layer(inputs)
        return Output(self.loss(inputs), inputs)


# **** models ****


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Output:
        value = self.only(inputs)
        return Output(value.mean(), value)


def test_a_model_without_repeated_layers_is_refused_with_what_to_do(build: Build) -> None:
    with pytest.raises(PartitionError, match=r"(?s)Flat has no repeated layers.*list of modules"):
        build(Flat()).step({"inputs": list_batch()[0]})


def test_a_model_that_skips_its_repeated_layers_is_refused(build: Build) -> None:
    class Skipping(Stack):
        def forward(self, inputs: Tensor) -> Output:
            value = inputs * self.layers[0].weight.sum()
            return Output(value.mean(), value)

    with pytest.raises(PartitionError, match="did not call any"):
        build(Skipping([nn.Linear(4, 4), nn.Linear(4, 4)])).step({"inputs": list_batch()[0]})


@pytest.mark.parametrize("form", ["whole", "list"])
def test_a_model_with_nothing_to_train_is_refused(build: Build, form: str) -> None:
    model = gpt().requires_grad_(False)
    with pytest.raises(PartitionError, match="nothing to train"):
        build(model) if form == "whole" else build(model.as_list(), loss=nn.functional.mse_loss)
    with pytest.raises(PartitionError, match="nothing to train"):
        build([nn.ReLU()], loss=nn.functional.mse_loss)


def two_linears() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.Linear(4, 4)]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda value: value.mean(dim=1), r"scalar.*\(2,\)"),
        (lambda value: value.argmax(), "scalar.*int64"),
        (lambda value: 3.0, "tensor.*float"),
    ],
    ids=["a row", "an integer", "a Python number"],
)
def test_a_loss_that_is_not_a_scalar_is_refused_with_what_it_is(build: Build, loss: Any, message: str) -> None:
    inputs, targets = list_batch()
    with pytest.raises(PartitionError, match=message):
        build(Stack(two_linears(), loss)).step({"inputs": inputs})
    with pytest.raises(PartitionError, match=message):
        build(two_linears(), loss=lambda output, target: loss(output)).step((inputs, targets))


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_model_without_a_loss_is_refused(build: Build, call: str) -> None:
    with pytest.raises(PartitionError, match=r"returned no loss for this batch, but a GPTOutput"):
        getattr(build(gpt()), call)({"input_ids": text()["input_ids"]})
    with pytest.raises(PartitionError, match="no loss"):
        getattr(build(Stack(two_linears(), lambda value: None)), call)({"inputs": list_batch()[0]})


class Exploding(nn.Module):
    """A layer whose output is NaN as soon as an input is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, value: Tensor) -> Tensor:
        return self.norm(self.inner(value)).tanh()


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize(
    "optimizer", [None, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)], ids=["AdamW", "SGD"]
)
@pytest.mark.parametrize("piece", [0, 3])
@pytest.mark.sample(3)
def test_a_step_whose_loss_is_nan_changes_nothing_and_training_goes_on(
    build: Build, piece: int, optimizer: Any, device: str
) -> None:
    torch.manual_seed(0)
    ours = [Exploding(), Exploding(), nn.Linear(4, 2)]
    torch.manual_seed(0)
    plain = [Exploding(), Exploding(), nn.Linear(4, 2)]
    torch.manual_seed(2)
    batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(3)]
    poisoned = (batches[0][0].clone(), batches[0][1])
    poisoned[0][2 * piece, 1] = float("nan")
    make = optimizer or reference.adamw
    losses = reference.train(plain, batches, loss=nn.functional.mse_loss, optimizer=make)
    options = {} if optimizer is None else {"optimizer": optimizer}
    trainer = build(ours, loss=nn.functional.mse_loss, device=device, **options)
    found = [trainer.step(batches[0]).loss]
    before = reference.copy_of(trainer.state_dict())
    with pytest.raises(NonFiniteLoss, match="nan"):
        trainer.step(poisoned)
    reference.assert_same_state(trainer.state_dict(), before)
    found += [trainer.step(batch).loss for batch in batches[1:]]
    assert found == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_an_infinite_loss_is_refused_too(build: Build) -> None:
    inputs, targets = list_batch()
    trainer = build(a_list(), loss=nn.functional.mse_loss)
    with pytest.raises(NonFiniteLoss, match="inf"):
        trainer.step((inputs * 1e30, targets))
    assert trainer.step((inputs, targets)).loss < 100


# **** layers that depend on the values of tensors ****


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value)


class Growing(Layer):
    """What comes out has as many rows as the data say."""

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value[value.sum(dim=1) > 0])


def test_what_depends_on_data_between_layers_is_refused_with_the_op_and_what_to_do(build: Build) -> None:
    class Selecting(Stack):
        def forward(self, inputs: Tensor) -> Output:
            return super().forward(inputs[inputs.sum(dim=1) > 0])

    trainer = build(Selecting([Layer(), Layer()]))
    with (
        pytest.warns(UserWarning, match="nonzero.default makes its shapes"),
        pytest.raises(CaptureError, match="must not depend on the data"),
    ):
        trainer.step({"inputs": list_batch()[0]})


@pytest.mark.filterwarnings("ignore:layer")
def test_a_layer_whose_output_has_a_shape_that_depends_on_data_is_refused_by_name(build: Build) -> None:
    trainer = build(Stack([Layer(), Growing(), Layer()]), microbatches=1)
    with pytest.raises(CaptureError, match=r"layers\.1.*Pad the outputs"):
        trainer.step({"inputs": list_batch()[0]})


def test_a_failed_capture_leaves_the_model_as_it_was() -> None:
    class Failing(Layer):
        def forward(self, value: Tensor) -> Tensor:
            raise RuntimeError("no")

    model = Stack([Layer(), Layer(), Failing()])
    before = reference.copy_of(model.state_dict())
    with relay.Trainer(model) as trainer, pytest.raises(CaptureError, match=r"layers\.2"):
        trainer.step({"inputs": list_batch()[0]})
    reference.assert_same_state(model.state_dict(), before)
    assert "forward" not in vars(model.layers[2])
