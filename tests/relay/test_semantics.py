"""What a model may do in PyTorch it may do here: one test for each way in which that has gone wrong elsewhere."""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import relay
from hal.spec.units import format_size
from relay.models import GPT
from tests.support import reference
from tests.support.zoo.families import FAMILIES, VOCABULARY
from tests.support.zoo.plain_models import WIDTH, Block, Build, Output, Stack, batches, check

BOTH = pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])


# **** frozen parameters ****


def frozen(make: Callable[[], nn.Module], *names: str) -> nn.Module:
    model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))
    return model


@BOTH
@pytest.mark.parametrize("names", [("layers.0", "first"), ("layers.1",), ("norm",), ("last", "layers.2")])
@pytest.mark.sample("names0-cpu:discrete", "names2-cpu")
def test_frozen_parameters_stay_and_nothing_is_kept_or_sent_up_for_them(
    build: Build, names: tuple[str, ...], device: str
) -> None:
    trainer = check(build, functools.partial(frozen, Stack, *names), batches(), device=device)
    trainable = sum(parameter.numel() for parameter in trainer._model.parameters() if parameter.requires_grad)
    moments = sum(entry for label, entry in by_label(trainer).items() if "moments" in label)
    assert moments == 2 * 4 * trainable


def by_label(trainer: relay.Trainer) -> dict[str, int]:
    """Bytes of the host's ledger by state."""
    found: dict[str, int] = {}
    for label, _, size in trainer.ledger.rows():
        found[label] = found.get(label, 0) + size
    return found


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@BOTH
@pytest.mark.sample("cpu:discrete")
def test_lora_by_peft_trains_the_adapters_alone_and_costs_only_them(build: Build, device: str) -> None:
    from peft import LoraConfig, get_peft_model

    def make() -> nn.Module:
        torch.manual_seed(0)
        base = FAMILIES["llama"].make(0.0)
        settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        return get_peft_model(base, settings).train()

    given = [FAMILIES["llama"].draw(6, seed) for seed in range(4)]
    ours, plain = make(), make()
    losses = reference.train(plain, given, 2, shares=FAMILIES["llama"].shares)
    trainer = build(ours, microbatches=2, device=device)
    assert [trainer.step(batch).loss for batch in given] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())
    trainable = sum(parameter.numel() for parameter in ours.parameters() if parameter.requires_grad)
    assert 0 < trainable < 1000
    ledger = by_label(trainer)
    assert sum(size for label, size in ledger.items() if "moments" in label) == 2 * 4 * trainable
    gradients = sum(size for label, size in ledger.items() if "gradients" in label)
    assert gradients <= 2 * 4 * trainable + 4096, format_size(gradients)


# **** parameters of every kind ****


class Odd(Block):
    """Unused, empty, transposed, double and never-touched parameters beside the plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.randn(5, WIDTH).t())
        self.strided = nn.Parameter(torch.randn(WIDTH, 6)[:, ::2])

    def forward(self, value: Tensor) -> Tensor:
        mixed = value @ self.turned @ self.turned.t() * 0.01 + self.strided.sum(1)
        return super().forward(mixed) + self.empty.sum()


@BOTH
def test_unused_empty_and_non_contiguous_parameters_are_as_in_pytorch(build: Build, device: str) -> None:
    """Where the parameters lie otherwise in memory a product may round otherwise, so this is to rounding."""
    torch.manual_seed(0)
    ours = Stack(Odd)
    plain = copy.deepcopy(ours)
    losses = reference.train(plain, batches())
    trainer = build(ours, device=device)
    assert [trainer.step(batch).loss for batch in batches()] == pytest.approx(losses, rel=1e-5)
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(ours.layers[1].unused, torch.ones(3))


@BOTH
def test_a_parameter_without_elements_does_not_disturb_the_others(build: Build, device: str) -> None:
    class Empty(Block):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.zeros(0, 4))

        def forward(self, value: Tensor) -> Tensor:
            return super().forward(value) + self.empty.sum()

    check(build, functools.partial(Stack, Empty), batches(), device=device)


class Double(Block):
    """A norm in double precision within a model in single."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)

    def forward(self, value: Tensor) -> Tensor:
        return value + torch.tanh(self.inner(self.norm(value.double()).float()))


@BOTH
def test_every_parameter_keeps_its_dtype(build: Build, device: str) -> None:
    trainer = check(build, functools.partial(Stack, Double), batches(), device=device)
    assert trainer.state_dict()["layers.0.norm.weight"].dtype is torch.float64


