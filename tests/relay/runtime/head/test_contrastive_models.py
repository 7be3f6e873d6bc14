"""Whole models whose loss compares the samples of a batch: two towers, tied weights, CLIP.

The reference is plain PyTorch on the whole batch.
"""

import copy
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay
from tests.support.zoo.contrastive import BATCH, RATE, unit

Build = Callable[..., relay.Trainer]


class Layer(nn.Module):
    """Returns its hidden states, and what it adds to the loss: a mean over samples."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.dropout((self.linear(hidden) + table).tanh())
        return hidden, hidden.square().mean()


class TwoTowers(nn.Module):
    """Images and texts through a stack each; their cosines are the scores.

    The head takes pooled texts from between the stacks, rows of a flattened tensor, means over samples from layers, and
    a table that no sample changes. Its own BatchNorm and dropout go over the whole batch.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(11, 8)
        self.table = nn.Parameter(torch.randn(1, 8) * 0.1)
        self.text_layers = nn.ModuleList(Layer(0.0) for _ in range(2))
        self.pixels = nn.Linear(6, 8)
        self.image_layers = nn.ModuleList(Layer(0.0) for _ in range(2))
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids: Tensor, mask: Tensor, pixels: Tensor, scaling: float = 1.0) -> Any:
        table = self.table * 2
        hidden, extra = self.words(ids), 0.0
        for layer in self.text_layers:
            hidden, one = layer(hidden, table)
            extra = extra + one
        texts = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        flat = hidden.flatten(0, 1)
        images = self.pixels(pixels)
        for layer in self.image_layers:
            images, one = layer(images, table)
            extra = extra + one
        images = self.dropout(self.norm(images + table))
        words = flat @ images.T  # of every word with every image
        scores = unit(texts) @ unit(images).T * self.scale.exp()
        own = torch.arange(len(scores))
        loss = F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own) + 0.01 * words.logsumexp(1).mean()
        loss = loss + 0.1 * extra
        return SimpleNamespace(loss=loss * scaling, scores=scores, texts=texts)


def whole_batch(size: int = BATCH) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(6)
    mask = (torch.rand(size, 4, generator=generator) < 0.7).float()
    mask[:, 0] = 1
    ids = torch.randint(0, 11, (size, 4), generator=generator)
    return {"ids": ids, "mask": mask, "pixels": torch.randn(size, 6, generator=generator)}


def gradients_of(model: nn.Module, trainer: relay.Trainer, batch: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    metrics = trainer.step(batch, outputs=["scores"])
    return metrics, {name: (before[name] - one.detach()) / RATE for name, one in model.named_parameters()}


def assert_like(ours: dict[str, Tensor], plain: nn.Module, relative: float) -> None:
    wanted = {name: one.grad for name, one in plain.named_parameters()}
    together = float(torch.stack([one.norm() for one in wanted.values() if one is not None]).norm())
    for name, one in wanted.items():
        assert one is not None
        assert float((ours[name] - one).norm()) <= relative * together, name


@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 4},
        {"microbatches": 2, "stash": "host", "device": "cpu:discrete", "layers_per_slot": 2},
        {"microbatches": 3, "recompute": False, "loss_over": "batch"},
    ],
    ids=str,
)
@pytest.mark.sample(2)
def test_two_towers_are_trained_as_on_the_whole_batch(build: Build, options: dict[str, Any]) -> None:
    model, plain = TwoTowers(), TwoTowers()
    expected = plain(**whole_batch())
    expected.loss.backward()
    trainer = build(model, optimizer=relay.SGD(lr=RATE), **options)
    metrics, gradients = gradients_of(model, trainer, whole_batch())
    assert metrics.loss == pytest.approx(expected.loss.item(), rel=1e-6)
    assert_like(gradients, plain, 1e-6)
    (outputs,) = metrics.outputs
    torch.testing.assert_close(outputs["scores"], expected.scores.detach())
    torch.testing.assert_close(model.norm.running_var, plain.norm.running_var)
    assert model.norm.num_batches_tracked == 1


