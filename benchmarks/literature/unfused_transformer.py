"""A transformer as software of 2019 and 2020 ran it: attention op by op, with dropout, for rows of then.

`relay.simulate(UnfusedTransformer(...), example=...)` counts the traffic of its scores from the graph. Models of today
use fused attention, which keeps no scores. Nothing is timed here.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and feed-forward network, each behind a norm, with dropout of scores and of both results."""

    def __init__(self, hidden: int, heads: int, ffn: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, dim=-1)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(hidden // self.heads)
        mask = torch.zeros(length, length, dtype=x.dtype, device=x.device)
        scores = scores + (mask.fill_(-1e4).triu(1) if self.causal else mask)
        mixed = self.dropout(scores.softmax(-1)) @ value
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, hidden)))
        return x + self.dropout(self.down(F.gelu(self.up(self.between(x)))))


class UnfusedTransformer(nn.Module):
    """Embeddings, equal blocks, and a head over the vocabulary with its loss."""

    def __init__(self, layers: int, hidden: int, heads: int, ffn: int, seq: int, vocabulary: int, causal: bool) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, ffn, causal) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
