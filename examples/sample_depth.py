"""Search depth and width by sampling: train one network of which each step takes a random part, and ask parts of it.

Each step draws which layers take part (`active_layers=`) and how wide they are (a mask over the inner features that
comes with the batch). Layers that sit out are not sent to the device, are not updated, and have no gradient. Afterwards
every candidate is the same weights, cut down.

What the search is worth is told by training some candidates alone, from the start and for as many steps each, taking
turns with the sampled network step by step so that whatever else the machine does slows all alike: their time and
held-out losses against those of the parts, and how far both agree on which candidate is better. Times are of whole
steps, those in which a depth is recorded and compiled for the first time included.

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
    """What the network returns."""

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
    """All the depths and widths in one, or one of them alone."""

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
    """Points with a function of them to be learned."""
    inputs = torch.randn(rows, 4, generator=generator)
    targets = torch.sin(2 * inputs[:, :1] * inputs[:, 1:2]) + torch.cos(inputs[:, 2:3] - inputs[:, 3:4])
    return {"inputs": inputs, "targets": targets}


def masked(batch: dict[str, Tensor], inner: int, width: int) -> dict[str, Tensor]:
    """The batch with the mask of a width."""
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
        """How many numbers its layers have."""
        return self.depth * (2 * FEATURES * self.width + self.width + 3 * FEATURES)


def agreement(candidates: Sequence[Candidate]) -> float:
    """The share of pairs of candidates that both ways put in the same order; one half is chance."""
    known = [(one.sampled, one.alone) for one in candidates if one.alone is not None]
    pairs = [(one, other) for place, one in enumerate(known) for other in known[:place]]
    same = [(one[0] < other[0]) == (one[1] < other[1]) for one, other in pairs]
    return sum(same) / len(same)


def search(options: argparse.Namespace) -> tuple[list[Candidate], float]:
    """All candidates with their losses, and the seconds of the sampled network's steps."""
    generator = torch.Generator().manual_seed(0)
    widths = [options.inner >> shift for shift in range(3)]
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
    parser.add_argument("--inner", type=int, default=64, help="the greatest width; a half and a quarter are tried too")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    options = parser.parse_args(arguments)
    if options.quick:
        options.layers, options.inner, options.steps = 2, 8, 20
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
