"""With `master_weights="split"` a run is the run with float32 masters, to the last bit, in less host memory."""

import copy
import functools
import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import relay
from relay.cli import main
from relay.errors import CheckpointError
from relay.optim import fused
from tests.support import mixed_reference, reference
from tests.support.zoo.plain_models import Build, everything, gpt, perceptron, regression

pytestmark = pytest.mark.skipif(not fused.available(), reason=f"not available: {fused.reason()}")

MSE = nn.functional.mse_loss


def spoiled(model: Any) -> Any:
    """The model with ties that round down, zeros of both signs and denormals among its weights."""
    with torch.no_grad():
        for parameter in reference.parameters_of(model):
            flat = parameter.view(-1)
            words = flat.view(torch.int32)
            words[::5] = (words[::5] & ~0x1FFFF) | 0x8000
            flat[1::11], flat[2::13], flat[3::17] = 0.0, -0.0, 1e-41
    return model


def trained(build: Build, masters: str, steps: int = 4, make: Any = gpt, **options: Any) -> tuple[Any, relay.Trainer]:
    """Losses of a run, and its trainer."""
    model = spoiled(make())
    whole = isinstance(model, nn.Module)
    loss = {} if whole else {"loss": MSE}
    trainer = build(model, **loss, **{"precision": "bf16", "master_weights": masters, **options})
    batches = reference.text_batches(steps) if whole else [regression(seed=seed) for seed in range(steps)]
    return [trainer.step(batch).loss for batch in batches], trainer


def assert_equal_runs(build: Build, **options: Any) -> relay.Trainer:
    """Train with split and with float32 masters, compare everything, and return the trainer with split ones."""
    losses, trainer = trained(build, "split", **options)
    expected, other = trained(build, "fp32", **options)
    assert losses == expected
    found, wanted = everything(trainer), everything(other)
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not different, f"these differ: {different}"
    assert trainer._session.store.split
    return trainer


OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {},
    "clipped, apart": {"device": "cpu:discrete", "clip_grad_norm": 0.05, "defer_updates": True},
    "bf16 states": {"state_dtype": "bf16", "stash": "host"},
    "int8 states": {"state_dtype": "int8", "layers_per_slot": 2},
}


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.sample("clipped, apart")
def test_fifty_steps_are_those_with_float32_masters(build: Build, kind: str) -> None:
    assert_equal_runs(build, make=functools.partial(gpt, layers=2), steps=50, **OPTIONS[kind])


