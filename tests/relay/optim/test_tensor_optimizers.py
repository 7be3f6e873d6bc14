"""`relay.Adafactor` is transformers' with a given learning rate, `relay.Muon` torch's Muon beside torch's AdamW."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from relay.errors import CheckpointError
from relay.optim import fused
from tests.support import mixed_reference, reference
from tests.support.zoo.plain_models import Build, everything, gpt, perceptron, regression

MSE = nn.functional.mse_loss
STEPS = 5


class Convolutions(nn.Module):
    """A layer whose weight has four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(1, 3, 3, padding=1)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, value: Tensor) -> Tensor:
        image = value.view(-1, 1, 2, 4)
        return value + self.scale * self.inner(image).mean(1).view(value.shape)


def layers() -> list[nn.Module]:
    """Matrices of both orientations, vectors, a scalar and a convolution."""
    torch.manual_seed(0)
    middle = [nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 8)) for _ in range(2)]
    return [nn.Linear(6, 8), *middle, Convolutions(), nn.Linear(8, 3)]


# **** Adafactor ****

ADAFACTORS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 0.05},
    "for T5": {"lr": 1e-2, "scale_parameter": False, "clip_threshold": 0.5},
    "with a first moment": {"lr": 1e-2, "beta1": 0.9, "weight_decay": 0.1, "decay_rate": -0.5},
}


def plain_adafactor(**options: Any) -> reference.MakeOptimizer:
    optimization = pytest.importorskip("transformers.optimization")
    return functools.partial(optimization.Adafactor, relative_step=False, **options)


@pytest.mark.parametrize("kind", ADAFACTORS)
@pytest.mark.sample(2)
def test_adafactor_is_that_of_transformers_to_the_bit(build: Build, kind: str) -> None:
    plain = layers()
    batches = [regression(seed=seed) for seed in range(STEPS)]
    losses = reference.train(plain, batches, loss=MSE, optimizer=plain_adafactor(**ADAFACTORS[kind]))
    trainer = build(layers(), loss=MSE, optimizer=relay.Adafactor(**ADAFACTORS[kind]))
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_adafactor_in_bf16_with_clipping_is_plain_training_with_split_masters_too(build: Build) -> None:
    plain = gpt()
    batches = reference.text_batches(STEPS)
    found = mixed_reference.train(
        plain, batches, precision="bf16", clip_norm=0.05, optimizer=plain_adafactor(lr=0.05)
    )  # fmt: skip
    masters = ["fp32", "split"] if fused.available() else ["fp32"]
    for kind in masters:
        options = {"precision": "bf16", "clip_grad_norm": 0.05, "master_weights": kind, "device": "cpu:discrete"}
        trainer = build(gpt(), optimizer=relay.Adafactor(lr=0.05), **options)
        assert [trainer.step(batch).loss for batch in batches] == found.losses
        reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_adafactor_takes_a_row_and_a_column_for_each_matrix(build: Build) -> None:
    width = 64
    made = [nn.Linear(width, 3 * width, bias=False), nn.Linear(3 * width, width, bias=False)]
    trainer = build(made, loss=MSE, optimizer=relay.Adafactor())
    trainer.prepare((torch.zeros(4, width), torch.zeros(4, width)))
    rows = {state: size for state, _, size in trainer.ledger.rows()}
    assert rows["second moments of rows"] == rows["second moments of columns"] == 4 * 4 * width
    assert rows["work space of the optimizer"] == 4 * 3 * width * width  # one matrix
    before = trainer.ledger.total
    trainer.step((torch.zeros(4, width), torch.zeros(4, width)))
    assert trainer.ledger.total == before


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1.0}, r"lr=-1\.0"),
        ({"decay_rate": 0.8}, "decay_rate=0.8 must be below 0"),
        ({"beta1": 1.0}, r"beta1=1\.0"),
        ({"eps": (1e-30,)}, "eps="),
        ({"eps": 1e-30}, "eps=1e-30 must be two numbers"),
        ({"lr": None}, "lr=None must be a number"),
        ({"clip_threshold": 0}, "clip_threshold=0"),
    ],
)
def test_adafactor_refuses_numbers_out_of_range(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        relay.Adafactor(**options)


@pytest.mark.parametrize("optimizer", [relay.Adafactor(), relay.Muon()])
def test_their_states_are_not_narrowed(build: Build, optimizer: Any) -> None:
    with pytest.raises(ValueError, match=r"has its states in float32\. Leave it out"):
        build(perceptron(), loss=MSE, optimizer=optimizer, state_dtype="int8")


def test_float64_is_refused_by_name(build: Build) -> None:
    made = perceptron()
    made[2].double()
    with pytest.raises(ValueError, match=r"'2\.0\.weight' is torch\.float64: Adafactor updates float32"):
        build(made, loss=MSE, optimizer=relay.Adafactor())


# **** Muon ****


class Both:
    """torch's Muon for some parameters and torch's AdamW for the others, as a script has them."""

    def __init__(self, matrices: Sequence[nn.Parameter], others: Sequence[nn.Parameter], muon: Any, adamw: Any) -> None:
        self.optimizers = torch.optim.Muon(matrices, **muon), torch.optim.AdamW(others, fused=True, **adamw)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def both(model: nn.Module, muon: dict[str, Any], adamw: dict[str, Any]) -> Both:
    """Muon for the matrices of a GPT's blocks, AdamW for the rest."""
    named = dict(model.named_parameters())
    matrices = [one for name, one in named.items() if one.ndim == 2 and name.startswith("blocks")]
    ids = {id(one) for one in matrices}
    return Both(matrices, [one for one in named.values() if id(one) not in ids], muon, adamw)


MUONS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 0.02},
    "Moonshot's": {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw", "nesterov": False, "weight_decay": 0.0},
    "few steps": {"lr": 0.02, "ns_steps": 3, "momentum": 0.8, "ns_coefficients": (2.0, -1.5, 0.5)},
}
ADAMW = {"lr": 3e-3, "weight_decay": 0.1}


