"""The relay's random numbers for a model that plain PyTorch runs.

PyTorch draws dropout masks and noise from its own generator. While `GivenDraws` is open, those ops are filled with the
counter-based numbers of (seed, step, segment, micro-batch, draw in the segment) that `hal.random` defines; every other
op is PyTorch's. Layers that the relay runs eagerly draw from PyTorch's generator, seeded from the same key.

It needs to know where a draw belongs: the segments' names, how many draws each has, and when a layer is entered.
Invariant: a draw that has no number of the relay's raises VerificationError; none is taken from elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hal.random import OP_LIMIT, RandomKey, keep_mask, normal, uniform
from relay.capture.eager_call import seed_of
from relay.errors import VerificationError
from relay.runtime.stages import CompiledModel

aten = torch.ops.aten

NUMBERS = {
    aten.rand.default: uniform,
    aten.rand_like.default: uniform,
    aten.randn.default: normal,
    aten.randn_like.default: normal,
}
"""Ops whose result is drawn, and the relay's numbers for it."""


@dataclass(frozen=True)
class Place:
    """A layer, or the code between layers, as draws are counted.

    `index` is the segment of its random keys. `draws` is how many numbers a micro-batch draws there. An `eager` place
    draws from PyTorch's generator, which is seeded where `begins` is set.
    """

    name: str
    index: int
    draws: int
    eager: bool
    begins: bool


def places_of(compiled: CompiledModel) -> list[Place]:
    """The places of a compiled model, in the order of its segments."""
    places = []
    for stage in compiled.stages:
        segment, captured = stage.segment, stage.captured
        names = segment.name.split("+") if segment.layers > 1 else [segment.name]
        programs = [one for one in (captured.forward, captured.backward, captured.joint) if one is not None]
        numbers = [
            int(node.args[1])
            for program in programs
            for node in program.graph.nodes
            if node.op == "call_function" and node.target in (keep_mask, uniform, normal)
        ]
        for offset, name in enumerate(names):
            own = [number % OP_LIMIT for number in numbers if number // OP_LIMIT == offset]
            draws, eager = max(own, default=-1) + 1, captured.eager is not None
            places.append(Place(name, segment.layer_index + offset, draws, eager, begins=offset == 0))
    return places


class GivenDraws(TorchDispatchMode):
    """While open, what runs draws the numbers of the micro-batch that `begin` named.

    `layers` are the modules by the names of their places; None for a layer that the caller itself enters. Other places
    are code around the layers, whose draws are recognised by their order.
    """

    def __init__(self, seed: int, layers: Mapping[str, nn.Module | None]) -> None:
        super().__init__()
        self._seed = seed
        self._places: dict[str, Place] = {}
        self._outside: list[Place] = []
        self._now = (0, 0)
        self._inside: Place | None = None
        self._entered: Counter[str] = Counter()
        self._drawn: Counter[str] = Counter()
        self._backward = False
        self._eager_outside: list[str] = []
        self._layers = layers

    def begin(self, places: Sequence[Place], step: int, microbatch: int) -> None:
        """What follows is the forward of that micro-batch."""
        self._places = {place.name: place for place in places}
        around = [place for place in places if place.name.split("#")[0] not in self._layers]
        self._outside = [place for place in around for _ in range(place.draws)]
        self._eager_outside = [place.name for place in around if place.eager]
        self._now = (step, microbatch)
        self._inside = None
        self._entered.clear()
        self._drawn.clear()
        self._backward = False

    def begin_backward(self) -> None:
        """What follows is the backward, which draws nothing."""
        self._backward = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A context in which calls of the layers are noticed."""
        hooks: list[Any] = []
        for name, module in self._layers.items():
            if module is None:
                continue
            hooks.append(module.register_forward_pre_hook(self._entering(name)))
            hooks.append(module.register_forward_hook(self._leaving, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def enter(self, name: str) -> None:
        """A layer begins. A layer that is called several times has one place for each call."""
        if self._backward:
            raise VerificationError(
                f"Layer {name!r} runs its forward again in plain PyTorch's backward (activation checkpointing inside "
                "the model), where its random numbers cannot be given. Turn checkpointing off for the comparison."
            )
        self._entered[name] += 1
        count = self._entered[name]
        self._inside = place = self._places.get(name if count == 1 else f"{name}#{count}")
        if place is not None and place.eager and place.begins:
            torch.manual_seed(seed_of(self._key(place)))

    def _entering(self, name: str) -> Any:
        return lambda module, inputs: self.enter(name)

    def _leaving(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside = None

    def _key(self, place: Place) -> RandomKey:
        return RandomKey(self._seed, self._now[0], place.index, self._now[1])

    def _next(self, op: str) -> tuple[RandomKey, int] | None:
        """The key and the number of the next draw; None where PyTorch's generator draws."""
        place = self._inside
        if self._backward:
            raise VerificationError(
                f"The model draws random numbers by {op} in plain PyTorch's backward (activation checkpointing inside "
                "the model), where they cannot be given. Turn checkpointing off for the comparison."
            )
        if place is None:
            if not self._outside:
                why = f" ({', '.join(self._eager_outside)} runs eagerly)" if self._eager_outside else ""
                raise VerificationError(
                    f"The model draws random numbers by {op} outside of its layers where the relay draws none{why}, so "
                    "plain PyTorch cannot be given the relay's. Set dropout to 0 for the comparison, or move the op "
                    "into a layer."
                )
            place = self._outside.pop(0)
        elif place.eager:
            return None
        number = self._drawn[place.name]
        self._drawn[place.name] += 1
        return self._key(place), number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.bernoulli_.float:
            drawn = self._next(str(func))
            if drawn is not None:
                probability = args[1] if len(args) > 1 else kwargs.get("p", 0.5)  # the op's own default
                return args[0].copy_(keep_mask(*drawn, args[0].shape, 1.0 - probability))
        elif func is aten.bernoulli.p:
            drawn = self._next(str(func))
            if drawn is not None:
                return torch.empty_like(args[0]).copy_(keep_mask(*drawn, args[0].shape, 1.0 - args[1]))
        elif func is aten.native_dropout.default and args[2] is not False:
            drawn = self._next(str(func))
            if drawn is not None:
                source, probability = args[0], args[1]
                mask = keep_mask(*drawn, source.shape, probability).to(source.device)
                return source * mask * (0.0 if probability == 1.0 else 1.0 / (1.0 - probability)), mask
        elif func in NUMBERS:
            drawn = self._next(str(func))
            if drawn is not None:
                result = func(*args, **kwargs)
                return result.copy_(NUMBERS[func](*drawn, result.shape))
        return func(*args, **kwargs)
