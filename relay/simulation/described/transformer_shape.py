"""Transformers described by their sizes, for simulated runs that compute no numbers.

A shape becomes segments as `relay.partition` would cut the model: embedding, repeated layers, head with the loss. The
layers are real modules, captured by the real capture over tensors without memory; equal layers are captured once. A
shape cannot be trained: models for that are in `relay.models`.

B sequences, T positions, H hidden size, A heads, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.capture import Lowering
from relay.capture.fake_tensors import FakeMode, fake_mode
from relay.errors import RelayError
from relay.graph.pytree import tensor_leaves
from relay.models.gpt import Block, Embedding, Head, cross_entropy
from relay.partition.capture_cache import Captures
from relay.partition.merge_layers import merge_layers
from relay.partition.segments import Partition, Segment, Value
from relay.runtime.compiling.capture_segments import CPU, build_compiled_model, recomputing
from relay.runtime.head.choose_chunks import HeadChunks
from relay.runtime.stages import CompiledModel

WHOLE = HeadChunks()
"""The head in one piece."""


class ShapeError(RelayError, ValueError):
    """A shape that no model can have, or an unknown model. The message names what was expected."""


USUAL_HEAD_SIZE = 128

BYTES = 256
"""The vocabulary of the GPT over bytes that `relay train` trains, with one matrix for embedding and head."""

VOCABULARY = 50257
"""The vocabulary of GPT-2: the default for a model given by its sizes."""

_MOST = {
    "layers": 10_000, "hidden": 2**20, "heads": 2**16, "vocabulary": 2**28, "ffn": 2**24, "kv_heads": 2**16,
    "head_size": 2**16,
}  # fmt: skip
"""Above every model, so that a mistyped size ends in a message and not in hours of work."""

_LEAST = {"layers": 1, "hidden": 1, "heads": 1, "vocabulary": 1, "ffn": 0, "kv_heads": 0, "head_size": 0}


def default_heads(hidden: int) -> int:
    """The number of heads that divides `hidden` with a head size nearest to 128, by ratio."""
    if not isinstance(hidden, int) or hidden < 1:
        return 1  # refused with its own message by ModelShape
    divisors = [count for count in range(1, math.isqrt(hidden) + 1) if hidden % count == 0]
    counts = {*divisors, *(hidden // count for count in divisors)}
    return min(counts, key=lambda count: abs(math.log(hidden / count / USUAL_HEAD_SIZE)))


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a transformer.

    With `gated` a layer is that of Llama: a feed-forward network of three matrices, RMSNorm, no biases. Otherwise it is
    that of GPT-2. 0 means the default: `ffn` 4 x hidden, `kv_heads` as many as heads (fewer is grouped-query
    attention), `head_size` hidden / heads. `tied` shares one matrix between embedding and head. `causal` attention
    skips the positions after each one, so that fused kernels take about half the time; an encoder attends to all
    positions. `dtype` is that of the weights.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int = VOCABULARY
    ffn: int = 0
    kv_heads: int = 0
    gated: bool = False
    tied: bool = False
    head_size: int = 0
    causal: bool = True
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ShapeError(f"{name} must be a whole number of at least {least}; received {value!r}.")
            if value > _MOST[name]:
                raise ShapeError(f"{name} must be at most {_MOST[name]:,}; received {value!r}.")
        if self.hidden % self.heads and not self.head_size:
            raise ShapeError(
                f"hidden must be a multiple of heads; received hidden={self.hidden}, heads={self.heads}. "
                f"{default_heads(self.hidden)} would divide it, into heads of "
                f"{self.hidden // default_heads(self.hidden)}."
            )
        if self.heads % self.key_heads:
            raise ShapeError(f"heads must be a multiple of kv_heads; received {self.heads} and {self.kv_heads}.")

    @property
    def wide(self) -> int:
        """The width of the feed-forward network."""
        return self.ffn or 4 * self.hidden

    @property
    def key_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def depth(self) -> int:
        """The width of a head."""
        return self.head_size or self.hidden // self.heads

    @property
    def layer_matrices(self) -> int:
        """The number of elements in the matrices of one layer."""
        attention = 2 * self.hidden * self.depth * (self.heads + self.key_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.wide

    @property
    def title(self) -> str:
        """The shape in a few words."""
        return f"{self.layers} layers x hidden {self.hidden}"

    def described(self) -> dict[str, Any]:
        """The shape as `--json` prints it, with every 0 replaced by the size that it stands for."""
        sizes = {name: value for name, value in asdict(self).items() if name != "dtype"}
        return sizes | {"ffn": self.wide, "kv_heads": self.key_heads, "head_size": self.depth}

    def compiled(
        self,
        sequences: int,
        sequence: int,
        compute: torch.dtype,
        layers_per_slot: int = 1,
        recompute: bool | int = True,
        head: HeadChunks = WHOLE,
    ) -> CompiledModel:
        """See `compiled_model_of`."""
        # 1 and True are the same cache key, so the number is worked out first.
        count = recomputing(recompute, -(-self.layers // layers_per_slot) + 2)
        layers = min(layers_per_slot, self.layers)
        return compiled_model_of(self, sequences, sequence, compute, layers, count, head=head)

    def model(self, sequence: int) -> nn.Module:
        """See `model_of`."""
        return model_of(self, sequence)

    @property
    def unit(self) -> str:
        """What speed counts."""
        return "tokens"

    def units(self, sequence: int) -> float:
        """How many of the unit a sequence has."""
        return sequence

    def model_flops(self, sequence: int) -> float:
        """FLOPs of forward and backward per token, recompute not counted (Chowdhery et al. 2022, appendix B)."""
        matrices = self.layers * self.layer_matrices + self.hidden * self.vocabulary
        return 6.0 * matrices + 12.0 * self.layers * self.heads * self.depth * sequence


MODELS = {
    "gpt2": ModelShape(12, 768, 12, tied=True),
    "gpt2-medium": ModelShape(24, 1024, 16, tied=True),
    "gpt2-large": ModelShape(36, 1280, 20, tied=True),
    "gpt2-xl": ModelShape(48, 1600, 25, tied=True),
    "gpt3-6.7b": ModelShape(32, 4096, 32),
    "gpt3-13b": ModelShape(40, 5120, 40),
    "gpt3-175b": ModelShape(96, 12288, 96),
    "bert-large": ModelShape(24, 1024, 16, vocabulary=30522, tied=True, causal=False),
    "llama-2-7b": ModelShape(32, 4096, 32, vocabulary=32000, ffn=11008, gated=True),
    "llama-2-13b": ModelShape(40, 5120, 40, vocabulary=32000, ffn=13824, gated=True),
    "llama-2-70b": ModelShape(80, 8192, 64, vocabulary=32000, ffn=28672, kv_heads=8, gated=True),
    "llama-3-8b": ModelShape(32, 4096, 32, vocabulary=128256, ffn=14336, kv_heads=8, gated=True),
    "llama-3-70b": ModelShape(80, 8192, 64, vocabulary=128256, ffn=28672, kv_heads=8, gated=True),
}
"""Shapes by name, from the papers and configurations of the models."""

LEARNED_POSITIONS = {
    **dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"), 1024),
    **dict.fromkeys(("gpt3-6.7b", "gpt3-13b", "gpt3-175b"), 2048),
    "bert-large": 512,
}
"""The length of the table of learned positions, for the models that have one."""


def _attended(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """(B, T, A S): attention in which query heads (B, A, T, S) share heads of keys and values (B, K, T, S)."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    return mixed.transpose(1, 2).flatten(2)


