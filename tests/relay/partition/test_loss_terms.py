"""Losses in micro-batches: whole models, layers that mix samples, what cannot be followed, and what the user states."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay
from relay.errors import PartitionError

Build = Callable[..., relay.Trainer]
Loss = Callable[..., Tensor]
RATE = 2.0**20

DOUBT = "may not be that of the whole batch"


def drawn() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 3, (12,), generator=generator)
    labels[[0, 1, 2, 5, 9]] = -100
    return {
        "inputs": torch.randn(12, 6, generator=generator),
        "numbers": torch.randn(12, 3, generator=generator),
        "labels": labels,
    }


BATCH = drawn()


class Whole(nn.Module):
    """Layers, and a loss that the model works out itself from their output and the batch."""

    def __init__(self, loss: Loss, layer: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 16)
        make = layer or (lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.head = nn.Linear(16, 3)
        self.loss = loss

    def forward(self, **batch: Any) -> SimpleNamespace:
        value = self.first(batch["inputs"])
        for layer in self.layers:
            value = layer(value)
        output = self.head(value)
        return SimpleNamespace(loss=self.loss(output, batch, self), output=output)


def gradients_of(model: nn.Module, trainer: relay.Trainer, batch: Any) -> tuple[float, Tensor]:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = trainer.step(batch).loss
    after = [parameter.detach() for parameter in model.parameters()]
    return loss, torch.cat([((old - new) / RATE).flatten() for old, new in zip(before, after, strict=True)])


def plain(model: nn.Module, batch: Any) -> tuple[float, Tensor]:
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]


def assert_same(build: Build, make: Callable[[], nn.Module], batch: Any, microbatches: int, **options: Any) -> None:
    """Loss and gradients are those of plain PyTorch on the whole batch, and nothing is said."""
    expected, model = plain(make(), batch), make()
    trainer = build(model, microbatches=microbatches, optimizer=relay.SGD(lr=RATE), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{DOUBT}")
        found = gradients_of(model, trainer, batch)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert float((found[1] - expected[1]).norm()) <= 1e-6 * float(expected[1].norm())


def both(output: Tensor, batch: dict[str, Tensor], model: Any) -> Tensor:
    return F.cross_entropy(output, batch["labels"]) + 0.3 * F.mse_loss(output, batch["numbers"])


WHOLE: dict[str, Loss] = {
    "a cross-entropy": lambda o, b, m: F.cross_entropy(o, b["labels"]),
    "a masked mean by hand": lambda o, b, m: (
        (F.cross_entropy(o, b["labels"], reduction="none") * (b["labels"] >= 0)).sum() / (b["labels"] >= 0).sum()
    ),
    "a cross-entropy and a mean": both,
    "and the norm of a parameter": lambda o, b, m: both(o, b, m) + 0.1 * m.head.weight.square().sum(),
    "over the length less one": lambda o, b, m: (o - b["numbers"]).square().sum() / (len(o) - 1),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.sample(2)
def test_a_whole_models_loss_is_that_of_the_batch_with_a_ragged_last_micro_batch(build: Build, name: str) -> None:
    batch = {key: tensor[:11] for key, tensor in BATCH.items()}
    assert_same(build, lambda: Whole(WHOLE[name]), batch, 4)


def test_micro_batches_of_one_sample_are_followed_too(build: Build) -> None:
    batch = {key: tensor[3:7] for key, tensor in BATCH.items()}
    assert_same(build, lambda: Whole(both), batch, 4)


@pytest.mark.parametrize("given", [28, torch.tensor(28)], ids=["a number", "a tensor"])
def test_a_sum_over_a_given_count_is_that_of_the_batch(build: Build, given: Any) -> None:
    def loss(output: Tensor, batch: dict[str, Any], model: Any) -> Tensor:
        return F.cross_entropy(output, batch["labels"], reduction="sum") / batch["count"]

    assert_same(build, lambda: Whole(loss), {**BATCH, "count": given}, 4)


def test_a_micro_batch_without_targets_of_a_term_adds_exactly_nothing_of_it(build: Build) -> None:
    def first(output: Tensor, batch: dict[str, Tensor], model: Any) -> Tensor:
        return F.cross_entropy(output, batch["labels"]) + F.cross_entropy(-output, batch["labels"].roll(0))

    def one_term(output: Tensor, batch: dict[str, Tensor], model: Any) -> Tensor:
        return F.cross_entropy(output, batch["labels"]) + 0 * F.mse_loss(output, batch["numbers"])

    labels = BATCH["labels"].clone()
    labels[:6] = -100
    for loss in (first, one_term):
        assert_same(build, lambda loss=loss: Whole(loss), {**BATCH, "labels": labels}, 4)  # type: ignore[misc]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_terms_that_count_differently_add_up_in_half_precision_with_a_loss_scale(build: Build, precision: str) -> None:
    model = Whole(both)
    trainer = build(model, microbatches=4, precision=precision, optimizer=relay.SGD(lr=0.1))
    with torch.autocast("cpu", torch.bfloat16 if precision == "bf16" else torch.float16):
        expected = Whole(both)(**BATCH).loss.item()
    assert trainer.step(BATCH).loss == pytest.approx(expected, rel=1e-2)
    assert trainer.step(BATCH).loss < expected


def test_evaluate_and_predict_give_the_loss_of_the_batch(build: Build) -> None:
    expected = Whole(both)(**BATCH)
    trainer = build(Whole(both), microbatches=3)
    assert trainer.evaluate(BATCH).loss == pytest.approx(expected.loss.item(), rel=1e-6)
    found = trainer.predict(BATCH)
    assert float(found.loss) == pytest.approx(expected.loss.item(), rel=1e-6)
    torch.testing.assert_close(found.output, expected.output.detach())


def test_a_batch_in_which_every_target_of_a_term_is_masked_is_refused(build: Build) -> None:
    batch = {**BATCH, "labels": torch.full((12,), -100)}
    with pytest.raises(relay.BatchError, match="Every target of one of the loss's terms is masked"):
        build(Whole(both), microbatches=2).step(batch)


# -- layers --------------------------------------------------------------------------------------------------------


class Centred(nn.Module):
    """A layer that mixes samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, value: Tensor) -> Tensor:
        value = self.linear(value)
        return value - value.mean(0)