@pytest.mark.parametrize("kind", MUONS)
@pytest.mark.sample(2)
def test_muon_is_torchs_muon_and_adamw_to_the_bit(build: Build, kind: str) -> None:
    plain = gpt()
    batches = reference.text_batches(STEPS)
    losses = reference.train(plain, batches, optimizer=lambda _: both(plain, MUONS[kind], ADAMW))
    trainer = build(gpt(), optimizer=relay.Muon(adamw=relay.AdamW(**ADAMW), **MUONS[kind]))
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


@pytest.mark.parametrize("masters", ["fp32", "split"])
@pytest.mark.sample("split")
def test_muon_in_bf16_with_clipping_is_plain_training(build: Build, masters: str) -> None:
    if masters == "split" and not fused.available():
        pytest.skip(fused.reason())
    plain = gpt()
    batches = reference.text_batches(STEPS)
    found = mixed_reference.train(
        plain, batches, precision="bf16", clip_norm=0.05, optimizer=lambda _: both(plain, MUONS["defaults"], ADAMW)
    )  # fmt: skip
    options = {"precision": "bf16", "clip_grad_norm": 0.05, "master_weights": masters, "defer_updates": True}
    trainer = build(gpt(), optimizer=relay.Muon(adamw=relay.AdamW(**ADAMW), **MUONS["defaults"]), **options)
    assert [trainer.step(batch).loss for batch in batches] == found.losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_embeddings_head_and_vectors_are_a_group_of_their_own_that_schedules_reach(build: Build) -> None:
    trainer = build(gpt(), optimizer=relay.Muon(lr=0.02, adamw=relay.AdamW(lr=1e-3)))
    matrices, others = trainer.param_groups
    assert (matrices["use_muon"], matrices["lr"]) == (True, 0.02)
    assert (others["use_muon"], others["lr"], others["eps"]) == (False, 1e-3, 1e-8)
    names = {id(one): name for name, one in trainer._model.named_parameters()}
    assert all(one.ndim == 2 and names[id(one)].startswith("blocks") for one in matrices["params"])
    apart = {names[id(one)] for one in others["params"]}
    assert {"head.projection.weight", "embedding.token.weight", "embedding.position.weight"} <= apart
    schedule = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 0.5)
    assert [group["lr"] for group in trainer.param_groups] == [0.01, 5e-4]
    assert schedule.get_last_lr() == [0.01, 5e-4]