def test_evaluation_and_prediction_go_over_the_whole_batch_too(build: Build) -> None:
    model, plain = TwoTowers(), TwoTowers().eval()
    trainer = build(model, microbatches=4)
    expected = plain(**whole_batch())
    assert trainer.evaluate(whole_batch()).loss == pytest.approx(expected.loss.item(), rel=1e-6)
    found = trainer.predict(whole_batch())
    torch.testing.assert_close(found.scores, expected.scores.detach())
    torch.testing.assert_close(found.texts, expected.texts.detach())
    assert float(found.loss) == pytest.approx(expected.loss.item(), rel=1e-6)


def test_the_head_draws_one_mask_for_the_whole_batch(build: Build) -> None:
    """Its loss is that of one micro-batch, whose keys are the same."""
    losses = [
        build(TwoTowers(dropout=0.5), microbatches=count, loss_over="batch", seed=3).step(whole_batch()).loss
        for count in (1, 2, 4)
    ]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-6)
    assert build(TwoTowers(dropout=0.5), microbatches=2, seed=4).step(whole_batch()).loss != losses[1]


@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_norm": 0.05, "optimizer": relay.AdamW(lr=1e-2)},
        {"precision": "bf16", "optimizer": relay.AdamW(lr=1e-2)},
        {"precision": "fp16", "optimizer": relay.AdamW(lr=1e-2), "device": "cpu:discrete"},
        {"precision": "fp16", "loss_scale": 1024.0, "optimizer": relay.SGD(lr=0.1)},
    ],
    ids=str,
)
@pytest.mark.sample(3)
def test_clipping_and_halves_follow_one_micro_batch(build: Build, options: dict[str, Any]) -> None:
    losses = [
        [trainer.step(whole_batch()).loss for _ in range(3)]
        for trainer in (build(TwoTowers(), microbatches=count, **options) for count in (1, 4))
    ]
    tolerance = 1e-5 if "precision" not in options else 2e-2
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)


def test_a_tensor_of_the_batch_gets_its_gradient(build: Build) -> None:
    batch, plain = whole_batch(), whole_batch()
    for each in (batch, plain):
        each["pixels"].requires_grad_()
        each["mask"].requires_grad_()
    build(TwoTowers(), microbatches=4).step(batch)
    TwoTowers()(**plain).loss.backward()
    for name in ("pixels", "mask"):
        torch.testing.assert_close(batch[name].grad, plain[name].grad, rtol=1e-4, atol=1e-6)


