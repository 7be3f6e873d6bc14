"""A loss that is a module with parameters and buffers of its own, beside a list of layers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor, nn

import relay
from relay.cli import main
from tests.support import reference
from tests.support.zoo.plain_models import Build, everything, perceptron, regression

DATA = [regression(seed=seed) for seed in range(4)]


class Uncertainty(nn.Module):
    """A squared error weighed by learned uncertainties, which counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.linspace(-0.5, 0.5, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        errors = (output - targets).square() * torch.exp(-self.log_variance) + self.log_variance
        return errors.mean()


def named(modules: list[nn.Module], loss: nn.Module) -> nn.Module:
    """Layers and loss in one module, under the names that the trainer states."""
    whole = nn.Sequential(*modules)
    whole.add_module("loss", loss)
    return whole


def built(build: Build, **options: Any) -> relay.Trainer:
    chosen = {"microbatches": 2, "optimizer": relay.AdamW(lr=0.05, weight_decay=0.1)} | options
    return build(perceptron(), loss=Uncertainty(), **chosen)


def test_its_parameters_train_as_in_pytorch_and_the_state_holds_them_under_loss(build: Build) -> None:
    modules, loss = perceptron(), Uncertainty()
    plain = named(modules, loss)

    def made(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.1, fused=True)

    losses = reference.train(modules, DATA, 2, loss=loss, optimizer=made)
    trainer = built(build)
    assert [trainer.step(batch).loss for batch in DATA] == losses
    assert list(trainer.state_dict()) == list(plain.state_dict())
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())
    assert not torch.equal(trainer.state_dict()["loss.log_variance"], Uncertainty().log_variance)
    loss.eval()
    inputs, targets = DATA[0]
    output = nn.Sequential(*modules)(inputs)
    torch.testing.assert_close(trainer.evaluate(DATA[0]).loss, loss(output, targets).item(), rtol=1e-6, atol=0)
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("options", [{}, {"master_weights": "split", "precision": "bf16"}], ids=["fp32", "split"])
def test_a_checkpoint_holds_it_and_a_run_resumes_to_the_bit(build: Build, tmp_path: Path, options: Any) -> None:
    first = built(build, **options)
    for batch in DATA[:2]:
        first.step(batch)
    first.save(tmp_path / "run")
    later = [first.step(batch).loss for batch in DATA[2:]]
    resumed = built(build, **options)
    assert resumed.load(tmp_path / "run") == 2
    assert [resumed.step(batch).loss for batch in DATA[2:]] == later
    assert everything(resumed).keys() >= {"loss.log_variance", "loss.calls"}
    reference.assert_same_state(everything(resumed), everything(first))
    other = build(perceptron(), loss=nn.MSELoss(), optimizer=relay.AdamW(), **options)
    with pytest.raises(relay.CheckpointError, match=r"loss\."):
        other.load(tmp_path / "run")


def test_the_commands_on_checkpoints_count_it_and_export_it(build: Build, tmp_path: Path) -> None:
    trainer = built(build)
    trainer.save(tmp_path / "run")
    shown = CliRunner().invoke(main, ["inspect", str(tmp_path / "run"), "--json"])
    assert json.loads(shown.stdout)["parameters"] == sum(one.numel() for one in trainer._model.parameters())
    assert CliRunner().invoke(main, ["export", str(tmp_path / "run"), str(tmp_path / "out")]).exit_code == 0
    written, state = load_file(tmp_path / "out" / "model.safetensors"), trainer.state_dict()
    assert sorted(written) == sorted(state)
    assert all(torch.equal(written[name], state[name]) for name in written)


def test_weights_go_to_a_model_with_the_loss_and_to_one_without(build: Build) -> None:
    trainer = built(build, clip_grad_norm=0.1)
    trainer.step(DATA[0])
    layers, whole = nn.Sequential(*perceptron()), named(perceptron(), Uncertainty())
    trainer.sync_to(layers)
    trainer.sync_to(whole)
    state = trainer.state_dict()
    reference.assert_same_state(whole.state_dict(), state)
    reference.assert_same_state(layers.state_dict(), {name: state[name] for name in layers.state_dict()})


def test_it_has_a_group_of_its_own_and_is_verified_and_kept_when_layers_are_edited(build: Build) -> None:
    trainer = built(build, param_groups=[{"params": ["loss.*"], "weight_decay": 0.0, "lr": 0.5}])
    plain = copy.deepcopy(trainer._model)
    assert trainer.verify(DATA[:2]).equal
    trainer.insert(2, nn.Linear(8, 8))
    assert list(trainer.state_dict())[-2:] == ["loss.log_variance", "loss.calls"]
    trainer.step(DATA[0])
    moved = trainer.state_dict()["loss.log_variance"] - plain.state_dict()["loss.log_variance"]
    torch.testing.assert_close(moved.abs(), torch.full((3,), 0.5), rtol=1e-3, atol=0)  # the first step of AdamW
