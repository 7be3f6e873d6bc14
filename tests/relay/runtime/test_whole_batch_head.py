"""Losses that compare the samples of a batch, in micro-batches: the head runs once, over the whole batch.

The reference is plain PyTorch: on the whole batch, to rounding; and with the same micro-batches through the layers and
their outputs joined by `torch.cat`, to the bit.
"""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay
from hal.errors import OutOfMemory

BATCH, WIDTH, OUT = 11, 6, 5
RATE = 2.0**20
"""So large a learning rate that a weight after a step of SGD is its gradient."""

Build = Callable[..., relay.Trainer]
Pair = tuple[Tensor, Tensor]
Batch = tuple[Pair, dict[str, Tensor]]


def drawn(size: int = BATCH) -> Batch:
    generator = torch.Generator().manual_seed(5)
    left, right, negatives = torch.randn(3, size, WIDTH, generator=generator)
    targets = {
        "label": torch.randint(0, 3, (size,), generator=generator),
        "relevance": torch.rand(size, generator=generator),
        "happened": (torch.rand(size, generator=generator) < 0.7).float(),
        "kept": (torch.rand(size, generator=generator) < 0.8).float(),
    }
    return (torch.cat([left, negatives], 1), torch.cat([right, negatives], 1)), targets


class Towers(nn.Module):
    """A layer of two towers: (left, right) -> (left, right)."""

    def __init__(self, into: int, out: int, last: bool) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(into, out), nn.Linear(into, out)
        self.last = last

    def forward(self, pair: Pair) -> Pair:
        left, right = self.left(pair[0]), self.right(pair[1])
        return (left, right) if self.last else (left.tanh(), right.tanh())


def towers() -> list[nn.Module]:
    torch.manual_seed(1)
    return [Towers(2 * WIDTH, 8, False), Towers(8, 8, False), Towers(8, OUT, True)]


def unit(value: Tensor) -> Tensor:
    return value / value.square().sum(-1, keepdim=True).sqrt()