def mean_error(output: Tensor, batch: dict[str, Tensor], model: Any) -> Tensor:
    return F.mse_loss(output, batch["numbers"])


def test_a_layer_that_mixes_samples_is_refused_by_name(build: Build) -> None:
    with pytest.raises(relay.PartitionError, match=r"sub in layer 'layers\.0' .*microbatches=1"):
        build(Whole(mean_error, Centred), microbatches=3).step(BATCH)
    model, reference = Whole(mean_error, Centred), Whole(mean_error, Centred)
    found = build(model, microbatches=1).step(BATCH)
    assert found.loss == pytest.approx(reference(**BATCH).loss.item(), rel=1e-6)


def test_in_a_list_it_is_refused_by_its_place_and_so_is_its_output(build: Build) -> None:
    trainer = build([nn.Linear(6, 16), Centred(), nn.Linear(16, 3)], loss=F.mse_loss, microbatches=3)
    with pytest.raises(relay.PartitionError, match="sub in layer '1'"):
        trainer.step((BATCH["inputs"], BATCH["numbers"]))
    with pytest.raises(relay.PartitionError, match="An output of Sequential mixes samples: sub in layer '1'"):
        trainer.predict(BATCH["inputs"])


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: nn.Sequential(nn.Unflatten(1, (4, 4)), nn.TransformerEncoderLayer(
        4, 2, 8, dropout=0.1, batch_first=True), nn.Flatten()),
    "a convolution with norms": lambda: nn.Sequential(nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 4, 3, padding=1),
        nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.MaxPool1d(1), nn.Flatten()),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_keep_samples_apart_raise_no_doubt(build: Build, name: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{DOUBT}")
        build(Whole(mean_error, LAYERS[name]), microbatches=3).step(BATCH)


# -- what cannot be followed, and what is stated -------------------------------------------------------------------


def selected(output: Tensor, target: Tensor) -> Tensor:
    kept = target != -100
    return F.cross_entropy(output[kept], target[kept])


def listed() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 3)]


@pytest.mark.filterwarnings("ignore:layer '2'")
def test_a_loss_that_cannot_be_followed_is_said_to_be_one_once(build: Build) -> None:
    trainer = build(listed(), loss=selected, microbatches=3)
    with pytest.warns(UserWarning, match=f"{DOUBT}.*nonzero"):
        trainer.step((BATCH["inputs"], BATCH["labels"]))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{DOUBT}")
        trainer.step((BATCH["inputs"], BATCH["labels"]))