@pytest.mark.parametrize("parametrization", [parametrizations.weight_norm, parametrizations.orthogonal])
@pytest.mark.sample("weight_norm")
def test_parametrized_weights_train_as_in_pytorch(build: Build, parametrization: Callable[..., nn.Module]) -> None:
    def block() -> nn.Module:
        made = Block()
        parametrization(made.inner)
        return made

    check(build, functools.partial(Stack, block), batches())


def test_spectral_norm_changes_its_buffers_once_a_piece(build: Build) -> None:
    def block() -> nn.Module:
        made = Block()
        parametrizations.spectral_norm(made.inner)
        return made

    check(build, functools.partial(Stack, block), batches())


class Looked(nn.Module):
    """An embedding whose gradient is sparse: a module, a function, or inside of a layer that runs eagerly."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.table = nn.Embedding(10, WIDTH, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.how == "function":
            return nn.functional.embedding(tokens, self.table.weight, sparse=True)
        if self.how == "eager" and tokens.sum() > 0:
            tokens = tokens.flip(0)
        return self.table(tokens)


@pytest.mark.parametrize("how", ["module", "function", "eager"])
def test_a_sparse_embedding_is_refused_before_the_step_with_the_way_round(build: Build, how: str) -> None:
    torch.manual_seed(0)
    model = [Looked(how), nn.Linear(WIDTH, WIDTH)]
    tokens, targets = torch.arange(6).view(2, 3), torch.randn(2, 3, WIDTH)
    trainer = build(model, loss=nn.functional.mse_loss, microbatches=1)
    before = reference.copy_of(trainer.state_dict())
    with pytest.raises(relay.CaptureError, match=r"layer '0' .*'table.weight'.*sparse=False"):
        trainer.step((tokens, targets))
    reference.assert_same_state(trainer.state_dict(), before)
    if how != "function":
        model[0].table.sparse = False
        assert trainer.step((tokens, targets)).loss > 0


class SparseTable(nn.Module):
    """A whole model whose embedding is outside of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.table(tokens)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return {"loss": hidden.square().mean()}


def test_a_sparse_embedding_outside_of_layers_is_refused_before_the_step(build: Build) -> None:
    trainer = build(SparseTable(), microbatches=1)
    before = reference.copy_of(trainer.state_dict())
    with pytest.raises(relay.CaptureError, match=r"layer 'prologue' makes a sparse gradient .*sparse=False"):
        trainer.step({"tokens": torch.arange(6).view(2, 3)})
    reference.assert_same_state(trainer.state_dict(), before)


def test_a_frozen_sparse_embedding_has_no_gradient_and_is_taken(build: Build) -> None:
    torch.manual_seed(0)
    model = [Looked("module").requires_grad_(False), nn.Linear(WIDTH, WIDTH)]
    trainer = build(model, loss=nn.functional.mse_loss, microbatches=1)
    assert trainer.step((torch.arange(6).view(2, 3), torch.randn(2, 3, WIDTH))).loss > 0


# **** outputs and losses ****


class Auxiliary(Stack):
    """A loss of parts: each block's own, and a dictionary of outputs."""

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:  # type: ignore[override]
        value = self.first(inputs)
        extra, kept = [], []
        for layer in self.layers:
            value = layer(value)
            extra.append(value.square().mean())
            kept.append(value)
        scores = self.last(value)
        loss = nn.functional.mse_loss(scores, targets) + 0.1 * torch.stack(extra).sum()
        return {"loss": loss, "scores": scores, "hidden": kept, "parts": (extra[0],)}


@BOTH
@pytest.mark.parametrize("stash", ["device", "host"])
def test_auxiliary_losses_of_every_layer_are_part_of_the_gradient(build: Build, stash: str, device: str) -> None:
    torch.manual_seed(0)
    ours = Auxiliary()
    plain = copy.deepcopy(ours)
    optimizer = reference.adamw(list(plain.parameters()))
    trainer = build(ours, stash=stash, device=device, microbatches=2)
    for batch in batches():
        optimizer.zero_grad()
        pieces = reference.cut(batch, 2)
        shares = reference.by_samples(pieces)
        loss = reference.gradients_of(lambda piece: plain(**piece)["loss"], pieces, shares)
        optimizer.step()
        assert trainer.step(batch).loss == loss
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