def image_and_text(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    scores = unit(pair[0]) @ unit(pair[1]).T * math.exp(1.5)
    own = torch.arange(len(scores))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def pairwise_sigmoid(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    scores = unit(pair[0]) @ unit(pair[1]).T * 4 - 2
    return -F.logsigmoid(scores * (2 * torch.eye(len(scores)) - 1)).sum() / len(scores)


def in_batch_negatives(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(pair[0] @ pair[1].T, torch.arange(len(pair[0])))


def with_hard_negatives(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    hard = pair[1].flip(-1)  # another view of the right side stands for a mined negative
    documents = torch.cat([pair[1], hard])
    return F.cross_entropy(pair[0] @ documents.T, torch.arange(len(pair[0])))


def two_views(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    views = unit(torch.cat(pair))
    scores = views @ views.T / 0.5 - torch.eye(len(views)) * 1e9
    return F.cross_entropy(scores, torch.arange(len(views)).roll(len(pair[0])))


def supervised(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    scores, label = unit(pair[0]) @ unit(pair[0]).T / 0.3, targets["label"]
    other = 1 - torch.eye(len(scores))
    same = (label[:, None] == label[None, :]).float() * other
    likely = scores - (scores.exp() * other).sum(1, keepdim=True).log()
    return -((same * likely).sum(1) / same.sum(1).clamp(min=1)).mean()


def triplet_by_distances(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    norms = pair[0].square().sum(1)
    distances = (norms[:, None] + norms[None, :] - 2 * pair[0] @ pair[0].T + 1e-3).clamp(min=1e-6).sqrt()
    same = targets["label"][:, None] == targets["label"][None, :]
    furthest = distances.masked_fill(~same, -1.0).amax(1)
    nearest = distances.masked_fill(same, 1e4).amin(1)
    return F.relu(furthest - nearest + 0.5).mean()


def variance_and_covariance(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    found = 25 * (pair[0] - pair[1]).square().mean()
    for one in pair:
        centred = one - one.mean(0)
        deviation = (centred.square().sum(0) / (len(one) - 1) + 1e-4).sqrt()
        covariance = centred.T @ centred / (len(one) - 1)
        found = found + 25 * F.relu(1 - deviation).mean()
        found = found + (covariance * (1 - torch.eye(OUT))).square().sum() / OUT
    return found


def cross_correlation(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    left, right = ((one - one.mean(0)) / (one.square().mean(0) + 1e-3).sqrt() for one in pair)
    found = left.T @ right / len(left) - torch.eye(OUT)
    return (found.square() * (0.01 + 0.99 * torch.eye(OUT))).sum()


def pairwise_ranking(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    scores, relevance = pair[0].sum(1), targets["relevance"]
    before = (relevance[:, None] > relevance[None, :]).float()
    return (F.softplus(scores[None, :] - scores[:, None]) * before).sum() / before.sum()


def listwise_ranking(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    scores = (pair[0] * pair[1]).sum(1)
    return -((8 * targets["relevance"]).softmax(0) * scores.log_softmax(0)).sum()


def partial_likelihood(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    """Cox: each sample against those that were at risk when its event happened."""
    risk, time = pair[0].sum(1), targets["relevance"]
    at_risk = (time[None, :] >= time[:, None]).float()
    against = (risk.exp()[None, :] * at_risk).sum(1).log()
    return -((risk - against) * targets["happened"]).sum() / targets["happened"].sum()


LOSSES = (
    image_and_text, pairwise_sigmoid, in_batch_negatives, with_hard_negatives, two_views, supervised,
    triplet_by_distances, variance_and_covariance, cross_correlation, pairwise_ranking, listwise_ranking,
    partial_likelihood,
)  # fmt: skip
Loss = Callable[[Pair, dict[str, Tensor]], Tensor]
Result = tuple[float, list[Tensor]]


@functools.cache
def on_the_whole_batch(loss: Loss) -> Result:
    model, (inputs, targets) = towers(), drawn()
    value: Any = inputs
    for module in model:
        value = module(value)
    found = loss(value, targets)
    found.backward()
    return found.item(), [one.grad for module in model for one in module.parameters()]  # type: ignore[misc]


def in_pieces(loss: Loss, microbatches: int) -> Result:
    """Plain PyTorch: layers for each micro-batch, outputs joined, the loss once, gradients handed back in pieces."""
    model, (inputs, targets) = towers(), drawn()
    step = -(-BATCH // microbatches)
    made = []
    for start in range(0, BATCH, step):
        value: Any = tuple(one[start : start + step] for one in inputs)
        for module in model:
            value = module(value)
        made.append(value)
    leaves = [[side.detach().requires_grad_() for side in value] for value in made]
    found = loss(tuple(torch.cat(side) for side in zip(*leaves, strict=True)), targets)  # type: ignore[arg-type]
    found.backward()
    for value, leaf in zip(made, leaves, strict=True):
        pairs = [(one, end.grad) for one, end in zip(value, leaf, strict=True) if end.grad is not None]
        torch.autograd.backward([one for one, _ in pairs], [grad for _, grad in pairs])
    return found.item(), [one.grad for module in model for one in module.parameters()]  # type: ignore[misc]


def trained(build: Build, loss: Loss, **options: Any) -> Result:
    model = towers()
    parameters = [one for module in model for one in module.parameters()]
    before = [one.detach().clone() for one in parameters]
    trainer = build(model, loss=loss, optimizer=relay.SGD(lr=RATE), **options)
    found = trainer.step(drawn()).loss
    return found, [(old - new.detach()) / RATE for old, new in zip(before, parameters, strict=True)]


def assert_close(ours: Result, plain: Result, relative: float = 1e-6) -> None:
    assert ours[0] == pytest.approx(plain[0], rel=max(relative, 1e-6))
    wanted = [torch.zeros_like(one) if other is None else other for one, other in zip(ours[1], plain[1], strict=True)]
    one, other = (torch.cat([gradient.flatten() for gradient in each]) for each in (ours[1], wanted))
    assert float((one - other).norm()) <= relative * float(other.norm())


def name_of(value: Any) -> str:
    return value.__name__ if callable(value) else str(value)


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_a_loss_over_samples_is_that_of_the_whole_batch(build: Build, loss: Loss) -> None:
    assert_close(trained(build, loss, microbatches=4), on_the_whole_batch(loss))


@pytest.mark.exhaustive
@pytest.mark.parametrize("device", ["cpu", "cpu:discrete", "sim", "opencl:0", "onnx:cpu"])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 7])
@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_it_is_on_every_device_in_any_number_of_micro_batches(
    build: Build, loss: Loss, microbatches: int, device: str
) -> None:
    if not any(one.name == device or device == "cpu:discrete" for one in relay.devices() if one.available):
        pytest.skip(f"{device} is not here")
    for stash in ("device", "host"):
        found = trained(build, loss, microbatches=microbatches, device=device, stash=stash)
        assert_close(found, on_the_whole_batch(loss), 1e-6 if device in ("cpu", "cpu:discrete", "sim") else 1e-5)


@pytest.mark.parametrize("device", ["cpu:discrete", "sim", "numpy"])
def test_it_is_on_devices_of_other_kinds(build: Build, device: str) -> None:
    found = trained(build, image_and_text, microbatches=4, device=device, stash="host")
    assert_close(found, on_the_whole_batch(image_and_text), 1e-6)


@pytest.mark.parametrize("loss", [image_and_text, triplet_by_distances, variance_and_covariance], ids=name_of)
def test_it_is_equal_to_the_bit_to_plain_pytorch_that_joins_the_same_micro_batches(build: Build, loss: Loss) -> None:
    wanted = in_pieces(loss, 4)
    for options in ({}, {"stash": "host", "slots": 1, "device": "cpu:discrete"}, {"recompute": False}):
        found, gradients = trained(build, loss, microbatches=4, **options)
        assert found == wanted[0]
        for ours, plain in zip(gradients, wanted[1], strict=True):
            assert torch.equal(ours, torch.zeros_like(ours) if plain is None else plain)


# -- whole models --------------------------------------------------------------------------------------------------


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


def test_a_loss_that_python_computes_runs_over_the_whole_batch(build: Build) -> None:
    def looped(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
        chosen = [one for one, kept in zip(pair[0], targets["kept"], strict=True) if kept.item() > 0]
        return torch.stack(chosen).std(0).sum()

    with pytest.warns(UserWarning, match="runs eagerly"):
        found = trained(build, looped, microbatches=4, loss_over="batch")
    assert_close(found, on_the_whole_batch(looped))


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


# -- refusals ------------------------------------------------------------------------------------------------------


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, pair: Pair) -> Pair:
        left = self.linear(pair[0])
        return left - left.mean(0), pair[1]


def test_a_layer_that_mixes_samples_is_refused_by_name_before_the_head(build: Build) -> None:
    first, _, last = towers()
    trainer = build([first, Centred(), last], loss=image_and_text, microbatches=4)
    with pytest.raises(relay.PartitionError, match=r"sub in layer '1' .*comes after the last layer.*microbatches=1"):
        trainer.step(drawn())


def test_the_last_module_joins_the_head_if_it_mixes_samples(build: Build) -> None:
    def model() -> list[nn.Module]:
        first, second, last = towers()
        return [first, second, nn.Sequential(Centred(), last)]

    modules, plain = model(), model()
    value: Any = drawn()[0]
    for module in plain:
        value = module(value)
    expected = in_batch_negatives(value, {})
    found = build(modules, loss=in_batch_negatives, microbatches=4).step(drawn())
    assert found.loss == pytest.approx(expected.item(), rel=1e-6)


def test_pieces_and_weights_have_no_whole_batch(build: Build) -> None:
    inputs, targets = drawn()
    half = tuple(one[:5] for one in inputs), {name: one[:5] for name, one in targets.items()}
    trainer = build(towers(), loss=image_and_text, loss_over="batch", microbatches=2)
    with pytest.raises(relay.BatchError, match=r"pieces= are batches of their own.*loss_over='microbatch'"):
        trainer.step(pieces=[half, half])
    with pytest.raises(relay.BatchError, match="each with a weight"):
        trainer.step(pieces=[half, half], weights=[0.5, 0.5])
    with pytest.raises(ValueError, match=r"loss_weight=.*loss_over='batch'"):
        relay.Trainer(towers(), loss=image_and_text, loss_over="batch", loss_weight="sum")
    with pytest.raises(relay.PartitionError, match=r"mixes samples: .*Give one batch"):
        build(towers(), loss=image_and_text).step(pieces=[half, half])


def test_a_head_that_does_not_fit_is_refused_with_what_would(build: Build) -> None:
    def wide(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
        return (pair[0][:, None] * pair[1][None, :]).exp().sum(-1).log().mean()

    size = 96
    trainer = build(towers(), loss=wide, microbatches=12, device="cpu:discrete")
    trainer.prepare(drawn(size))
    needed = trainer.step(drawn(size)).device_peak_bytes
    small = build(towers(), loss=wide, microbatches=12, device="cpu:discrete", capacity=needed // 3)
    with pytest.raises(OutOfMemory, match=r"head over the whole batch.*a batch of up to (\d+) samples") as refused:
        small.step(drawn(size))
    fits = int(str(refused.value).split("a batch of up to ")[1].split()[0])
    assert 0 < fits < size
    assert small.step(drawn(fits)).device_peak_bytes <= needed // 3


# -- memory --------------------------------------------------------------------------------------------------------


def test_the_layers_need_the_memory_of_one_micro_batch(build: Build) -> None:
    """With the stash on the host a deeper model needs as much of the device as a flat one."""
    peaks = set()
    for depth in (2, 6):
        torch.manual_seed(0)
        layers = [Towers(2 * WIDTH, 8, False), *(Towers(8, 8, False) for _ in range(depth)), Towers(8, OUT, True)]
        trainer = build(layers, loss=image_and_text, microbatches=4, stash="host", device="cpu:discrete")
        peaks.add(trainer.step(drawn()).device_peak_bytes)
    assert len(peaks) == 1


@pytest.mark.parametrize(("stash", "loss_over"), [*itertools.product(("device", "host"), ("auto", "batch"))])
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