class GatedBlock(nn.Module):
    """The layer of Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        size = shape.depth
        self.heads, self.key_heads, self.size, self.causal = shape.heads, shape.key_heads, size, shape.causal
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.query = nn.Linear(shape.hidden, shape.heads * size, bias=False)
        self.key = nn.Linear(shape.hidden, shape.key_heads * size, bias=False)
        self.value = nn.Linear(shape.hidden, shape.key_heads * size, bias=False)
        self.attention_out = nn.Linear(shape.heads * size, shape.hidden, bias=False)
        self.feed_norm = nn.RMSNorm(shape.hidden)
        self.gate = nn.Linear(shape.hidden, shape.wide, bias=False)
        self.feed_in = nn.Linear(shape.hidden, shape.wide, bias=False)
        self.feed_out = nn.Linear(shape.wide, shape.hidden, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        normed = self.attention_norm(stream)  # (B, T, H)
        query = self._turned(self.query(normed), self.heads)  # (B, A, T, H/A)
        key = self._turned(self.key(normed), self.key_heads)
        value = self._split(self.value(normed), self.key_heads)
        stream = stream + self.attention_out(_attended(query, key, value, self.causal))
        normed = self.feed_norm(stream)
        return stream + self.feed_out(F.silu(self.gate(normed)) * self.feed_in(normed))

    def _split(self, states: Tensor, heads: int) -> Tensor:
        return states.unflatten(2, (heads, self.size)).transpose(1, 2)  # (B, T, A S) -> (B, A, T, S)

    def _turned(self, states: Tensor, heads: int) -> Tensor:
        """Rotary positions (Su et al. 2021)."""
        split = self._split(states, heads)
        half = self.size // 2
        rates = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(split.shape[2], dtype=torch.float32)[:, None] * rates  # (T, S/2)
        cosine, sine = angles.cos().to(split.dtype), angles.sin().to(split.dtype)
        first, second = split[..., :half], split[..., half:]
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class GroupedBlock(Block):
    """The layer of GPT-2 with fewer heads of keys and values than of queries, or with another head size."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape.hidden, shape.heads, 0.0, shape.causal)
        self.key_heads, self.size = shape.key_heads, shape.depth
        self.attention_in = nn.Linear(shape.hidden, (shape.heads + 2 * shape.key_heads) * self.size)
        self.attention_out = nn.Linear(shape.heads * self.size, shape.hidden)

    def attention(self, states: Tensor) -> Tensor:
        joint = self.attention_in(states).unflatten(2, (-1, self.size)).transpose(1, 2)  # (B, A + 2 K, T, S)
        query, key, value = joint.split([self.heads, self.key_heads, self.key_heads], 1)
        return self.attention_out(_attended(query, key, value, self.causal))  # (B, T, H)