@pytest.mark.filterwarnings("ignore:layer '2'", f"error:.*{DOUBT}")
def test_what_a_micro_batch_counts_can_be_stated(build: Build) -> None:
    batch = BATCH["inputs"], BATCH["labels"]
    expected = selected(nn.Sequential(*listed())(batch[0]), batch[1]).item()
    trainer = build(listed(), loss=selected, microbatches=3, loss_weight=lambda piece: (piece[1] != -100).sum())
    assert trainer.step(batch).loss == pytest.approx(expected, rel=1e-6)

    def total(output: Tensor, target: Tensor) -> Tensor:
        return selected(output, target) * (target != -100).sum()

    trainer = build(listed(), loss=total, microbatches=3, loss_weight="sum")
    assert trainer.step(batch).loss == pytest.approx(expected * int((batch[1] != -100).sum()), rel=1e-6)


@pytest.mark.filterwarnings(f"error:.*{DOUBT}")
def test_a_loss_for_each_micro_batch_alone_can_be_stated(build: Build) -> None:
    def pairs(output: Tensor, batch: dict[str, Tensor], model: Any) -> Tensor:
        return F.cross_entropy(output @ batch["numbers"].T, torch.arange(len(output)))

    trainer = build(Whole(pairs), microbatches=3, loss_weight=lambda piece: len(piece["inputs"]))
    pieces = [{key: tensor[start : start + 4] for key, tensor in BATCH.items()} for start in (0, 4, 8)]
    expected = sum(Whole(pairs)(**piece).loss.item() for piece in pieces) / 3
    assert trainer.step(BATCH).loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("wrong", ["mean", 3])
def test_another_loss_weight_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="loss_weight="):
        relay.Trainer(listed(), loss=selected, loss_weight=wrong)


@pytest.mark.filterwarnings(f"error:.*{DOUBT}")
def test_layers_that_sort_rows_by_expert_train_in_micro_batches(build: Build) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    plain, model = transformers.MixtralForCausalLM(config), transformers.MixtralForCausalLM(config)
    model.load_state_dict(plain.state_dict())
    tokens = torch.randint(0, 32, (2, 8))
    trainer = build(model, optimizer=relay.SGD(lr=0.1), microbatches=2)
    trainer.step({"input_ids": tokens, "labels": tokens})
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for piece in tokens.split(1):
        (plain(input_ids=piece, labels=piece).loss / 2).backward()
    optimizer.step()
    found = trainer.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.state_dict().items())


class Experts(nn.Module):
    """Two experts, of which each takes at most `capacity` times half of the batch's rows."""

    def __init__(self, capacity: float) -> None:
        super().__init__()
        self.router, self.capacity = nn.Linear(8, 2), capacity
        self.weight = nn.Parameter(torch.randn(2, 8, 8) / 8)
        self.drop = nn.Dropout(0.1)

    def forward(self, value: Tensor) -> Tensor:
        expert = self.router(value).argmax(-1)
        order = expert.argsort(stable=True)
        ends = torch.histc(expert.float(), 2, 0, 1).cumsum(0).to(torch.int32)
        found = F.grouped_mm(value[order], self.weight, offs=ends)
        place = torch.arange(len(value)) - F.pad(ends, (1, 0))[expert[order]]
        found = found * (place < self.capacity * len(value) / 2)[:, None]
        return value + self.drop(torch.zeros_like(value).index_copy(0, order, found))


@pytest.mark.filterwarnings(f"error:.*{DOUBT}")
def test_experts_with_a_capacity_are_refused_in_micro_batches_by_name(build: Build) -> None:
    batch = torch.randn(8, 8), torch.randn(8, 8)
    torch.manual_seed(0)
    build([Experts(2.0), Experts(2.0)], loss=F.mse_loss, microbatches=2).step(batch)  # so large that none is dropped
    with pytest.raises(PartitionError, match=r"grouped_mm in layer '0' takes rows sorted by expert.*capacity"):
        build([Experts(0.5), Experts(0.5)], loss=F.mse_loss, microbatches=2).step(batch)