class Tied(nn.Module):
    """Words against words: the table that embeds them is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, ids: Tensor) -> Any:
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        scores = (hidden.mean(1) @ self.words.weight.T).log_softmax(0)
        return SimpleNamespace(loss=-scores.gather(1, ids[:, :1]).mean())


def test_a_weight_that_layers_and_head_share(build: Build) -> None:
    model, plain, ids = Tied(), Tied(), whole_batch()["ids"]
    expected = plain(ids)
    expected.loss.backward()
    before = model.words.weight.detach().clone()
    assert build(model, microbatches=4, optimizer=relay.SGD(lr=RATE)).step({"ids": ids}).loss == pytest.approx(
        expected.loss.item(), rel=1e-6
    )
    torch.testing.assert_close((before - model.words.weight.detach()) / RATE, plain.words.weight.grad)


def test_verify_compares_with_plain_pytorch_on_the_whole_batch(build: Build) -> None:
    found = build(TwoTowers(dropout=0.3), microbatches=4).verify([whole_batch(), whole_batch()])
    assert found.equal, found
    assert "the whole batch at once" in str(found)
    model = TwoTowers()
    model.text_layers[1].dropout.p = 0.2
    with pytest.raises(relay.VerificationError, match=r"layer 'text_layers\.1' draws random numbers"):
        build(model, microbatches=4).verify([whole_batch()])


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{}, {"stash": "host", "device": "cpu:discrete", "recompute": False}], ids=str)
def test_clip_of_transformers_is_trained_as_it_comes(build: Build, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    text = transformers.CLIPTextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=16, bos_token_id=1, eos_token_id=98, pad_token_id=0,
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(
        hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = transformers.CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=20)
    torch.manual_seed(0)
    model = transformers.CLIPModel(config).train()
    plain = copy.deepcopy(model)
    ids = torch.randint(2, 97, (10, 8))
    ids[:, -1], mask = 98, torch.ones(10, 8, dtype=torch.long)
    ids[3, 5], ids[3, 6:], mask[3, 6:] = 98, 0, 0
    batch = {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.randn(10, 3, 16, 16), "return_loss": True}
    expected = plain(**batch)
    expected.loss.backward()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    metrics = build(model, microbatches=4, optimizer=relay.SGD(lr=RATE), **options).step(batch)
    assert metrics.loss == pytest.approx(expected.loss.item(), rel=1e-6)
    assert_like({name: (before[name] - one.detach()) / RATE for name, one in model.named_parameters()}, plain, 1e-6)


@pytest.mark.parametrize(("stash", "loss_over"), [*itertools.product(("device", "host"), ("auto", "batch"))])
@pytest.mark.sample("device-batch")
def test_the_simulator_knows_the_memory_to_the_byte(build: Build, stash: str, loss_over: str) -> None:
    batch = whole_batch()
    options: dict[str, Any] = {"microbatches": 4, "stash": stash, "loss_over": loss_over}
    found = relay.simulate(
        copy.deepcopy(TwoTowers()), example=batch, batch=BATCH, seq=4, precision="fp32", device="generic", **options
    )
    assert found.run.loss_over == "batch"
    trainer = build(TwoTowers(), device="sim:generic", optimizer=relay.AdamW(), **options)
    metrics = trainer.step(batch)
    assert metrics.device_peak_bytes == found.memory.device_total
    assert metrics.weight_bytes == found.step.weight_bytes  # type: ignore[union-attr]


class NormBetweenTowers(nn.Module):
    """A BatchNorm of the first tower's output, and a mean over the batch, before the second tower's layers.

    With `taken` that tower takes the result.
    """

    def __init__(self, taken: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(5, 8), nn.Linear(5, 8)
        self.norm, self.taken = nn.BatchNorm1d(8), taken
        self.images, self.texts = (nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        x, y = self.first(x), self.second(y)
        for layer in self.images:
            x = layer(x).tanh()
        x = self.norm(x)
        if self.taken:
            y = y + x
        else:
            x = x - 0.5 * x.amax(0)
        for layer in self.texts:
            y = layer(y).tanh()
        return SimpleNamespace(loss=F.cross_entropy(x @ y.T, torch.arange(len(x))))


@pytest.mark.parametrize("microbatches", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_what_takes_samples_together_between_two_towers_runs_in_the_head(build: Build, microbatches: int) -> None:
    batch = {"x": torch.randn(6, 5), "y": torch.randn(6, 5)}
    model, plain = NormBetweenTowers(False), NormBetweenTowers(False)
    plain(**batch).loss.backward()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    build(model, microbatches=microbatches, optimizer=relay.SGD(lr=RATE)).step(batch)
    assert_like({name: (before[name] - one.detach()) / RATE for name, one in model.named_parameters()}, plain, 1e-6)
    torch.testing.assert_close(model.norm.running_var, plain.norm.running_var)
    assert model.norm.num_batches_tracked == 1


def test_a_batchnorm_that_a_later_layer_depends_on_is_said_to_run_for_each_micro_batch(build: Build) -> None:
    trainer = build(NormBetweenTowers(True), microbatches=2)
    expected = r"batch_norm after layer 'images.1' runs for each micro-batch, since a later layer depends on it"
    with pytest.warns(UserWarning, match=expected):
        trainer.step({"x": torch.randn(6, 5), "y": torch.randn(6, 5)})
