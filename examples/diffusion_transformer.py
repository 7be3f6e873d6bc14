"""Train a small diffusion transformer (DiT), in full or with LoRA, on pictures that are drawn here.

The model is a DiT with adaptive norms (Peebles and Xie, arXiv 2212.09748) and random weights; it predicts the velocity
from noise to picture (flow matching). Pictures are discs and squares of a random place and size, with the shape as
class. First all weights are trained; then the result is adapted to inverted pictures, once in full and once with LoRA
on all linear layers of the blocks. `trainer.verify` compares steps with plain PyTorch, tensor by tensor.

    python examples/diffusion_transformer.py --steps 200
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

import relay

SIZE, PATCH, CLASSES = 16, 4, 2


class Block(nn.Module):
    """Attention and a feed-forward network, each with a norm that the time and the class shift and scale."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.modulation = nn.Linear(hidden, 6 * hidden)

    def forward(self, tokens: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).unsqueeze(1).chunk(6, dim=-1)
        normed = self.norm1(tokens) * (1 + scale1) + shift1
        rows, length, hidden = tokens.shape
        q, k, v = self.qkv(normed).view(rows, length, 3, self.heads, hidden // self.heads).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, hidden)
        tokens = tokens + gate1 * self.out(mixed)
        normed = self.norm2(tokens) * (1 + scale2) + shift2
        return tokens + gate2 * self.down(nn.functional.gelu(self.up(normed)))


class DiT(nn.Module):
    """(noisy pictures, time, class, velocity) -> the loss and the predicted velocity."""

    def __init__(self, layers: int, hidden: int, heads: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, hidden, PATCH, stride=PATCH)
        self.place = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, hidden) * 0.02)
        self.time = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.label = nn.Embedding(CLASSES, hidden)
        self.blocks = nn.ModuleList([Block(hidden, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, PATCH * PATCH)
        self.register_buffer("frequencies", torch.exp(-math.log(1000) * torch.arange(hidden // 2) / (hidden // 2)))

    def forward(
        self, pictures: torch.Tensor, time: torch.Tensor, label: torch.Tensor, velocity: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        angles = 1000 * time[:, None] * self.frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], dim=1)) + self.label(label)
        condition = nn.functional.silu(condition)
        tokens = self.patches(pictures).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            tokens = block(tokens, condition)
        found = self.head(self.norm(tokens))
        side = SIZE // PATCH
        found = found.view(-1, side, side, PATCH, PATCH).permute(0, 1, 3, 2, 4).reshape(-1, 1, SIZE, SIZE)
        return {"loss": mse_loss(found, velocity), "velocity": found}


def batch(number: int, rows: int, inverted: bool) -> dict[str, torch.Tensor]:
    """Pictures between noise and drawing, and the velocity that leads to the drawing."""
    generator = torch.Generator().manual_seed(number)
    label = torch.randint(CLASSES, (rows,), generator=generator)
    centre = torch.rand(rows, 2, 1, 1, generator=generator) * 8 + 4
    radius = torch.rand(rows, 1, 1, generator=generator) * 3 + 2
    grid = torch.arange(SIZE).float()
    across, down = (grid[None, None] - centre[:, 0]).abs(), (grid[None, :, None] - centre[:, 1]).abs()
    disc, square = across**2 + down**2 < radius**2, torch.maximum(across, down) < radius
    drawn = torch.where((label == 0)[:, None, None], disc, square).float()[:, None] * 2 - 1
    drawn = -drawn if inverted else drawn
    noise = torch.randn(drawn.shape, generator=generator)
    time = torch.rand(rows, generator=generator)
    mixed = (1 - time)[:, None, None, None] * noise + time[:, None, None, None] * drawn
    return {"pictures": mixed, "time": time, "label": label, "velocity": drawn - noise}


@dataclass(frozen=True)
class Result:
    """Held-out losses before and after, the bytes of weights that a step sends, and whether steps equal PyTorch's."""

    before: float
    after: float
    weight_bytes: int
    trained: int
    equal: bool


def train(model: nn.Module, steps: int, device: str, inverted: bool, rate: float) -> Result:
    """Train, and measure the loss of batches that are not trained on."""
    held_out = [batch(100_000 + number, 16, inverted) for number in range(4)]
    with relay.Trainer(model, device=device, optimizer=relay.AdamW(lr=rate), microbatches=2, stash="host") as trainer:
        before = sum(trainer.evaluate(one).loss for one in held_out) / len(held_out)
        equal = trainer.verify([batch(0, 16, inverted)]).equal
        for step in range(steps):
            metrics = trainer.step(batch(step, 16, inverted))
        after = sum(trainer.evaluate(one).loss for one in held_out) / len(held_out)
        trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    return Result(before, after, metrics.weight_bytes, trained, equal)


def main(arguments: Sequence[str] | None = None) -> dict[str, Result]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few seconds: a small model, few steps")
    options = parser.parse_args(arguments)
    steps, layers, hidden = (6, 2, 16) if options.quick else (options.steps, 6, 96)
    torch.manual_seed(0)
    model = DiT(layers, hidden)
    results = {"from random weights": train(model, steps, options.device, False, 2e-3)}
    full = copy.deepcopy(model)
    results["adapted in full"] = train(full, steps, options.device, True, 2e-3)
    targets = ["qkv", "out", "up", "down", "modulation"]
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, target_modules=targets))
    results["adapted with LoRA"] = train(adapted, steps, options.device, True, 5e-3)
    for name, found in results.items():
        print(f"{name}: held-out loss {found.before:.3f} before, {found.after:.3f} after; {found.trained:,} parameters "
              f"trained, {found.weight_bytes:,} bytes sent a step; equal to PyTorch: {found.equal}")  # fmt: skip
    return results


if __name__ == "__main__":
    main()
