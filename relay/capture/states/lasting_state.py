"""State that a forward keeps in lists, dicts, sets, objects, arrays, iterators, closures and global containers.

A program holds what its trace found there, and a recompute finds what the forward left. What every call changes and
computes with is therefore refused by name. Whether it computes with it is found by a second call: it computes the same
unless it reads what the first one changed. What is written and never read (a list of losses for inspection), reset at
the start of each call, or made once and kept (a cache) does no harm. Plain numbers of modules and tensors in their
attributes have rules of their own. Invariant: what code left is as it was after `with_numbers`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FunctionType, GeneratorType
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from relay.capture.guards.attribute_reads import reads_unrecorded
from relay.capture.guards.plain_tensors import KeepsState
from relay.capture.states.escaped_values import of_trace
from relay.graph.mutations import memory_roots, written_by

_CONTAINERS = (list, dict, set, deque)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NUMBERS = (bool, int, float, complex, str)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_LIBRARIES = ("torch", "transformers.configuration", "relay", "builtins", "functools", "typing", "logging")

DEEPEST = 3
"""Containers and objects within others are looked at so many times."""

LARGEST = 1000
"""Of longer containers the length alone is compared, and larger arrays are not."""


@dataclass(eq=False)
class _Held:
    """Something that can be changed: its path, its state as it was, and how to look at that again."""

    path: str
    subject: Any
    state: Any
    look: Callable[[], Any]


class LastingStates:
    """What modules hold in containers and objects of their attributes, and their functions and hooks in closures."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._held: dict[int, _Held] = {}
        self._modules = list(modules)
        with reads_unrecorded():  # a trace may be recording what the module's code reads
            for path, module in self._modules:
                for name, value in list(vars(module).items()):
                    if name not in _OF_EVERY_MODULE:
                        self._attribute(value, f"{path}.{name}".lstrip("."))
                for function, what in _functions(module):
                    self._closure(function, f"{what} of {path or 'the model'}" if what else function.__qualname__)

    def changed(self) -> list[str]:
        """The paths of what is otherwise now."""
        with reads_unrecorded():
            return [held.path for held in self._held.values() if not _same(held.state, held.look())]

    def drawn_from(self) -> list[str]:
        """The paths of generators of random numbers that have been drawn from."""
        with reads_unrecorded():
            held = [held for held in self._held.values() if isinstance(held.subject, _GENERATORS)]
            return [one.path for one in held if not _same(one.state, one.look())]

    def changes(self) -> list[tuple[int, str, frozenset[str]]]:
        """What is otherwise now: its identity, its path, and the names by which code reaches what has changed."""
        with reads_unrecorded():
            found = [(held, held.look()) for held in self._held.values()]
        return [
            (id(held.subject), held.path, _names_of(held, now)) for held, now in found if not _same(held.state, now)
        ]

    @property
    def identities(self) -> set[int]:
        """All objects that were found."""
        return set(self._held)

    def now(self) -> LastingStates:
        """The same modules' states now."""
        return LastingStates(self._modules)

    def holding_fakes(self) -> list[str]:
        """The paths of what holds tensors of a trace."""
        with reads_unrecorded():
            parts = ((held.path, _parts(held.subject)) for held in self._held.values())
            return [path for path, found in parts if any(of_trace(part) for _, part in found)]

    @contextmanager
    def with_numbers(self) -> Iterator[None]:
        """While open, zeros stand for the tensors that a trace left in containers and objects."""
        replaced: list[tuple[Any, Any, Any]] = []
        with reads_unrecorded():
            for held in self._held.values():
                parts = _parts(held.subject)
                replaced += [(_table(held.subject), key, part) for key, part in parts if of_trace(part)]
        for table, key, part in replaced:
            table[key] = torch.zeros(tuple(part.shape), dtype=part.dtype)
        try:
            yield
        finally:
            for table, key, part in replaced:
                with suppress(LookupError):  # the code may have removed it
                    table[key] = part

    # -- what is looked at ------------------------------------------------------------------------------------

    def _attribute(self, value: Any, path: str) -> None:
        if isinstance(value, FunctionType):
            self._closure(value, value.__qualname__)
        elif type(value) is torch.Tensor or not isinstance(value, (torch.Tensor, nn.Module)):
            self._look(value, path, 0, counted=type(value) in (list, dict))

    def _closure(self, function: FunctionType, what: str) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            with suppress(ValueError):  # it is empty yet
                self._look(cell.cell_contents, f"{name} (in the closure of {what})", 0)
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if type(value) in _CONTAINERS or isinstance(value, _GENERATORS):
                self._look(value, f"{name} (a global of {function.__module__})", 0)

    def _look(self, value: Any, path: str, depth: int, counted: bool = False) -> None:
        """Note an object and what it holds. Plain numbers in a `counted` container are counters."""
        if depth > DEEPEST or type(value) in _PLAIN or isinstance(value, (type, FunctionType)):
            return
        if id(value) in self._held or (look := _how_to_look(value, counted)) is None:
            return
        self._held[id(value)] = _Held(path, value, look(), look)
        for key, part in _parts(value)[:LARGEST]:
            self._look(part, f"{path}.{key}" if _is_object(value) else f"{path}[{key!r}]", depth + 1)


