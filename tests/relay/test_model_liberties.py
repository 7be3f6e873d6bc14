"""What a model may do beside layers and parameters: outputs of its own class, hooks, attributes and losses that change.

And that a trainer notices when the model is no longer the one it took over.
"""

import copy

import pytest
import torch
from torch import nn

import relay
from tests.support.zoo.plain_models import Build


class Named:
    """An output class that nobody registered anywhere."""

    def __init__(self, loss: torch.Tensor | None, logits: torch.Tensor) -> None:
        self.loss = loss
        self.logits = logits


class NamedOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Named:
        for layer in self.layers:
            inputs = layer(inputs)
        return Named(None if labels is None else nn.functional.cross_entropy(inputs, labels), inputs)


def test_predict_gives_an_object_of_the_models_own_class_for_the_whole_batch(build: Build) -> None:
    torch.manual_seed(0)
    model = NamedOutputs()
    inputs = torch.randn(7, 8)
    expected = model(inputs).logits.detach()
    output = build(model, microbatches=3).predict({"inputs": inputs})
    assert type(output) is Named
    assert output.loss is None
    torch.testing.assert_close(output.logits, expected, rtol=1e-6, atol=1e-6)


def test_hooks_of_a_repeated_layer_run_once(build: Build) -> None:
    torch.manual_seed(0)
    model = NamedOutputs()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: output * 2)
        layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    batch = {"inputs": torch.randn(4, 8), "labels": torch.tensor([0, 1, 2, 3])}
    expected = model(**batch).loss.item()
    assert build(model, microbatches=1).step(batch).loss == expected


def test_a_number_that_changes_between_steps_is_seen(build: Build) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    torch.manual_seed(0)
    modules: list[nn.Module] = [Scaled() for _ in range(3)]
    batch = (torch.randn(4, 8), torch.randn(4, 8))
    trainer = build(modules, loss=nn.functional.mse_loss, microbatches=1)
    trainer.step(batch)
    for module in modules:
        module.scale = 3.0  # type: ignore[assignment]
    expected = nn.functional.mse_loss(nn.Sequential(*modules)(batch[0]), batch[1]).item()
    assert trainer.step(batch).loss == expected


@pytest.mark.parametrize("change", ["replaced", "cast", "taken"])
def test_a_model_that_is_no_longer_the_one_taken_over_is_refused_by_name(build: Build, change: str) -> None:
    model = NamedOutputs()
    batch = {"inputs": torch.randn(4, 8), "labels": torch.tensor([0, 1, 2, 3])}
    trainer = build(model)
    trainer.step(batch)
    if change == "replaced":
        model.layers[1].weight = nn.Parameter(torch.zeros(8, 8))
    elif change == "cast":
        model.double()
    else:
        build(model).step(batch)
    with pytest.raises(relay.ModelChanged, match=r"layers\.\d\.weight.*new\s+trainer"):
        trainer.step(batch)


def test_an_input_that_every_micro_batch_needs_whole_can_be_named(build: Build) -> None:
    class Masked(NamedOutputs):
        def forward(self, inputs: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Named:  # type: ignore[override]
            return super().forward(inputs * mask.sum(0), labels)

    torch.manual_seed(0)
    model = Masked()
    batch = {"mask": torch.rand(8, 8), "inputs": torch.randn(8, 8), "labels": torch.arange(8)}
    expected = model(**batch).loss.item()
    loss = build(model, microbatches=2, shared_inputs=["mask"]).step(batch).loss
    assert loss == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_is_a_module_with_tensors_of_its_own_works(build: Build) -> None:
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]))
    modules = [nn.Linear(8, 8), nn.Linear(8, 2)]
    inputs, targets = torch.randn(8, 8), torch.randint(0, 2, (8,))
    expected = loss(nn.Sequential(*modules)(inputs), targets).item()
    trainer = build(modules, loss=loss, microbatches=1)
    assert trainer.step((inputs, targets)).loss == expected
    assert list(trainer.state_dict()) == list(nn.Sequential(*modules).state_dict())


def test_a_buffer_that_the_forward_changes_and_uses_has_the_gradients_of_its_old_value(build: Build) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return x + torch.tanh(self.linear(x)) * self.count

    torch.manual_seed(0)
    modules: list[nn.Module] = [Counting() for _ in range(4)]
    plain = nn.Sequential(*copy.deepcopy(modules))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    trainer = build(modules, loss=nn.functional.mse_loss, microbatches=3)
    for _ in range(4):
        inputs, targets = torch.randn(6, 8), torch.randn(6, 8)
        total = 0.0
        for piece, target in zip(inputs.chunk(3), targets.chunk(3), strict=True):
            loss = nn.functional.mse_loss(plain(piece.clone()), target) * (2 / 6)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        assert trainer.step((inputs, targets)).loss == total
    for mine, theirs in zip(trainer.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_a_batch_with_class_weights_is_the_same_however_it_is_cut(build: Build, reduction: str) -> None:
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]), reduction=reduction)
    modules = [nn.Linear(8, 8), nn.Linear(8, 2)]
    inputs, targets = torch.randn(9, 8), torch.tensor([0, 0, 0, 1, 1, 0, 1, 1, 1])
    expected = loss(nn.Sequential(*modules)(inputs), targets).item()
    assert build(modules, loss=loss, microbatches=3).step((inputs, targets)).loss == pytest.approx(expected, rel=1e-6)
