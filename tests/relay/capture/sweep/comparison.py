"""One sample layer trained for a step in a relayed model and in plain PyTorch.

The model is a list: a layer whose parameter is what the sample is given, the sample, and a weighted sum of all that
it returns. Random ops of the plain model draw what the relay promises to draw (`tests.support.given_masks`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import traceback
import warnings
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import relay
from hal import random as keyed
from hal.errors import HalError
from relay.errors import RelayError
from tests.relay.capture.sweep.sample_layers import NotASample, Sample
from tests.support.given_masks import GivenMasks

aten = torch.ops.aten
SEED = 5


class Source(nn.Module):
    """Gives its parameter, whatever the batch."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, ones: torch.Tensor) -> torch.Tensor:
        return self.value * ones.mean()


class Weighted(nn.Module):
    """The sum of all elements that are finite, each with a weight of its own."""

    def forward(self, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        total = torch.zeros(())
        for value in values:
            dense = value.to_dense() if value.layout is not torch.strided else value
            real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
            finite = torch.where(torch.isfinite(real), real, torch.zeros_like(real)).to(torch.float32)
            weights = torch.linspace(0.5, 1.5, max(finite.numel(), 1))[: finite.numel()].reshape(finite.shape)
            total = total + (finite * weights).sum()
        return total


class GradientsKept(torch.optim.Optimizer):
    """Puts each parameter's gradient in its place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.copy_(parameter.grad)


class KeyedDraws(GivenMasks):
    """Has the other random ops that have a keyed form draw by it too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draw = {
            aten.rand.default: keyed.uniform, aten.rand_like.default: keyed.uniform,
            aten.randn.default: keyed.normal, aten.randn_like.default: keyed.normal,
        }.get(func)  # fmt: skip
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn += 1
        if draw is None or (self.eagerly and self._inside is not None):
            return super().__torch_dispatch__(func, types, args, kwargs)
        shape = args[0].shape if isinstance(args[0], torch.Tensor) else args[0]
        segment = self._segment()
        self._numbers[segment] += 1
        return draw(self._key(segment), self._numbers[segment] - 1, tuple(shape))


@dataclass(frozen=True)
class Verdict:
    """How a sample fared: `equal`, `refused`, `wrong`, `crashed`, `captured` not but run `eagerly`, or `no sample`."""

    kind: str
    detail: str = ""


def verdict(sample: Sample) -> Verdict:
    """Train the sample once in both."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            layer, value = sample.make()
            modules = [Source(value), layer, Weighted()]
            expected = [plain_step(modules)]
        except NotASample as why:
            return Verdict("no sample", str(why))
        except Exception as why:
            return Verdict("no sample", f"{type(why).__name__}: {why}")
        keyed_step = plain_step(modules, False)
        if keyed_step["drawn"]:
            expected = [keyed_step, plain_step(modules, True)]
        caught.clear()
        try:
            found = relayed_step(modules)
        except (RelayError, HalError) as why:
            named = "layer" in str(why) and "failed on queue" not in str(why)
            return Verdict("refused" if named else "crashed", f"{type(why).__name__}: {why}")
        except Exception as why:
            frame = traceback.extract_tb(why.__traceback__)[-1]
            return Verdict("crashed", f"{type(why).__name__}: {why} ({frame.filename}:{frame.lineno})")
        eagerly = any("runs eagerly" in str(warning.message) for warning in caught)
    differences = [difference(found, plain) for plain in expected]
    if all(differences):
        return Verdict("wrong", differences[0])
    return Verdict("equal", "eagerly" if eagerly else "")


def plain_step(modules: list[nn.Module], eagerly: bool | None = None) -> dict[str, Any]:
    """The loss, gradients and buffers of a step of plain PyTorch.

    With `eagerly` its random ops draw what a layer that runs eagerly, or as a graph, promises to draw. Without, nothing
    is put between PyTorch and its kernels: some of its own checks are off while a mode is open.
    """
    model = nn.Sequential(*copy.deepcopy(modules))
    masks = KeyedDraws(model, ["0", "1", "2"], SEED, eagerly=bool(eagerly))
    masks.begin(0, 0)
    with torch.random.fork_rng(devices=()), contextlib.nullcontext() if eagerly is None else masks:
        loss = model(torch.ones(2))
        if not loss.requires_grad:
            raise NotASample("nothing of it depends on what it is given")
        loss.backward()
    optimizer = GradientsKept(model.parameters())
    optimizer.step()
    return {"loss": loss.item(), "state": model.state_dict(), "drawn": masks.drawn}


def relayed_step(modules: list[nn.Module]) -> dict[str, Any]:
    """The same of the relay."""
    trainer = relay.Trainer(
        copy.deepcopy(modules),
        loss=lambda output, targets: output,
        optimizer=functools.partial(GradientsKept),
        microbatches=1,
        seed=SEED,
        on_nonfinite="log",
    )
    with closing(trainer):
        metrics = trainer.step((torch.ones(2), torch.ones(2)))
        return {"loss": metrics.loss, "state": {name: tensor.clone() for name, tensor in trainer.state_dict().items()}}


def difference(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """What differs, in words; empty where nothing does."""
    if not torch.equal(torch.tensor(found["loss"]), torch.tensor(expected["loss"])):
        return f"the loss is {found['loss']}, not {expected['loss']}"
    for name, plain in expected["state"].items():
        mine = found["state"][name]
        if mine.dtype != plain.dtype or mine.shape != plain.shape:
            return f"{name} is of {mine.dtype} {tuple(mine.shape)}, not {plain.dtype} {tuple(plain.shape)}"
        if not torch.equal(mine, plain) and not same_with_nans(mine, plain):
            return f"{name} differs by {(mine - plain).abs().max().item() if mine.is_floating_point() else '?'}"
    return ""


def same_with_nans(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether they are equal where NaNs are taken for equal."""
    return torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)