OPTIMIZERS: dict[str, Any] = {
    "AMSGrad": relay.AdamW(lr=1e-2, amsgrad=True),
    "Adam": relay.Adam(lr=1e-2, weight_decay=0.1),
    "SGD": relay.SGD(lr=0.1),
    "SGD with momentum": relay.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "LAMB": relay.LAMB(lr=1e-2),
    "Lion": relay.Lion(lr=1e-3),
    "torch's NAdam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "torch's Adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.sample("AMSGrad", "SGD with momentum", "Lion")
def test_every_optimizer_updates_split_masters_as_float32_ones(build: Build, kind: str) -> None:
    groups = [{"params": "*bias", "lr": 3e-3}]
    assert_equal_runs(build, make=perceptron, optimizer=OPTIMIZERS[kind], param_groups=groups)


def test_a_run_is_plain_pytorch_with_autocast(build: Build) -> None:
    plain = spoiled(gpt())
    expected = mixed_reference.train(plain, reference.text_batches(4), precision="bf16", clip_norm=0.05)
    losses, trainer = trained(build, "split", clip_grad_norm=0.05)
    assert losses == expected.losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_tied_weights_are_as_with_float32_masters(build: Build) -> None:
    assert_equal_runs(build, make=functools.partial(gpt, tied=True))


class Shared(nn.Module):
    """A linear layer around a weight that another one has too."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(value))


def test_a_weight_that_two_layers_share_is_split_once(build: Build) -> None:
    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        linear = nn.Linear(8, 8)
        return [nn.Linear(6, 8), Shared(linear), nn.Linear(8, 8), Shared(linear), nn.Linear(8, 3)]

    trainer = assert_equal_runs(build, make=make)
    state = trainer.state_dict()
    assert torch.equal(state["1.linear.weight"], state["3.linear.weight"])


def test_frozen_weights_are_split_too(build: Build) -> None:
    def make() -> list[nn.Module]:
        layers = perceptron()
        layers[1].requires_grad_(False)
        return layers

    trainer = assert_equal_runs(build, make=make)
    assert trainer._model.get_parameter("1.0.weight").dtype is torch.bfloat16


def test_a_model_in_bfloat16_is_split_from_float32(build: Build) -> None:
    with pytest.warns(UserWarning, match="It is float32 now"):
        assert_equal_runs(build, make=lambda: gpt().bfloat16())


def test_other_shapes_and_evaluation_are_compiled_as_before(build: Build) -> None:
    found = []
    for masters in ("split", "fp32"):
        _, trainer = trained(build, masters, steps=1)
        batch = reference.text_batches(1)[0]
        half = {name: tensor[: len(tensor) // 2] for name, tensor in batch.items()}
        found.append([trainer.evaluate(batch).loss, trainer.step(half).loss, trainer.step(batch).loss])
    assert found[0] == found[1]


def test_the_comparison_with_plain_pytorch_finds_no_difference(build: Build) -> None:
    _, trainer = trained(build, "split")
    before = everything(trainer)
    assert trainer.verify(reference.text_batches(2)).equal
    after = everything(trainer)
    assert all(torch.equal(after[name], before[name]) for name in before)


# **** what the model and others see ****


def test_the_models_own_tensors_are_bfloat16_and_this_is_said_once(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    model = gpt()
    with caplog.at_level(logging.WARNING, logger="relay"):
        trainer = build(model, precision="bf16", master_weights="split")
        for batch in reference.text_batches(3):
            trainer.step(batch)
            trainer.evaluate(batch)
    said = [record.getMessage().split(":")[0] for record in caplog.records if record.name == "relay"]
    assert said == ["master_weights='split'"]
    linear, norm = model.blocks[0].feed_in.weight, model.blocks[0].feed_norm.weight
    assert (linear.dtype, norm.dtype) == (torch.bfloat16, torch.float32)
    state = trainer.state_dict()
    assert list(state) == list(model.state_dict())
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert torch.equal(state["blocks.0.feed_in.weight"].bfloat16(), linear)
    pickled = io.BytesIO()
    torch.save(state, pickled)
    pickled.seek(0)
    reference.assert_same_state(torch.load(pickled), dict(state))
    other = gpt()
    trainer.sync_to(other)
    reference.assert_same_state(other.state_dict(), dict(state))
    half = gpt().bfloat16()
    trainer.sync_to(half)
    assert torch.equal(half.blocks[0].feed_in.weight, linear)
    expected = {name: tensor.clone() for name, tensor in state.items()}
    trainer.close()
    reference.assert_same_state(model.state_dict(), expected)


def test_a_state_dict_shows_the_weights_of_the_time_it_is_read(build: Build) -> None:
    _, trainer = trained(build, "split", steps=1, clip_grad_norm=0.05, defer_updates=True)
    state = trainer.state_dict()
    name = "blocks.0.feed_in.weight"
    before = state[name]
    trainer.step(reference.text_batches(1)[0])
    assert not torch.equal(state[name], before)


def test_a_weight_written_through_the_model_is_what_the_model_shows(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    _, trainer = trained(build, "split", make=perceptron, steps=1)
    weight = trainer._model.get_parameter("1.0.weight")
    with torch.no_grad():
        weight.mul_(0.5)
    shown = weight.detach().clone()
    with caplog.at_level(logging.WARNING, logger="relay"):
        trainer.evaluate(regression())
    assert "'1.0.weight' was written through the model" in caplog.text
    state = trainer.state_dict()
    assert torch.equal(state["1.0.weight"], shown.float())
    assert not torch.equal(state["2.0.weight"], state["2.0.weight"].bfloat16().float())  # nothing else has changed


@pytest.mark.parametrize("read", ["state_dict", "sync_to", "save", "close"])
@pytest.mark.sample(2)
def test_a_weight_written_between_steps_is_read_as_it_was_written(build: Build, read: str, tmp_path: Path) -> None:
    _, trainer = trained(build, "split", steps=2)
    name = next(iter(trainer._session.store.split))
    with torch.no_grad():
        dict(trainer._model.named_parameters())[name].zero_()
    if read == "state_dict":
        found = trainer.state_dict()[name]
    elif read == "sync_to":
        copied = gpt()
        trainer.sync_to(copied)
        found = dict(copied.named_parameters())[name]
    elif read == "save":
        trainer.save(tmp_path / "run")
        _, other = trained(build, "fp32", steps=0)
        other.load(tmp_path / "run")
        found = other.state_dict()[name]
    else:
        trainer.close()
        found = dict(trainer._model.named_parameters())[name]
    assert torch.equal(found, torch.zeros_like(found))


def test_layers_are_inserted_removed_and_reordered_as_with_float32_masters(build: Build) -> None:
    states = []
    for masters in ("split", "fp32"):
        _, trainer = trained(build, masters, make=perceptron, steps=2)
        removed = trainer._compiler.modules[2]
        weight = removed[0].weight
        expected = trainer.state_dict()["2.0.weight"].clone()
        trainer.remove(2)
        assert weight.dtype is torch.float32
        assert torch.equal(weight, expected)
        trainer.step(regression())
        torch.manual_seed(5)
        trainer.insert(1, removed)
        trainer.step(regression())
        trainer.reorder([0, 2, 1, *range(3, len(trainer._compiler.modules))])
        trainer.step(regression())
        states.append(everything(trainer))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])


# **** checkpoints ****


@pytest.mark.parametrize(("was", "becomes"), [("split", "fp32"), ("fp32", "split"), ("split", "split")])
@pytest.mark.sample("split-fp32")
def test_masters_change_across_a_resume_without_losing_a_bit(
    build: Build, tmp_path: Path, was: str, becomes: str
) -> None:
    _, first = trained(build, was, steps=2)
    first.save(tmp_path / "c")
    batches = reference.text_batches(5, seed=3)
    for stepped in (False, True):
        _, other = trained(build, becomes, steps=int(stepped))
        other.load(tmp_path / "c")
        expected = copy.deepcopy(everything(first)) if not stepped else None
        if expected is not None:
            found = everything(other)
            assert all(torch.equal(found[name], expected[name]) for name in expected)
        other.step(batches[0])
        last = everything(other)
    first.step(batches[0])
    wanted = everything(first)
    assert all(torch.equal(last[name], wanted[name]) for name in wanted)


def test_a_checkpoint_written_behind_the_training_has_the_masters_of_its_step(build: Build, tmp_path: Path) -> None:
    _, trainer = trained(build, "split", steps=1)
    expected = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    saving = trainer.save(tmp_path / "c", background=True, memory="10kB")
    for batch in reference.text_batches(3):
        trainer.step(batch)
    saving.wait()
    _, other = trained(build, "fp32", steps=0)
    other.load(tmp_path / "c")
    reference.assert_same_state(other.state_dict(), expected)


def test_float32_masters_do_not_become_half_of_themselves(build: Build, tmp_path: Path) -> None:
    _, trainer = trained(build, "split", steps=1)
    trainer.save(tmp_path / "c")
    other = build(gpt().bfloat16(), master_weights="as_given")
    with pytest.raises(CheckpointError, match=r"the model has torch\.bfloat16.*the checkpoint F32"):
        other.load(tmp_path / "c")


# **** refused ****


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_precision_that_has_no_bfloat16_is_refused_with_the_reason(build: Build, precision: str) -> None:
    with pytest.raises(ValueError, match=r"takes no bfloat16, so there is nothing to split.*precision='bf16'"):
        build(gpt(), precision=precision, master_weights="split")
    with pytest.raises(ValueError, match="there is nothing to split"):
        relay.simulate(layers=2, hidden=64, precision=precision, master_weights="split", device="h200-sxm")
    words = ["train", "--precision", precision, "--master-weights", "split", "--steps", "1"]
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 2
    assert "there is nothing to split" in found.output


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_a_parameter_that_is_wider_than_float32_is_refused_by_name(build: Build, dtype: torch.dtype) -> None:
    layers = perceptron()
    layers[2].register_parameter("filter", nn.Parameter(torch.zeros(3, dtype=dtype)))
    with pytest.raises(ValueError, match=rf"'2\.filter' is {dtype}.*splits float32 alone.*master_weights='fp32'"):
        build(layers, loss=MSE, precision="bf16", master_weights="split")
