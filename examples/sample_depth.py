"""Search depth and width by sampling: train one network of which each step takes a random part, and ask parts of it.

Each step draws which layers take part (`active=`) and how wide they are (a mask over the inner features that comes
with the batch). Afterwards every candidate is the same weights, cut down; the best for its size is printed. Layers
that sit out are not sent to the device, are not updated, and have no gradient.

    python examples/sample_depth.py --layers 6 --steps 150
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from torch import Tensor, nn

import relay


class Output(NamedTuple):
    """What the network returns."""

    loss: Tensor
    value: Tensor


class Layer(nn.Module):
    """A residual layer whose inner features can be masked, so that it is narrower."""

    def __init__(self, features: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.wide = nn.Linear(features, inner)
        self.back = nn.Linear(inner, features)

    def forward(self, value: Tensor, width: Tensor) -> Tensor:
        return value + self.back(torch.nn.functional.gelu(self.wide(self.norm(value))) * width)


class Supernet(nn.Module):
    """All the depths and widths in one."""

    def __init__(self, layers: int, features: int, inner: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, features)
        self.layers = nn.ModuleList(Layer(features, inner) for _ in range(layers))
        self.last = nn.Linear(features, 1)

    def forward(self, inputs: Tensor, targets: Tensor, width: Tensor) -> Output:
        value = self.first(inputs)
        for layer in self.layers:
            value = layer(value, width)
        value = self.last(value)
        return Output(nn.functional.mse_loss(value, targets), value)


def draw(rows: int, inner: int, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Points with a function of them to be learned, and the mask of a width."""
    inputs = torch.randn(rows, 4, generator=generator)
    targets = torch.sin(2 * inputs[:, :1] * inputs[:, 1:2]) + torch.cos(inputs[:, 2:3] - inputs[:, 3:4])
    mask = (torch.arange(inner) < width).float()
    return {"inputs": inputs, "targets": targets, "width": mask.expand(rows, inner).contiguous()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--inner", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    widths = [options.inner >> shift for shift in range(3)]
    model = Supernet(options.layers, 32, options.inner)
    with relay.Trainer(model, device=options.device, microbatches=2, optimizer=relay.AdamW(lr=3e-3)) as trainer:
        for step in range(options.steps):
            depth = int(torch.randint(1, options.layers + 1, (), generator=generator))
            width = widths[int(torch.randint(len(widths), (), generator=generator))]
            # The first layers of a depth, so that a shallow network is the beginning of a deep one.
            metrics = trainer.step(draw(64, options.inner, width, generator), active=range(depth))
            if step % 25 == 0:
                print(f"step {step:4d}  depth {depth}  width {width:3d}  loss {metrics.loss:.3f}")
        found = []
        for depth in range(1, options.layers + 1):
            for width in widths:
                test = draw(512, options.inner, width, torch.Generator().manual_seed(1))
                found.append((trainer.evaluate(test, active=range(depth)).loss, depth, width))
        print("parameters of a layer grow with width; the best of each cost:")
        best = float("inf")
        for loss, depth, width in sorted(found, key=lambda one: one[1] * one[2]):
            if loss < best:
                best = loss
                print(f"  depth {depth}  width {width:3d}  loss {loss:.4f}")


if __name__ == "__main__":
    main()