def test_a_vector_is_refused_with_what_to_do(build: Build) -> None:
    groups = [{"params": "*bias", "weight_decay": 0.0}]
    with pytest.raises(ValueError, match=r"gives '0\.bias' of shape \(8,\) to Muon.*Add use_muon=False"):
        build(perceptron(), loss=MSE, optimizer=relay.Muon(), param_groups=groups)
    trainer = build(
        perceptron(), loss=MSE, optimizer=relay.Muon(), param_groups=[{**groups[0], "use_muon": False}]
    )  # fmt: skip
    trainer.step(regression())
    assert trainer.param_groups[1]["lr"] == 3e-4
    assert trainer.param_groups[1]["weight_decay"] == 0.0


def test_torchs_muon_is_refused_in_favour_of_the_relays(build: Build) -> None:
    with pytest.raises(TypeError, match=r"matrices only: use relay\.Muon"):
        build(perceptron(), loss=MSE, optimizer=functools.partial(torch.optim.Muon, lr=0.1))


# **** both ****


@pytest.mark.parametrize("optimizer", [relay.Adafactor(lr=0.05, beta1=0.9), relay.Muon()], ids=["Adafactor", "Muon"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(build: Build, tmp_path: Path, optimizer: Any) -> None:
    def make() -> relay.Trainer:
        return build(layers(), loss=MSE, optimizer=optimizer)

    first = make()
    for seed in range(2):
        first.step(regression(seed=seed))
    first.save(tmp_path / "c")
    state = first.optimizer.state_dict()
    for stepped in (False, True):
        other = make()
        if stepped:
            other.step(regression())
        other.load(tmp_path / "c")
        before = other.optimizer.state_dict()["state"]
        for number, of_one in state["state"].items():
            for label, value in of_one.items():
                assert torch.equal(torch.as_tensor(before[number][label]), torch.as_tensor(value))
        other.optimizer.load_state_dict(other.optimizer.state_dict())
        other.step(regression(seed=9))
        last = everything(other)
    first.step(regression(seed=9))
    wanted = everything(first)
    assert all(torch.equal(last[name], wanted[name]) for name in wanted)
    stranger = build(layers(), loss=MSE, optimizer=relay.Adafactor(lr=0.05))
    stranger.step(regression())
    with pytest.raises(CheckpointError):
        stranger.load(tmp_path / "c")


def test_an_adafactor_with_other_moments_says_what_the_checkpoint_had(build: Build, tmp_path: Path) -> None:
    build(layers(), loss=MSE, optimizer=relay.Adafactor(lr=0.05)).save(tmp_path / "c")
    other = build(layers(), loss=MSE, optimizer=relay.Adafactor(lr=0.05, beta1=0.9))
    with pytest.raises(CheckpointError, match=r"Adafactor and beta1=None, the trainer has beta1=0\.9\. Build"):
        other.load(tmp_path / "c")


@pytest.mark.parametrize("optimizer", [relay.Adafactor(lr=0.05), relay.Muon()], ids=["Adafactor", "Muon"])
def test_layers_that_are_put_in_and_taken_out_keep_the_states_of_the_others(build: Build, optimizer: Any) -> None:
    trainer = build(layers(), loss=MSE, optimizer=optimizer)
    trainer.step(regression())
    kept = {name: value.clone() for name, value in trainer._session.server.optimizer.state("2.0.weight").items()}
    torch.manual_seed(3)
    trainer.insert(1, nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 8)))
    moved = trainer._session.server.optimizer.state("3.0.weight")
    assert all(torch.equal(moved[name], kept[name]) for name in kept)
    trainer.step(regression())
    trainer.remove(2)
    trainer.step(regression())
