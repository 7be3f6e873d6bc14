"""The three models that every device trains: a byte-level GPT, a BERT and a Llama, small, in plain PyTorch.

And what plain PyTorch makes of them, micro-batch by micro-batch, with the dropout masks that the relay promises to
draw: `hal.random.keep_mask` under (seed, step, segment, micro-batch) and the number of the dropout in its segment.

Shapes: B sequences, T positions, H hidden size, A attention heads, D = H / A.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay
from hal.random import RandomKey, keep_mask
from relay.models import GPT
from tests.support import reference
from tests.support.shared_captures import share

VOCABULARY = 48
LENGTH = 12
HIDDEN = 32
HEADS = 4
SEED = 5
MICROBATCHES = 2


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


class Dropout(nn.Module):
    """Dropout with given masks: for `position`, its segment and its number there, and `run`, a step and a micro-batch.

    Without a position it is PyTorch's.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability
        self.position: tuple[int, int] | None = None
        self.run = (0, 0)

    def forward(self, value: Tensor) -> Tensor:
        if self.position is None:
            return F.dropout(value, self.probability, self.training)
        key = RandomKey(SEED, self.run[0], self.position[0], self.run[1])
        mask = keep_mask(key, self.position[1], value.shape, self.probability)
        return value * mask * (1 / (1 - self.probability))


class EncoderLayer(nn.Module):
    """BERT's: attention under a mask, then a feed-forward network, each dropped, added and then normalised."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.attention_dropout, self.out_dropout, self.feed_dropout = (Dropout(dropout) for _ in range(3))
        self.attention_norm, self.feed_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.feed_in, self.feed_out = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, stream: Tensor, mask: Tensor) -> Tensor:
        B, T, H = stream.shape
        query, key, value = (
            linear(stream).view(B, T, HEADS, H // HEADS).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )  # each (B, A, T, D)
        scores = query @ key.transpose(-1, -2) / math.sqrt(H // HEADS) + mask  # (B, A, T, T)
        mixed = self.attention_dropout(scores.softmax(-1)) @ value  # (B, A, T, D)
        attended = self.out(mixed.transpose(1, 2).reshape(B, T, H))
        stream = self.attention_norm(stream + self.out_dropout(attended))
        return self.feed_norm(stream + self.feed_dropout(self.feed_out(F.gelu(self.feed_in(stream)))))


class Bert(nn.Module):
    """Token, position and type embeddings, encoder layers, and scores of the masked tokens."""

    def __init__(self, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=0)
        self.positions, self.types = nn.Embedding(LENGTH, HIDDEN), nn.Embedding(2, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(EncoderLayer(dropout) for _ in range(layers))
        self.transform = nn.Linear(HIDDEN, HIDDEN)
        self.decoder = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Output:
        positions = torch.arange(input_ids.shape[1])
        stream = self.tokens(input_ids) + self.positions(positions) + self.types(token_type_ids)
        stream = self.dropout(self.norm(stream))
        mask = (1.0 - attention_mask[:, None, None, :].float()) * torch.finfo(torch.float32).min  # (B, 1, 1, T)
        for layer in self.layers:
            stream = layer(stream, mask)
        logits = self.decoder(torch.tanh(self.transform(stream)))
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits)


class RootMeanSquareNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon), scaled: Zhang and Sennrich, arXiv 1910.07467."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, value: Tensor) -> Tensor:
        return self.weight * (value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotated(value: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions, halves as pairs: Su et al., arXiv 2104.09864."""
    first, second = value.chunk(2, dim=-1)
    return value * cosine + torch.cat((-second, first), dim=-1) * sine


