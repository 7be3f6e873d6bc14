"""Search depth and width by sampling: train one network, of which each step uses a random part, and evaluate its parts.

Each step draws the layers that take part (`active_layers=`) and their width (a mask over the inner features, which is
part of the batch). The other layers are not sent to the device, are not updated, and have no gradient. Afterwards every
candidate is a part of the same weights.

For comparison some candidates are trained alone, from the start and for as many steps each. They take turns with the
sampled network step by step, so that other load on the machine slows all alike. The example compares time, held-out
losses, and the order of the candidates. Times are those of whole steps, including the compilation of each depth.

    python examples/sample_depth.py --layers 6 --steps 300
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import relay

FEATURES = 32


class Output(NamedTuple):
    """The output of the network."""

    loss: Tensor
    value: Tensor


class Layer(nn.Module):
    """A residual layer whose inner features can be masked, so that it is narrower."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.wide = nn.Linear(FEATURES, inner)
        self.back = nn.Linear(inner, FEATURES)

    def forward(self, value: Tensor, width: Tensor) -> Tensor:
        return value + self.back(nn.functional.gelu(self.wide(self.norm(value))) * width)


class Network(nn.Module):
    """A network that holds all depths and widths, or a single one of them."""

    def __init__(self, layers: int, inner: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, FEATURES)
        self.layers = nn.ModuleList(Layer(inner) for _ in range(layers))
        self.last = nn.Linear(FEATURES, 1)

    def forward(self, inputs: Tensor, targets: Tensor, width: Tensor) -> Output:
        value = self.first(inputs)
        for layer in self.layers:
            value = layer(value, width)
        value = self.last(value)
        return Output(nn.functional.mse_loss(value, targets), value)


def draw(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Points, and the values of the function to be learned."""
    inputs = torch.randn(rows, 4, generator=generator)
    targets = torch.sin(2 * inputs[:, :1] * inputs[:, 1:2]) + torch.cos(inputs[:, 2:3] - inputs[:, 3:4])
    return {"inputs": inputs, "targets": targets}


def masked(batch: dict[str, Tensor], inner: int, width: int) -> dict[str, Tensor]:
    """The batch with the mask for a width."""
    mask = (torch.arange(inner) < width).float()
    return {**batch, "width": mask.expand(len(batch["inputs"]), inner).contiguous()}


@dataclass
class Candidate:
    """A depth and width, and its held-out losses: as a part of the sampled network, and trained alone."""

    depth: int
    width: int
    sampled: float = 0.0
    alone: float | None = None
    seconds: float = 0.0

    @property
    def parameters(self) -> int:
        """The number of parameters in its layers."""
        return self.depth * (2 * FEATURES * self.width + self.width + 3 * FEATURES)


def agreement(candidates: Sequence[Candidate]) -> float:
    """The share of pairs of candidates that both kinds of training put in the same order; 0.5 is chance."""
    known = [(one.sampled, one.alone) for one in candidates if one.alone is not None]
    pairs = [(one, other) for place, one in enumerate(known) for other in known[:place]]
    same = [(one[0] < other[0]) == (one[1] < other[1]) for one, other in pairs]
    return sum(same) / len(same)


def search(options: argparse.Namespace) -> tuple[list[Candidate], float]:
    """All candidates with their losses, and the seconds of the sampled network's steps."""
    generator = torch.Generator().manual_seed(0)
    widths = [options.inner >> shift for shift in range(options.widths)]
    candidates = [Candidate(depth, width) for depth in range(1, options.layers + 1) for width in widths]
    tried = {1, -(-options.layers // 2), options.layers}
    chosen = [one for one in candidates if one.depth in tried]

    def begin(layers: int, inner: int) -> relay.Trainer:
        torch.manual_seed(0)
        optimizer = relay.AdamW(lr=options.lr)
        return relay.Trainer(Network(layers, inner), device=options.device, microbatches=2, optimizer=optimizer)

    with begin(1, 8) as warming:
        warming.step(masked(draw(64, generator), 8, 8))  # what is compiled once for a process counts for nobody
    sampled = begin(options.layers, options.inner)
    alone = [begin(one.depth, one.width) for one in chosen]
    seconds = 0.0
    try:
        for step in range(options.steps):
            batch = draw(64, generator)
            depth = int(torch.randint(1, options.layers + 1, (), generator=generator))
            width = widths[int(torch.randint(len(widths), (), generator=generator))]
            # The first layers of a depth, so that a shallow network is the beginning of a deep one.
            metrics = sampled.step(masked(batch, options.inner, width), active_layers=range(depth))
            seconds += metrics.seconds
            for one, trainer in zip(chosen, alone, strict=True):
                one.seconds += trainer.step(masked(batch, one.width, one.width)).seconds
            if step % max(1, options.steps // 6) == 0:
                print(f"step {step:4d}  depth {depth}  width {width:3d}  loss {metrics.loss:.3f}")
        held_out = draw(1024, torch.Generator().manual_seed(1))
        for one in candidates:
            part = masked(held_out, options.inner, one.width)
            one.sampled = sampled.evaluate(part, active_layers=range(one.depth)).loss
        for one, trainer in zip(chosen, alone, strict=True):
            one.alone = trainer.evaluate(masked(held_out, one.width, one.width)).loss
    finally:
        for trainer in (sampled, *alone):
            trainer.close()
    return candidates, seconds


def main(arguments: Sequence[str] | None = None) -> tuple[list[Candidate], float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--inner", type=int, default=64, help="the greatest width")
    parser.add_argument("--widths", type=int, default=3, help="how many widths are tried, each half of the one before")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.inner, options.widths, options.steps = 2, 8, 2, 20
    candidates, seconds = search(options)
    print("parameters  depth  width  held-out loss: as a part  trained alone  seconds alone")
    for one in sorted(candidates, key=lambda one: one.parameters):
        by_itself = f"{one.alone:13.4f}  {one.seconds:13.1f}" if one.alone is not None else ""
        print(f"{one.parameters:10,d}  {one.depth:5d}  {one.width:5d}  {one.sampled:24.4f}  {by_itself}".rstrip())
    alone = [one for one in candidates if one.alone is not None]
    total = sum(one.seconds for one in alone)
    print(f"sampling: {seconds:.1f} s for {len(candidates)} candidates; alone: {total:.1f} s for {len(alone)} of them")
    print(f"pairs that both ways put in the same order: {agreement(candidates):.0%}")
    best = min(candidates, key=lambda one: one.sampled)
    print(f"the best part has depth {best.depth} and width {best.width}: held-out loss {best.sampled:.4f}")
    return candidates, seconds


if __name__ == "__main__":
    main()
