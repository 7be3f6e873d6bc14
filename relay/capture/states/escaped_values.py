"""Values of a trace that code leaves in its own containers: lists of hooks that record, attributes, closures, globals.

A trace runs the code on tensors without numbers, and steps do not run it at all, so what code only records (a hook that
appends outputs to a list) would hold such tensors, and never a value of a step. They are taken out again, and named.
What code reads again is a state or a cache, with rules of its own (`lasting_state`, `plain_tensors`); so is what
hooks of `transformers` record (`relay.graph.recorded_outputs`). Invariant: afterwards no container that the code
reaches holds a tensor of a trace.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from types import CellType, CodeType
from typing import Any

import torch
from torch import nn
from torch._subclasses.functional_tensor import FunctionalTensor

from relay.capture.fake_tensors import is_fake
from relay.capture.guards.code_guards import ABSENT, CodeGuards
from relay.capture.guards.counters import is_read

DEEPEST = 3
"""Tensors are looked for in tuples, lists and dicts that are nested so deep."""


class Escapes:
    """What was found in one compilation.

    Attributes:
        attributes: attributes of modules in which a trace left tensors, which were restored.
        taken: paths of what tensors of a trace were taken out of.
        eager: paths of what code that runs eagerly wrote to, in its first run.
    """

    def __init__(self) -> None:
        self.attributes: dict[tuple[int, str], None] = {}
        self.taken: list[str] = []
        self.eager: dict[str, None] = {}

    def messages(self, model: nn.Module, ran: Collection[CodeType], said: set[str]) -> list[str]:
        """Warnings of what only records, by the code that `ran`. Paths in `said` are left out; others are added."""
        names = {id(module): name for name, module in model.named_modules()}
        own = [f"{names[module]}.{name}".lstrip(".") for module, name in self.attributes if module in names]
        found = []
        for paths, why in (([*own, *self.taken], _WITHOUT_VALUES), (list(self.eager), _OF_MORE_RUNS)):
            recorded = [path for path in paths if _of_a_hook(path) or not is_read(_last_name(path), ran)]
            if new := [path for path in dict.fromkeys(recorded) if path not in said]:
                said.update(new)
                more = f" (and {len(new) - 1} more: {', '.join(new[1:3])})" if len(new) > 1 else ""
                found.append(f"{new[0]}{more} {why}")
        return found


_WITHOUT_VALUES = (
    "is written to by the model's code (a hook that records values, for example), and gets no value of any step: the "
    "code runs when it is compiled, on tensors without numbers, which were taken out again. Ask for what the model "
    "returns by step(batch, outputs=[...]) or trainer.predict(batch), or call the model itself between steps, where "
    "its hooks run as ever."
)
_OF_MORE_RUNS = (
    "is written to by code that runs eagerly (a hook that records values, for example). It gets the values of more "
    "runs than the training forward: of a first run and of each recompute, and tensors in it may change later. Ask for "
    "what the model returns by step(batch, outputs=[...]), or call the model itself between steps."
)


class _Open(threading.local):
    """The compilation of this thread, if there is one."""

    escapes: Escapes | None = None


_open = _Open()


@contextmanager
def noting() -> Iterator[Escapes]:
    """While open, `note_attribute` and `note_eager` add to what is yielded."""
    before, _open.escapes = _open.escapes, Escapes()
    try:
        yield _open.escapes
    finally:
        _open.escapes = before


def note_attribute(module: nn.Module, name: str, value: Any) -> None:
    """Note an attribute of a module that is restored, if a tensor of a trace is in it."""
    if _open.escapes is not None and holds_trace(value):
        _open.escapes.attributes[id(module), name] = None


def note_eager(path: str, layer: str) -> None:
    """Note what the code of a layer that runs eagerly has written to, by its path from the layer."""
    if _open.escapes is not None:
        _open.escapes.eager[re.sub(r"\b(module|block)\b", layer, path, count=1)] = None


def of_trace(value: Any) -> bool:
    """Whether it is a tensor of a trace."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return False
    wrapped = torch._is_functional_tensor(value) or torch._C._functorch.is_functorch_wrapped_tensor(value)
    return is_fake(value) or isinstance(value, FunctionalTensor) or wrapped


def holds_trace(value: Any, depth: int = 0) -> bool:
    """Whether it is such a tensor, or one is in it."""
    if isinstance(value, (tuple, list, set, deque)) and depth < DEEPEST:
        return any(holds_trace(part, depth + 1) for part in value)
    if isinstance(value, dict) and depth < DEEPEST:
        return any(holds_trace(part, depth + 1) for part in value.values())
    return of_trace(value)


Known = dict[tuple[int, Hashable], tuple[Any, Any]]
"""What was in places of containers before the code ran: by container and name the container, and that."""


def take_back(guards: CodeGuards, known: Known) -> list[str]:
    """Take the tensors of traces out of all containers that `guards` look at; returns the paths of those.

    What was there before comes back where it is known.
    """
    found: list[str] = []
    for path, container, name, _ in list(guards.places()):
        earlier = known.get((id(container), name), (container, ABSENT))[1]
        if earlier is ABSENT and not path.endswith("]"):
            earlier = None  # an attribute or a variable, which code may ask for
        if _taken_out(container, name, earlier):
            found.append(path)
    return list(dict.fromkeys(found))


def _taken_out(container: Any, name: Any, earlier: Any) -> bool:
    """Whether a tensor of a trace was in this place of a container; what was there `earlier` is there now."""
    if isinstance(container, (list, deque, set)):
        kept = [part for part in container if not _belongs(part)]
        if len(kept) == len(container):
            return False
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(kept)
    elif isinstance(container, CellType):
        if not _belongs(_content(container)):
            return False
        container.cell_contents = earlier
    elif isinstance(container, dict):
        if not _belongs(dict.get(container, name)):
            return False
        if earlier is ABSENT:
            dict.pop(container, name)
        else:
            dict.__setitem__(container, name, earlier)
    else:
        return False
    return True


def _belongs(value: Any) -> bool:
    """Whether it is of a trace alone: a tensor, or a tuple with one. Other containers are places themselves."""
    return any(map(_belongs, value)) if isinstance(value, tuple) else of_trace(value)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _of_a_hook(path: str) -> bool:
    return "_hooks[" in path or "(in the closure of a hook of" in path


def _last_name(path: str) -> str:
    """The name by which code reaches what has this path."""
    return path.split(" ")[0].partition("[")[0].rpartition(".")[2]
