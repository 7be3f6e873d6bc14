"""A byte-level GPT in plain PyTorch: the model of `relay train`, and of examples and tests.

It is an ordinary nn.Module and depends on nothing in Relay. Invariant: its graph depends on shapes only, never on the
values of a tensor, so that one capture of a block serves every block, micro-batch and step.

Shapes: B sequences, T positions, H hidden size, A attention heads, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GPTOutput(NamedTuple):
    """The loss (None without labels) and the logits. It is a named tuple, which torch's pytree flattens by itself."""

    loss: Tensor | None
    logits: Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss per byte in nats. Logits are (B, T, V), targets (B, T); targets of -100 are ignored."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


class Embedding(nn.Module):
    """Token and position embeddings: (B, T) bytes -> (B, T, H)."""

    def __init__(self, vocabulary: int, hidden: int, sequence: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(sequence, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        length, longest = input_ids.shape[1], self.position.num_embeddings
        if length > longest:
            raise ValueError(
                f"input_ids holds sequences of {length} bytes, but this GPT has {longest} positions; "
                f"shorten the input, or build the model with sequence={length} or more"
            )
        positions = torch.arange(length, device=input_ids.device)  # (T)
        return self.dropout(self.token(input_ids) + self.position(positions))  # (B, T, H)


class Block(nn.Module):
    """A pre-norm transformer layer: (B, T, H) -> (B, T, H).

    With `causal` a position attends to itself and to earlier positions, otherwise to all, as in an encoder.
    """

    def __init__(self, hidden: int, heads: int, dropout: float, causal: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention_in = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.feed_norm = nn.LayerNorm(hidden)
        self.feed_in = nn.Linear(hidden, 4 * hidden)
        self.feed_out = nn.Linear(4 * hidden, hidden)
        # Not inside the attention: dropout there would rule out its fused kernels.
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.dropout(self.attention(self.attention_norm(stream)))  # (B, T, H)
        wide = F.gelu(self.feed_in(self.feed_norm(stream)))  # (B, T, 4H)
        return stream + self.dropout(self.feed_out(wide))  # (B, T, H)

    def attention(self, states: Tensor) -> Tensor:
        B, T, H = states.shape
        joint = self.attention_in(states).view(B, T, 3, self.heads, H // self.heads)  # (B, T, 3, A, H/A)
        query, key, value = joint.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, A, T, H/A)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)  # (B, A, T, H/A)
        return self.attention_out(mixed.transpose(1, 2).reshape(B, T, H))  # (B, T, H)


class Head(nn.Module):
    """Hidden states to logits: (B, T, H) -> (B, T, V)."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.projection = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        return self.projection(self.norm(stream))  # (B, T, V)


class GPT(nn.Module):
    """GPT-2's architecture and initialisation, over single bytes.

    `forward` takes `input_ids` and optionally `labels`, both (B, T); labels are the next byte at each position, already
    shifted. It returns a `GPTOutput`, whose loss is None without labels. With `tied` the byte embedding and the head
    share one matrix. Raises ValueError if `hidden` is not a multiple of `heads`, or for sequences longer than
    `sequence`.

    Example::

        trainer = relay.Trainer(relay.GPT(layers=12, hidden=768, heads=12), optimizer=relay.AdamW(lr=3e-4))
    """

    def __init__(
        self,
        vocabulary: int = 256,
        layers: int = 6,
        hidden: int = 128,
        heads: int = 4,
        sequence: int = 128,
        dropout: float = 0.0,
        tied: bool = True,
    ) -> None:
        super().__init__()
        if hidden % heads:
            raise ValueError(f"hidden must be a multiple of heads; received hidden={hidden}, heads={heads}")
        self.embedding = Embedding(vocabulary, hidden, sequence, dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.head = Head(vocabulary, hidden)
        self.initialise()
        if tied:
            self.head.projection.weight = self.embedding.token.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> GPTOutput:
        stream = self.embedding(input_ids)  # (B, T) -> (B, T, H)
        for block in self.blocks:
            stream = block(stream)
        logits = self.head(stream)  # (B, T, V)
        return GPTOutput(None if labels is None else cross_entropy(logits, labels), logits)

    def as_list(self) -> list[nn.Module]:
        """The same layers as a list for `Trainer(list, loss=cross_entropy)`. They share this model's parameters."""
        return [self.embedding, *self.blocks, self.head]

    def initialise(self) -> None:
        """Normal weights of deviation 0.02, divided by sqrt(2 * layers) before a residual sum, as in GPT-2."""
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                added = name.endswith(("attention_out.weight", "feed_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * len(self.blocks)) if added else 0.02)