def _names_of(held: _Held, now: Any) -> frozenset[str]:
    """The names of what has changed: an object's attributes, or the name of what holds a container."""
    if _is_object(held.subject):
        before, after = dict(held.state), dict(now)
        return frozenset(name for name in {*before, *after} if not _same(before.get(name), after.get(name)))
    return frozenset({held.path.split(" ")[0].rpartition(".")[2].partition("[")[0]})


def _how_to_look(value: Any, counted: bool) -> Callable[[], Any] | None:
    """What gives the state of an object, as it is compared; None for what cannot be changed or is a library's."""
    if isinstance(value, _CONTAINERS):
        if len(value) > LARGEST:
            return lambda: len(value)
        if isinstance(value, dict):
            return lambda: tuple((_part(key), _part(part, counted)) for key, part in value.items())
        return lambda: tuple(_part(part, counted) for part in value)
    if isinstance(value, torch.Tensor):
        known = type(value) is torch.Tensor and not value.is_inference()
        return (lambda: value._version) if known else None
    if isinstance(value, np.ndarray):
        return value.tobytes if value.size <= LARGEST and value.dtype != object else None
    if isinstance(value, random.Random):
        return lambda: repr(value.getstate())
    if isinstance(value, np.random.Generator):
        return lambda: repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return lambda: repr(value.get_state())
    if isinstance(value, Iterator):
        return lambda: _position(value)
    if _is_object(value):
        return lambda: tuple((name, _part(part)) for name, part in vars(value).items())
    return None


def _is_object(value: Any) -> bool:
    """Whether it is an object of a user's class."""
    known = isinstance(value, (nn.Module, torch.Tensor, FunctionType, type, Iterator, *_CONTAINERS, *_GENERATORS))
    library = type(value).__module__.startswith(_OF_LIBRARIES)
    return not known and not library and type(getattr(value, "__dict__", None)) is dict


def _position(iterator: Any) -> str:
    if isinstance(iterator, GeneratorType):
        frame = iterator.gi_frame
        return "ended" if frame is None else f"{frame.f_lasti} {[_part(one) for one in frame.f_locals.values()]!r}"
    hint = getattr(iterator, "__length_hint__", None)
    return repr(iterator) if hint is None else str(hint())


