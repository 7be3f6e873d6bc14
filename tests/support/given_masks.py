"""Plain PyTorch with given dropout masks: those that the relay promises, under eager autograd.

PyTorch's own dropout on the CPU, inside attention too, fills a tensor by `bernoulli_` and multiplies by it. Here that
one op is filled with `hal.random.keep_mask` for (seed, step, segment, micro-batch) and the number of the draw in its
segment, as the relay promises; every other op is PyTorch's. It is given the names of the segments in their order, and
where the draws outside of the repeated blocks belong; it reads nothing of the relay's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hal.random import RandomKey, keep_mask
from relay.capture.eager_call import seed_of

PROLOGUE = "prologue"


class GivenMasks(TorchDispatchMode):
    """While open, `model` draws the masks of `now`, a step and a micro-batch.

    `segments` are the names of the segments in order; those that are modules of the model are its blocks. `outside`
    names the segments that the draws outside of blocks belong to, one after the other; by default all to the first.
    Blocks that run `eagerly` draw by torch's generator, seeded from the same key when they are entered.
    """

    def __init__(
        self, model: nn.Module, segments: Sequence[str], seed: int, outside: Sequence[str] = (), eagerly: bool = False
    ) -> None:
        super().__init__()
        self.segments = list(segments)
        self.seed = seed
        self.outside = list(outside)
        self.eagerly = eagerly
        self.drawn = 0
        self.now = (0, 0)
        self._inside: str | None = None
        self._numbers: Counter[str] = Counter()
        self._outside_drawn = 0
        modules = dict(model.named_modules())
        self._hooks: list[Any] = []
        for name in self.segments:
            if name in modules:
                self._hooks.append(modules[name].register_forward_pre_hook(self._entering(name)))
                self._hooks.append(modules[name].register_forward_hook(self._leaving))

    def begin(self, step: int, microbatch: int) -> None:
        """What follows is the forward of that micro-batch."""
        self.now, self._inside, self._outside_drawn = (step, microbatch), None, 0
        self._numbers.clear()

    def remove(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, inputs: Any) -> None:
            self._inside = name
            if self.eagerly:
                torch.manual_seed(seed_of(self._key(name)))

        return enter

    def _leaving(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside = None

    def _key(self, segment: str) -> RandomKey:
        return RandomKey(self.seed, self.now[0], self.segments.index(segment), self.now[1])

    def _segment(self) -> str:
        if self._inside is not None:
            return self._inside
        self._outside_drawn += 1
        return self.outside[self._outside_drawn - 1] if self.outside else PROLOGUE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.bernoulli_.float or (self.eagerly and self._inside is not None):
            return func(*args, **(kwargs or {}))
        noise, kept = args[0], args[1] if len(args) > 1 else 0.5  # the op's own default
        segment = self._segment()
        mask = keep_mask(self._key(segment), self._numbers[segment], noise.shape, 1.0 - kept)
        self._numbers[segment] += 1
        self.drawn += 1
        return noise.copy_(mask)
