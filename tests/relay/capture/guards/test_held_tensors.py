"""Parameters and views of parameters in attributes, lists, closures and partials train as in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import relay
from relay.errors import CaptureError, PartitionError
from tests.support import reference
from tests.support.zoo.plain_models import WIDTH, Build, Output, output

pytestmark = pytest.mark.filterwarnings("ignore:layer .* runs eagerly", "ignore:The loss of .* cannot be followed")

Hold = Callable[["Model"], None]
Use = Callable[["Layer", Tensor], Tensor]


class Layer(nn.Module):
    """A residual layer, and a function of what it holds besides its linear layer."""

    held: Any

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.use = use

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.tanh(self.linear(value) + self.use(self, value))


class Model(nn.Module):
    def __init__(self, hold: Hold, use: Use = lambda layer, value: value, head: Any = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(use) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.head = head or (lambda model, value: model.last(value))
        hold(self)

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.first(inputs)
        for layer in self.layers:
            value = layer(value)
        return output(self.head(self, value), targets)


def in_layers(make: Callable[[Model, Layer], Any]) -> Hold:
    def hold(model: Model) -> None:
        for layer in model.layers:
            layer.__dict__["held"] = make(model, layer)  # type: ignore[arg-type]

    return hold


def in_model(make: Callable[[Model], Any]) -> Hold:
    def hold(model: Model) -> None:
        model.__dict__["held"] = make(model)

    return hold


def closure(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda value: value @ weight


def eager(value: Tensor) -> Tensor:
    return value if value.sum().item() > 0 else -value


MODELS: dict[str, Callable[[], nn.Module]] = {
    "its own weight in a closure": lambda: Model(
        in_layers(lambda _, layer: closure(layer.linear.weight)), lambda layer, value: layer.held(value)
    ),
    "a transposed view": lambda: Model(
        in_layers(lambda _, layer: layer.linear.weight.t()), lambda layer, value: value @ layer.held
    ),
    "rows, columns and a diagonal": lambda: Model(
        in_layers(
            lambda _, layer: [
                layer.linear.weight[1],
                layer.linear.weight[2:4].detach(),
                layer.linear.weight.data[:, 3],
                layer.linear.weight.diagonal(),
            ]
        ),
        lambda layer, value: layer.held[0] * value + layer.held[1].sum(0) + layer.held[2] * layer.held[3],
    ),
    "a view in a layer that runs eagerly": lambda: Model(
        in_layers(lambda _, layer: [layer.linear.weight.t()]), lambda layer, value: eager(value) @ layer.held[0]
    ),
    "a weight of the model in a list": lambda: Model(
        in_layers(lambda model, _: [model.first.weight]), lambda layer, value: value @ layer.held[0]
    ),
    "a weight of the first layer in all": lambda: Model(
        in_layers(lambda model, _: [model.layers[0].linear.weight]), lambda layer, value: value @ layer.held[0]
    ),
    "a module in a list": lambda: Model(
        in_layers(lambda model, _: [model.last]), lambda layer, value: layer.held[0](value)
    ),
    "a weight of the model where a layer runs eagerly": lambda: Model(
        in_layers(lambda model, _: [model.first.weight]), lambda layer, value: eager(value) @ layer.held[0]
    ),
    "a partial of the head": lambda: Model(
        in_model(lambda model: functools.partial(functional.linear, weight=model.first.weight)),
        head=lambda model, value: model.held(value),
    ),
    "a view in the head": lambda: Model(
        in_model(lambda model: model.last.weight.t()), head=lambda model, value: value @ model.held
    ),
    "a layer in the head": lambda: Model(
        in_model(lambda model: [model.layers[1].linear]), head=lambda model, value: model.held[0](value)
    ),
    "a buffer of another layer": lambda: Model(
        in_layers(lambda model, layer: _buffer(model)), lambda layer, value: value * layer.held
    ),
}
SAMPLE = {"a transposed view", "a view in a layer that runs eagerly", "a weight of the first layer in all"}
OWN = [*MODELS][:4]
"""Where a weight has one place in the order of layers, so that several micro-batches are equal to the bit too."""


def _buffer(model: Model) -> Tensor:
    if "scale" not in model._buffers:
        model.register_buffer("scale", torch.full((WIDTH,), 0.5))
    return model.scale  # type: ignore[return-value]


def batches(steps: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{name: torch.randn(6, WIDTH, generator=generator) for name in ("inputs", "targets")} for _ in range(steps)]


def two(make: Callable[[], Any]) -> tuple[Any, Any]:
    """A copy of a model holds the tensors of the one that was copied, so both are made anew."""
    torch.manual_seed(0)
    ours = make()
    torch.manual_seed(0)
    return ours, make()


CASES = [(name, 1) for name in MODELS] + [(name, 2) for name in OWN]


@pytest.mark.parametrize(
    ("name", "microbatches"),
    [pytest.param(*case, marks=() if case[0] in SAMPLE and case[1] == 1 else pytest.mark.exhaustive) for case in CASES],
)
def test_what_code_holds_trains_as_in_pytorch_and_shows_its_numbers_afterwards(
    build: Build, name: str, microbatches: int
) -> None:
    ours, plain = two(MODELS[name])
    losses = reference.train(plain, batches(), microbatches)
    trainer = build(ours, microbatches=microbatches)
    assert [trainer.step(batch).loss for batch in batches()] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())
    batch = batches()[0]
    assert torch.equal(ours(**batch).value, plain(**batch).value), "the model as it is called between steps"
    assert not torch.equal(plain(**batch).value, MODELS[name]()(**batch).value)
    trainer.close()
    assert torch.equal(ours(**batch).value, plain(**batch).value)


def test_a_view_that_is_made_after_a_step_is_followed_and_compiled_once(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    ours, plain = two(lambda: Model(in_layers(lambda *_: None), _late))
    losses = reference.train(plain, batches(), 1)
    trainer = build(ours, microbatches=1)
    found = [trainer.step(batches()[0]).loss]
    with caplog.at_level("INFO", logger="relay"):
        found += [trainer.step(batch).loss for batch in batches()[1:]]
    assert found == losses
    assert not [record for record in caplog.records if "compiling" in record.message]
    for model in (ours, plain):
        for layer in model.layers:
            layer.held = layer.linear.weight.detach()[1:2]
    with caplog.at_level("INFO", logger="relay"):
        losses = reference.train(plain, batches(), 1, optimizer=functools.partial(torch.optim.SGD, lr=0.0))
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        trainer.optimizer.param_groups[0]["weight_decay"] = 0.0
        assert [trainer.step(batch).loss for batch in batches()] == losses
    assert len([record for record in caplog.records if "compiling" in record.message]) == 1


def _late(layer: Layer, value: Tensor) -> Tensor:
    return value if layer.held is None else value * layer.held.sum()


def test_a_weight_in_the_closure_of_a_lists_loss_is_trained(build: Build) -> None:
    def make() -> tuple[list[nn.Module], Callable[[Tensor, Tensor], Tensor]]:
        modules: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        weight = modules[0].weight
        return modules, lambda value, targets: functional.mse_loss(value @ weight, targets)  # type: ignore[operator]

    (ours, loss), (plain, plain_loss) = two(make)
    pairs = [(batch["inputs"], batch["targets"]) for batch in batches()]
    losses = reference.train(plain, pairs, 1, loss=plain_loss)
    trainer = build(ours, loss=loss, microbatches=1)
    assert [trainer.step(pair).loss for pair in pairs] == losses
    reference.assert_same_state(reference.state_of(ours), reference.state_of(plain))


@pytest.mark.parametrize("runs_eagerly", [False, True])
def test_what_was_computed_from_a_parameter_before_is_refused_by_name(build: Build, runs_eagerly: bool) -> None:
    model = Model(
        in_layers(lambda _, layer: layer.linear.weight * 2),
        lambda layer, value: (eager(value) if runs_eagerly else value) @ layer.held,
    )
    with pytest.raises(CaptureError, match=r"layers\.0.*computed before"):
        build(model, microbatches=1).step(batches()[0])


def test_a_view_in_another_dtype_than_its_parameter_is_refused_by_name(build: Build) -> None:
    model = Model(in_layers(lambda _, layer: layer.linear.weight.data), lambda layer, value: value @ layer.held.float())
    for layer in model.layers:
        layer.bfloat16()  # type: ignore[union-attr]
        layer.held = layer.linear.weight.data  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="float32 now"):
        trainer = build(model, microbatches=1)
    with pytest.raises(CaptureError, match=r"view of 'layers\.0\.linear\.weight'"):
        trainer.step(batches()[0])


def test_a_buffer_that_one_layer_changes_and_another_holds_is_refused_by_name(build: Build) -> None:
    class Counts(Layer):
        def forward(self, value: Tensor) -> Tensor:
            self.count += 1
            return super().forward(value)

    model = Model(in_layers(lambda *_: None), lambda layer, value: value)
    for layer in model.layers:
        layer.__class__ = Counts
        layer.register_buffer("count", torch.zeros(()))
    model.layers[1].held = [model.layers[0].count]
    model.layers[1].use = lambda layer, value: value * layer.held[0]
    with pytest.raises(PartitionError, match=r"layers\.1.*holds the buffer 'layers\.0\.count'"):
        build(model, microbatches=1).step(batches()[0])


def test_a_parameter_that_is_not_registered_stays_and_is_named(build: Build) -> None:
    def make() -> Model:
        return Model(
            in_layers(lambda *_: [nn.Parameter(torch.ones(WIDTH))]), lambda layer, value: value * layer.held[0]
        )

    ours, plain = two(make)
    losses = reference.train(plain, batches(), 1)
    trainer = build(ours, microbatches=1)
    with pytest.warns(UserWarning, match=r"layers\.0.*not registered"):
        assert [trainer.step(batch).loss for batch in batches()] == losses
    assert torch.equal(ours.layers[0].held[0], torch.ones(WIDTH))


def test_held_weights_train_on_a_device_that_does_not_run_pytorch() -> None:
    for name in ("a transposed view", "a weight of the model in a list"):
        ours, plain = two(MODELS[name])
        losses = reference.train(plain, batches(), 1)
        with relay.Trainer(ours, device="onnx:cpu", microbatches=1) as trainer:
            assert [trainer.step(batch).loss for batch in batches()] == pytest.approx(losses, rel=1e-5)