def _table(value: Any) -> Any:
    return vars(value) if _is_object(value) else value


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """What a container or an object holds, by key, index or name."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, deque)):
        return list(enumerate(value))
    return list(vars(value).items()) if _is_object(value) else []


def _part(value: Any, counted: bool = False) -> Any:
    """A part as it is compared: plain values by what they are, others by identity."""
    if type(value) in _PLAIN:
        return "" if counted and type(value) in _NUMBERS else f"{type(value).__name__} {value!r}"
    return value


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return first is second or (isinstance(first, (str, int, bytes)) and type(first) is type(second) and first == second)


def _functions(module: nn.Module) -> Iterator[tuple[FunctionType, str]]:
    """The functions that a call of a module runs; for hooks with what they are."""
    forwards = [(vars(module).get("forward"), ""), (getattr(type(module), "forward", None), "")]
    hooks = [(hook, "a hook") for name in _HOOKS for hook in vars(module).get(name, {}).values()]
    for function, what in (*forwards, *hooks):
        plain = getattr(function, "__func__", function)
        if isinstance(plain, FunctionType) and not (plain.__module__ or "torch").startswith(_OF_LIBRARIES):
            yield plain, what


# -- whether a second call computes the same ----------------------------------------------------------------------


def refuse_if_read(
    what: str, first: LastingStates, traced: fx.GraphModule, again: Callable[[], fx.GraphModule], layer: str = ""
) -> None:
    """Raise KeepsState if a trace changed what it began with (`first`), and one more changes it and differs.

    `traced` is that trace, and `again` makes one more.
    """
    if not first.changed():
        return
    if drawn := first.drawn_from():
        raise draws_from(what, drawn, layer)
    states = first.now()
    with states.with_numbers():
        began = states.now()
        try:
            same = same_graph(traced, again())
        except Exception:  # what the first left there may be of no use to it
            same = False
        if not same and (kept := began.changed()):
            raise keeps_state(what, kept, layer)


def same_graph(first: fx.GraphModule, second: fx.GraphModule) -> bool:
    """Whether two traces compute the same, by their code and their constants."""
    if first.code != second.code:
        return False
    for one, other in zip(first.graph.nodes, second.graph.nodes, strict=True):
        if one.op == "get_attr":
            ours, theirs = getattr(first, str(one.target), None), getattr(second, str(other.target), None)
            if ours is not theirs and not (
                isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor) and _equal(ours, theirs)
            ):
                return False
    return True


def written_constants(traced: fx.GraphModule) -> list[str]:
    """The constants of a trace that its ops both write to and read: tensors that no table of the model holds."""
    roots = memory_roots(traced.graph)
    constants: dict[str, list[fx.Node]] = {}
    for node, root in roots.items():
        if root.op == "get_attr":
            constants.setdefault(str(root.target), []).append(node)
    written = {str(roots[node].target) for node in map(written_by, traced.graph.nodes) if node in roots}
    found = []
    for name, shared in constants.items():
        read = any(user not in shared for node in shared for user in node.users)
        if name in written and read:
            found.append(f"a tensor of shape {tuple(getattr(traced, name).shape)}")
    return found


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype or first.is_meta or second.is_meta:
        return False
    return type(first) is type(second) and torch.equal(first, second)


def draws_from(what: str, paths: Sequence[str], layer: str = "") -> KeepsState:
    """The error for code (`what`) that draws from generators which it holds."""
    return KeepsState(
        f"{what} draws random numbers from {paths[0]!r}, a generator of Python's or numpy's that it holds. A program "
        "would keep the numbers of its trace, and a recompute would draw others than its forward. Draw them by torch "
        "(torch.rand, dropout) or, in a layer, by the functions of the modules random and numpy.random.",
        layer=layer,
    )


def keeps_state(what: str, paths: Sequence[str], layer: str = "") -> KeepsState:
    """The error for code (`what`) that changes these, and reads them at its next call."""
    paths = [path.removeprefix("module.").removeprefix("block.") for path in paths]
    more = f" (or in {', '.join(paths[1:3])})" if len(paths) > 1 else ""
    return KeepsState(
        f"{what} keeps a state from one call to the next in {paths[0]!r}{more}, which is no buffer: its forward "
        "changes it and computes with it. A program would hold what it was when it was made, and a recompute would "
        "find what the forward left. Keep it in a buffer (register_buffer), or give it as part of the batch.",
        layer=layer,
    )