def test_predict_returns_every_output_in_the_models_own_structure(build: Build) -> None:
    torch.manual_seed(0)
    model = Auxiliary()
    plain = copy.deepcopy(model).eval()
    batch = batches(1)[0]
    found, expected = build(model, microbatches=1).predict(batch), plain(**batch)
    assert list(found) == list(expected)
    assert len(found["hidden"]) == 3
    for ours, theirs in zip(found["hidden"], expected["hidden"], strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(found["scores"], expected["scores"])


# **** writes in place ****


class InPlace(Stack):
    """Writes in place: on a tensor of its own, through a view, on what a block made, and on the batch's."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        shifted = torch.zeros_like(inputs)
        shifted[:, 1:] = inputs[:, :-1]
        shifted.mul_(0.5)
        value = self.first(shifted)
        value += 1.0
        for layer in self.layers:
            value = layer(value)
            value *= 0.9
            value[:, 0].add_(inputs[:, 0])
        value = self.last(value).relu_()
        return Output(nn.functional.mse_loss(value, targets), value)


@BOTH
def test_writes_in_place_between_layers_are_as_in_pytorch(build: Build, device: str) -> None:
    check(build, InPlace, batches(), device=device)


class Counting(Stack):
    """A buffer outside of the layers that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        self.seen.add_(inputs.detach().mean())
        return super().forward(inputs, targets)


@BOTH
def test_a_buffer_of_the_model_itself_changes_once_a_piece(build: Build, device: str) -> None:
    check(build, Counting, batches(), device=device)


# **** modes ****


def test_a_part_put_into_eval_mode_stays_in_it(build: Build) -> None:
    class WithNorm(Block):
        def __init__(self) -> None:
            super().__init__()
            self.batch = nn.BatchNorm1d(5)

        def forward(self, value: Tensor) -> Tensor:
            return super().forward(self.batch(value))

    def make() -> nn.Module:
        model = Stack(WithNorm)
        model.layers[1].eval()
        return model

    trainer = check(build, make, batches())
    assert not trainer._model.layers[1].batch.training
    assert torch.equal(trainer.state_dict()["layers.1.batch.running_mean"], torch.zeros(5))


def test_switching_between_train_and_eval_uses_the_right_program(build: Build) -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=VOCABULARY, layers=2, hidden=16, heads=2, sequence=12, tied=False, dropout=0.5)
    still = functools.partial(torch.optim.SGD, lr=0.0)
    trainer = build(model, optimizer=still)
    batch = reference.text_batches(1, 8, vocabulary=VOCABULARY)[0]
    plain = copy.deepcopy(model).eval()(**batch).loss.item()
    assert trainer.step(batch).loss != pytest.approx(plain, rel=3e-6)
    model.eval()
    assert trainer.step(batch).loss == pytest.approx(plain, rel=1e-6)
    model.train()
    assert trainer.step(batch).loss != pytest.approx(plain, rel=3e-6)


# **** lengths that vary ****


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.sample("1")
def test_lengths_may_vary_with_a_bounded_number_of_programs(build: Build, programs: int) -> None:
    lengths = [5, 3, 5, 7, 3, 2, 5]
    given = [batches(1, rows=8, length=length)[0] for length in lengths]
    trainer = check(build, Stack, given, max_cached_programs=programs)
    assert len(trainer._compiler.cache) == programs


def test_programs_that_are_no_longer_kept_are_gone_from_the_device(build: Build) -> None:
    torch.manual_seed(0)
    trainer = build(Stack(), max_cached_programs=1)
    counts = []
    for length in (5, 3, 5, 7, 3, 2, 5):
        trainer.step(batches(1, rows=8, length=length)[0])
        counts.append(len(trainer._session.device._kernels))
    assert counts[-1] == counts[0]


def text_of(length: int, seed: int) -> dict[str, Tensor]:
    batch = reference.text_batches(1, 6, length, VOCABULARY, seed)[0]
    return {**batch, "labels": batch["labels"]}


def test_batches_padded_to_buckets_train_the_same_and_need_one_program_for_each_bucket(build: Build) -> None:
    def make() -> GPT:
        torch.manual_seed(0)
        return GPT(vocabulary=VOCABULARY, layers=2, hidden=16, heads=2, sequence=12, tied=False)

    given = [text_of(length, seed) for seed, length in enumerate([5, 3, 9, 7, 12, 10])]
    plain = make()
    losses = reference.train(plain, given, 2)
    ours = make()
    trainer = build(ours, microbatches=2, buckets=relay.Buckets((6, 12)))
    assert [trainer.step(batch).loss for batch in given] == pytest.approx(losses, rel=1e-5)
    assert len(trainer._compiler.cache) == 2
    with pytest.raises(relay.BatchError, match="longest bucket is 12"):
        trainer.step(text_of(13, 0))
