"""Random numbers that code run eagerly draws from other generators than PyTorch's own: Python's, numpy's, or
`torch.Generator` objects that it holds.

A recompute must draw what its forward drew, so such generators are seeded from the same key as PyTorch's, and put back
afterwards. Whether numbers that are drawn in a trace decide what it computes is found by two more traces, which draw
the smallest numbers and the largest. Generators of the classes of Python and numpy that code holds are states
(`lasting_state`). Invariant: after a call all generators are as they were before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from relay.capture.states.lasting_state import same_graph

BY_PYTHON = "random numbers that it draws from Python's or numpy's generator"
"""What decides in some code (layerdrop, for example), for messages."""

EXTREMES = 256
"""So many words of 32 bits are extreme; numbers after them are ordinary, so that loops which reject numbers end."""


class GeneratorsUsed(TorchFunctionMode):
    """While open, the `torch.Generator` objects that ops are given are collected, and put back at the end.

    `python` is whether numbers were drawn from the generators of Python or numpy.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generators: list[torch.Generator] = []
        self.python = False
        self._before: list[torch.Tensor] = []

    def __enter__(self) -> GeneratorsUsed:
        self._global = random.getstate(), repr(np.random.get_state())
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.python = self._global != (random.getstate(), repr(np.random.get_state()))
        for generator, state in zip(self.generators, self._before, strict=True):
            generator.set_state(state)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        generator = (kwargs or {}).get("generator")
        if isinstance(generator, torch.Generator) and not any(generator is one for one in self.generators):
            self.generators.append(generator)
            self._before.append(generator.get_state())
        return func(*args, **(kwargs or {}))


@contextmanager
def seeded(seed: int, generators: Sequence[torch.Generator], python: bool) -> Iterator[None]:
    """While open, these generators begin with the seed, and those of Python and numpy too if `python`."""
    before = [generator.get_state() for generator in generators]
    own = python_numbers() if python else None
    for number, generator in enumerate(generators, 1):
        generator.manual_seed((seed + number) % 2**63)
    if python:
        random.seed(seed)
        np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        if own is not None:
            random.setstate(own[0])
            np.random.set_state(own[1])


@contextmanager
def same_python_numbers(first: Any) -> Iterator[None]:
    """While open, Python's and numpy's generators begin at `first` (of `python_numbers`); they end as they were."""
    before = python_numbers()
    random.setstate(first[0])
    np.random.set_state(first[1])
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def python_numbers() -> Any:
    """Where Python's and numpy's generators are."""
    return random.getstate(), np.random.get_state()


def have_drawn(before: Any) -> bool:
    """Whether numbers were drawn from Python's or numpy's generator since `before` (of `python_numbers`)."""
    now = python_numbers()
    return bool(before[0] != now[0]) or repr(before[1]) != repr(now[1])


def decide(traced: fx.GraphModule, again: Callable[[], fx.GraphModule]) -> bool:
    """Whether numbers drawn from Python's or numpy's generator decide what a trace computes. `again` traces anew."""
    for word in (0, 0xFFFFFFFF):
        with _extreme_numbers(word):
            try:
                if not same_graph(traced, again()):
                    return True
            except Exception:  # another branch of the code, which may not be traced
                return True
    return False


@contextmanager
def _extreme_numbers(word: int) -> Iterator[None]:
    """While open, Python's and numpy's generators give this word at first, as often as `EXTREMES`."""
    before = python_numbers()
    words = [_untempered(word)] * EXTREMES
    try:
        version, state, gauss = random.Random(0).getstate()
        random.setstate((version, (*words, *state[EXTREMES:-1], 0), gauss))
        if isinstance(before[1], tuple):
            ordinary = np.random.RandomState(0).get_state(legacy=False)["state"]["key"][EXTREMES:]
            np.random.set_state(("MT19937", np.array([*words, *ordinary], dtype=np.uint32), 0, 0, 0.0))
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _untempered(word: int) -> int:
    """The word of a Mersenne Twister's state that it gives as `word`."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    found = word
    for _ in range(4):
        found = word ^ ((found << 7) & 0x9D2C5680)
    return found ^ (found >> 11) ^ (found >> 22)