class _Start(nn.Module):
    def __init__(self, shape: ModelShape, sequence: int) -> None:
        super().__init__()
        if shape.gated:
            self.embedding: nn.Module = nn.Embedding(shape.vocabulary, shape.hidden)
        else:
            self.embedding = Embedding(shape.vocabulary, shape.hidden, sequence, 0.0)

    def forward(self, input_ids: Tensor) -> tuple[Tensor]:
        return (self.embedding(input_ids),)


class _Layer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        if shape.gated:
            self.block: nn.Module = GatedBlock(shape)
        else:
            usual = shape.key_heads == shape.heads and shape.depth * shape.heads == shape.hidden
            block = Block(shape.hidden, shape.heads, 0.0, shape.causal) if usual else GroupedBlock(shape)
            block.feed_in = nn.Linear(shape.hidden, shape.wide)
            block.feed_out = nn.Linear(shape.wide, shape.hidden)
            self.block = block

    def forward(self, stream: Tensor) -> tuple[Tensor]:
        return (self.block(stream),)


class _End(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head = Head(shape.vocabulary, shape.hidden)

    def forward(self, stream: Tensor, labels: Tensor) -> tuple[Tensor]:
        return (cross_entropy(self.head(stream), labels),)


def model_of(shape: ModelShape, sequence: int) -> nn.Module:
    """A module that holds the parameters of the whole model by name, on the meta device. It cannot be called."""
    model: Any = nn.Module()
    start, (layer,), end = templates_of(shape, sequence)
    parts = [("embedding", start), *((f"layer_{n}", layer) for n in range(shape.layers)), ("head", end)]
    for name, template in parts:
        part = nn.Module()
        for own, parameter in template.named_parameters():
            if not (name == "head" and shape.tied and own.endswith("projection.weight")):
                own_memory = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                part.register_parameter(own.replace(".", "__"), nn.Parameter(own_memory))
        model.add_module(name, part)
    # As modules have them, by which optimizers tell embeddings and the head from the matrices of layers.
    model.embedding.num_embeddings = shape.vocabulary
    model.get_output_embeddings = lambda: model.head
    made: nn.Module = model
    return made


@functools.lru_cache(maxsize=16)
def compiled_model_of(
    shape: ModelShape,
    sequences: int,
    sequence: int,
    compute: torch.dtype,
    layers_per_slot: int = 1,
    recompute: int | None = None,
    lowering: Lowering = Lowering.NATIVE,
    traced_for: torch.device = CPU,
    head: HeadChunks = WHOLE,
) -> CompiledModel:
    """The compiled model for training on a micro-batch of `sequences` x `sequence` tokens in the dtype `compute`.

    `lowering` and `traced_for` choose the graphs for a device (`relay.capture.graphs_for`). The first `recompute`
    segments recompute their forward; without a number, all do. `head` says whether the head runs over chunks.
    """
    mode = fake_mode()
    with mode:
        templates = templates_of(shape, sequence, mode, layers_per_slot)
        partition = merge_layers(partition_of(shape, sequences, sequence, templates), layers_per_slot)
        partition = head.split(partition, compute)
        known = captures_of(shape, compute, lowering, traced_for)
        first = True if recompute is None else recompute
        return build_compiled_model(
            partition, True, False, compute, lowering=lowering, captures=known, recompute=first, traced_for=traced_for
        )


@functools.lru_cache(maxsize=4)
def captures_of(shape: ModelShape, compute: torch.dtype, lowering: Lowering, traced_for: torch.device) -> Captures:
    """The captured layers of a shape in that dtype and for that device, shared by all sizes of batches."""
    return Captures(keeps_traces=True)


def templates_of(
    shape: ModelShape, sequence: int, mode: FakeMode | None = None, layers: int = 1
) -> tuple[_Start, list[_Layer], _End]:
    """Modules for the start, the layers of one segment, and the end."""
    with mode or fake_mode():
        start, end = _Start(shape, sequence), _End(shape)
        repeated = [_Layer(shape) for _ in range(layers)]
        if shape.dtype is not torch.float32:
            for module in [part for one in (start, *repeated, end) for part in one.modules()]:
                for name, parameter in list(module.named_parameters(recurse=False)):  # .to() fails on fake tensors
                    setattr(module, name, nn.Parameter(parameter.detach().to(shape.dtype)))
        if shape.tied:
            words: Any = start.embedding if shape.gated else start.embedding.token
            end.head.projection.weight = words.weight
    return start, repeated, end


def partition_of(
    shape: ModelShape, sequences: int, sequence: int, templates: tuple[nn.Module, Sequence[nn.Module], nn.Module]
) -> Partition:
    """The partition for a micro-batch of that many sequences."""
    start, layers, end = templates
    tokens, stream = (sequences, sequence), (sequences, sequence, shape.hidden)
    last = shape.layers + 1
    values = [Value(0, tokens, torch.int64, None, [0]), Value(1, tokens, torch.int64, None, [last])]
    values += [Value(2 + n, stream, torch.float32, n, [n + 1]) for n in range(last)]
    values.append(Value(2 + last, (), torch.float32, last))
    words = "embedding__weight" if shape.gated else "embedding__token__weight"
    segments = []
    for index in range(last + 1):
        name = "embedding" if index == 0 else "head" if index == last else f"layer_{index - 1}"
        inner = 0 < index < last
        module = layers[(index - 1) % len(layers)] if inner else start if index == 0 else end
        names = {own: f"{name}.{own.replace('.', '__')}" for own, _ in module.named_parameters()}
        if index == last and shape.tied:
            names["head.projection.weight"] = f"embedding.{words}"
        inputs = (0,) if index == 0 else (1 + index, 1) if index == last else (1 + index,)
        kind = "layer" if inner else None
        equal_key = (module, kind or name)  # also for start and end: other batches share the captures
        segments.append(Segment(index, name, module, inputs, (2 + index,), names, {}, equal_key, kind))
    _, nothing = tensor_leaves(())
    return Partition(segments, values, (0, 1), True, (), nothing)
