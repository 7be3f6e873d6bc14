"""Whether a model's forward changes, between calls of its layers, what the layers read.

A layer is captured once the forward has been traced, with attributes, configurations and globals as they are then. A
forward that sets a flag for some calls alone (`layer.skip = True`, `model.eval()`, an adapter that is switched off)
would have these calls computed with another state than in plain PyTorch, so it is refused by name. What the layers
change themselves is the matter of `relay.capture.guards.counters`, and what hooks and replaced forwards record that of
`relay.graph.recorded_outputs`. Invariant: nothing of the model is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from relay.capture.fake_tensors import modes_off
from relay.capture.guards.attribute_reads import Reads, reads_unrecorded, recorded_reads
from relay.capture.guards.code_guards import CodeGuards
from relay.capture.guards.code_walk import HOOKS, follow, reads_by_class
from relay.capture.guards.counters import is_read
from relay.capture.guards.executed_code import recorded_code
from relay.errors import PartitionError

_Place = tuple[int, Any]
"""What changed: the id of the dict, list or object, and the name in it."""

_REPLACED = frozenset({"forward", "__call__", "__getattr__"})
"""What a trace, and hooks that record, replace in modules for a while."""


class ChangesBetweenCalls(PartitionError):
    """A forward changes what its layers read, for some of their calls alone."""


@dataclass(eq=False)
class _Called:
    """A call of a layer: what it read, the code that it ran, and guards over the state that it left."""

    name: str
    block: nn.Module
    reads: Reads
    ran: set[CodeType]
    guards: CodeGuards

    def changed(self) -> Iterator[tuple[str, _Place]]:
        """What the layer reads and has changed since, by its path."""
        reads_of = {id(vars(part)): self.reads.get(id(part)) for part in self.block.modules() if id(part) in self.reads}
        for path, (subject, name) in self.guards.named_changes():
            if (
                isinstance(subject, torch.Tensor)
                or (isinstance(name, str) and name in _REPLACED)
                or any(hooks in path for hooks in HOOKS)
            ):
                continue
            now = subject.get(name) if isinstance(subject, dict) else None
            if isinstance(now, torch.Tensor):  # `PlainTensors` has tensors in attributes
                continue
            if id(subject) in reads_of:
                read = reads_of[id(subject)]
                counts = read is None or name in read
            elif subject is torch:  # its settings, which decide for a kernel
                counts = True
            else:
                names = {path.rpartition(".")[2].partition("[")[0], *([name] if isinstance(name, str) else [])}
                counts = any(is_read(one, self.ran) for one in names)
            if counts:
                yield path.removeprefix("the model."), (id(subject), name)


class StateAtCalls:
    """Watches the calls of a model's layers in one run of its forward. `check` is called when the forward has ended."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._last: dict[int, _Called] = {}
        self._reads: dict[type, set[str] | None] = {}
        self._by_layers: set[_Place] = set()
        self._found: dict[_Place, tuple[str, str]] = {}

    @contextmanager
    def call(self, name: str, block: nn.Module) -> Iterator[None]:
        """Around a call of a layer."""
        with _unobserved():
            before = self._follow(block)
            if id(block) in self._last:
                self._note(self._last[id(block)])
        with recorded_reads(block) as reads, recorded_code() as ran:
            yield
        with _unobserved():
            self._by_layers.update((id(subject), changed) for subject, changed in before.changes())
            for kind, names in reads_by_class(block, reads).items():
                known = self._reads.setdefault(kind, set())
                self._reads[kind] = None if names is None or known is None else known | names
            self._last[id(block)] = _Called(name, block, reads, ran, self._follow(block))

    def check(self) -> None:
        """Raise ChangesBetweenCalls for what was changed for some of the calls alone."""
        with _unobserved():
            for called in self._last.values():
                self._note(called)
        for place, (path, name) in self._found.items():
            if place not in self._by_layers:
                raise ChangesBetweenCalls(
                    f"the forward of {self._model} changes {path!r} after a call of layer {name!r}, which reads it. A "
                    "layer is compiled with what it reads as it is when the forward has ended, so that call would "
                    "compute something else than in plain PyTorch. Give it to the layer as an argument, set it before "
                    "the first layer is called and leave it so, or make two forwards of it, with the change between "
                    "them."
                )

    def _note(self, called: _Called) -> None:
        for path, place in called.changed():
            self._found.setdefault(place, (f"{called.name}.{path}" if _is_own(place, called) else path, called.name))

    def _follow(self, block: nn.Module) -> CodeGuards:
        """Guards over what a layer may read: of classes that were not called yet, all attributes."""
        reads = {type(part): self._reads.get(type(part)) for part in block.modules()}
        stand_ins = [vars(block).get("forward"), *(getattr(nn.Module, name) for name in _REPLACED)]
        return follow(block, reads, apart=stand_ins)


def _is_own(place: _Place, called: _Called) -> bool:
    return any(place[0] == id(vars(part)) for part in called.block.modules())


@contextmanager
def _unobserved() -> Iterator[None]:
    """While open, the trace that runs sees nothing of what is done here."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        with modes_off(), reads_unrecorded(), torch.no_grad():
            yield
    finally:
        sys.settrace(tracer)