class DecoderLayer(nn.Module):
    """Llama's: rotary positions, queries in groups that share keys and values, a gated feed-forward network."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.groups = groups
        depth = HIDDEN // HEADS
        self.query, self.out = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key, self.value = (nn.Linear(HIDDEN, groups * depth, bias=False) for _ in range(2))
        self.attention_norm, self.feed_norm = RootMeanSquareNorm(), RootMeanSquareNorm()
        self.gate, self.up = nn.Linear(HIDDEN, 80, bias=False), nn.Linear(HIDDEN, 80, bias=False)
        self.down = nn.Linear(80, HIDDEN, bias=False)

    def forward(self, stream: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        B, T, H = stream.shape
        states = self.attention_norm(stream)
        query = self.query(states).view(B, T, HEADS, -1).transpose(1, 2)  # (B, A, T, D)
        key, value = (
            linear(states).view(B, T, self.groups, -1).transpose(1, 2) for linear in (self.key, self.value)
        )  # (B, groups, T, D)
        query, key = rotated(query, cosine, sine), rotated(key, cosine, sine)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        stream = stream + self.out(mixed.transpose(1, 2).reshape(B, T, H))
        states = self.feed_norm(stream)
        return stream + self.down(F.silu(self.gate(states)) * self.up(states))


class Llama(nn.Module):
    """Embedding, decoder layers, a norm and a head."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(layers))
        self.norm = RootMeanSquareNorm()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Output:
        depth = HIDDEN // HEADS
        frequencies = 1.0 / 10000 ** (torch.arange(0, depth, 2).float() / depth)  # (D / 2)
        angles = torch.outer(torch.arange(input_ids.shape[1]).float(), frequencies)  # (T, D / 2)
        angles = torch.cat((angles, angles), dim=-1)
        stream = self.tokens(input_ids)
        for layer in self.layers:
            stream = layer(stream, angles.cos(), angles.sin())
        logits = self.head(self.norm(stream))
        return Output(F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def _gpt() -> nn.Module:
    return GPT(vocabulary=VOCABULARY, layers=2, hidden=HIDDEN, heads=HEADS, sequence=LENGTH)


BUILD: dict[str, Callable[[], nn.Module]] = {"gpt": _gpt, "bert": Bert, "llama": Llama}


def build(which: str) -> nn.Module:
    """The model of that name, always with the same weights."""
    torch.manual_seed(0)
    return BUILD[which]()


def batches(which: str, count: int) -> list[dict[str, Tensor]]:
    """Batches of 6 sequences, cut into 2 micro-batches. BERT's are padded, and every seventh token is to be found."""
    text = reference.text_batches(count, batch=6, length=LENGTH, vocabulary=VOCABULARY)
    if which != "bert":
        return text
    result = []
    for batch in text:
        ids = batch["input_ids"].clamp(min=1)
        inside = torch.arange(LENGTH) < torch.arange(LENGTH - len(ids) + 1, LENGTH + 1)[:, None]  # (B, T)
        ids = ids * inside
        labels = torch.where(inside & (torch.arange(ids.numel()).view_as(ids) % 7 < 2), ids, -100)
        types = (torch.arange(LENGTH) >= LENGTH // 2).long().expand_as(ids).contiguous()
        result.append({"input_ids": ids, "token_type_ids": types, "attention_mask": inside.long(), "labels": labels})
    return result


def number_dropouts(model: nn.Module) -> list[Dropout]:
    """Give each dropout of a plain model its segment and its number there. Returns them."""
    if not isinstance(model, Bert):
        return []
    model.dropout.position = (0, 0)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, EncoderLayer)
        for number, dropout in enumerate((layer.attention_dropout, layer.out_dropout, layer.feed_dropout)):
            dropout.position = (index + 1, number)
    return [module for module in model.modules() if isinstance(module, Dropout)]


@dataclass(frozen=True)
class Trained:
    """Losses of each step, and the gradients of the last by name."""

    losses: tuple[float, ...]
    gradients: dict[str, Tensor]


@functools.cache
def plain(which: str, optimizer: str, steps: int) -> Trained:
    """Plain PyTorch in float32."""
    model = build(which)
    dropouts = number_dropouts(model)
    stepper = OPTIMIZERS[optimizer][1](model.parameters())
    losses = []
    for step, batch in enumerate(batches(which, steps)):
        stepper.zero_grad()
        pieces = reference.cut(batch, MICROBATCHES)
        total = 0.0
        for number, (piece, weight) in enumerate(zip(pieces, reference.by_targets(pieces), strict=True)):
            for dropout in dropouts:
                dropout.run = (step, number)
            loss = model(**piece).loss * weight
            loss.backward()
            total += loss.item()
        losses.append(total)
        stepper.step()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Trained(tuple(losses), gradients)


STEEP = 2.0**14
"""A learning rate at which a step of SGD leaves the gradient in the weights, to the last bits."""

OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (relay.SGD(lr=0.05), functools.partial(torch.optim.SGD, lr=0.05)),
    "adamw": (
        relay.AdamW(lr=1e-3, weight_decay=0.01),
        functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01),
    ),
    "steep": (relay.SGD(lr=STEEP), functools.partial(torch.optim.SGD, lr=STEEP)),
}


def relayed(which: str, optimizer: str, steps: int, device: str, **options: Any) -> Trained:
    """The relay on a device. Gradients are read off the weights, with the optimizer `steep` and one step."""
    model = build(which)
    before = reference.copy_of(model.state_dict())
    spec = OPTIMIZERS[optimizer][0]
    trainer = share(
        relay.Trainer(model, device=device, optimizer=spec, microbatches=MICROBATCHES, seed=SEED, **options)
    )
    try:
        losses = tuple(trainer.step(batch).loss for batch in batches(which, steps))
        after = reference.copy_of(trainer.state_dict())
    finally:
        trainer.close()
    steepness = STEEP if optimizer == "steep" else math.nan
    return Trained(losses, {name: (before[name] - after[name]) / steepness for name in before})


def gradient_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest error of a tensor's gradient by its norm, or by a thousandth of the norm of all gradients.

    The latter for gradients that are zero but for rounding (of the attention's key bias, which softmax cancels).
    """
    whole = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in theirs.values()]))
    return max(
        float((ours[name] - gradient).norm() / torch.maximum(gradient.norm(), whole * 1e-3))
        for name, gradient in theirs.items()
    )


def loss_error(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference of two runs' losses."""
    return max(abs(mine - plainly) for mine, plainly in zip(ours, theirs, strict=True))
