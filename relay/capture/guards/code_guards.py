"""Whether anything that a capture read has changed since: a flat list of guards, checked before every step.

A captured program stands for the Python code that was traced, with every attribute, function, closure cell, global and
container that the code looked at. `relay.capture.guards.code_walk` finds these and puts them in here; this module
compares them. It captures nothing and knows no model.

Most guards hold by identity. They are compared in a few passes over long lists, inside the interpreter's own loops,
since a step of a small model takes milliseconds. Only where an identity differs are values compared: a number that
was assigned again with the same value is no change. Guards hold references to all that they compare, so no identity
is ever that of another, later object. Invariant: `changed()` is empty only if all that was put in is as it was.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from types import CellType, FunctionType, MappingProxyType
from typing import Any

import torch

EXACT_BYTES = 1 << 20
"""Up to this size a tensor is compared by content; beyond it by version and address, which writes through `.data` or
through a numpy array on the same memory do not change."""


class _Absent:
    """Stands for a name that is not there."""


ABSENT = _Absent()

_PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range, enum.Enum)

Change = tuple[Any, Hashable]
"""A guard that does not hold: the object that it looks at, and the name in it (None where the object is all)."""


def same(first: Any, second: Any) -> bool:
    """Whether two values are one, or immutable and equal to the last bit."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, (float, complex)):
        return repr(first) == repr(second)
    if isinstance(first, (tuple, frozenset)) and type(first) in (tuple, frozenset):
        if len(first) != len(second):
            return False
        return first == second if type(first) is frozenset else all(map(same, first, second))
    return isinstance(first, _PLAIN) and bool(first == second)


@dataclass(eq=False)
class _Table:
    """The entries of a dict that count (all where `names` is None), as they were."""

    path: str
    owner: Any
    entries: dict[Any, Any]
    names: frozenset[Any] | None
    expected: dict[Any, Any]
    presence_alone: bool

    def changes(self) -> Iterable[tuple[str, Change]]:
        names = self.names if self.names is not None else self.expected.keys() | dict.keys(self.entries)
        keys = _keys(self.entries)
        if self.names is None and keys != list(self.expected) and len(keys) == len(names):
            yield f"the order of {self.path}", (self.entries, None)
        for name in names:
            before, now = self.expected.get(name, ABSENT), dict.get(self.entries, name, ABSENT)
            if self.presence_alone:
                held = (before is ABSENT, before is None) == (now is ABSENT, now is None)
            else:
                held = same(before, now)
            if not held:
                yield self.path_of(name), (self.entries, name)

    def path_of(self, name: Any) -> str:
        return f"{self.path}.{name}" if self.owner is not None else f"{self.path}[{name!r}]"


@dataclass(eq=False)
class _Parts:
    """What `read` gives of an object, as it was: parts compared one by one."""

    path: str
    subject: Any
    read: Callable[[], Sequence[Any]]
    expected: Sequence[Any]

    def changed(self) -> bool:
        now = self.read()
        return len(now) != len(self.expected) or not all(map(same, self.expected, now))


class CodeGuards:
    """Guards over dicts, lists, functions, closure cells, single names, tensors and whatever else code may read."""

    def __init__(self) -> None:
        self._tables: list[_Table] = []
        self._empty: list[tuple[str, dict[Any, Any]]] = []
        self._lists: list[tuple[str, list[Any], list[Any]]] = []
        self._names: list[tuple[str, Mapping[str, Any], str, Any]] = []
        self._functions: list[tuple[str, FunctionType, tuple[Any, ...]]] = []
        self._cells: list[tuple[str, CellType, Any]] = []
        self._variables: dict[int, str] = {}
        self._types: list[tuple[str, Any, type]] = []
        self._tensors: list[tuple[str, torch.Tensor, tuple[Any, ...]]] = []
        self._parameters: list[tuple[str, torch.Tensor, tuple[Any, ...]]] = []
        self._parts: list[_Parts] = []
        self._passes: list[Callable[[], bool]] | None = None

    # -- what is put in ---------------------------------------------------------------------------------------

    def add_table(
        self,
        path: str,
        entries: dict[Any, Any],
        owner: Any = None,
        names: Iterable[Any] | None = None,
        presence_alone: bool = False,
    ) -> None:
        """A dict, or the `__dict__` of `owner`. Of its entries those in `names` count; with `presence_alone` only
        which names are there, and which of them are None."""
        chosen = None if names is None else frozenset(names)
        held = {name: dict.get(entries, name) for name in _keys(entries)}
        expected = held if chosen is None else {name: held[name] for name in chosen if name in held}
        self._tables.append(_Table(path, owner, entries, chosen, expected, presence_alone))

    def add_empty(self, path: str, entries: dict[Any, Any]) -> None:
        """A dict that is empty, as those for hooks mostly are."""
        self._empty.append((path, entries))

    def add_list(self, path: str, items: list[Any]) -> None:
        """A list, item by item."""
        self._lists.append((path, items, list(items)))

    def add_name(self, path: str, names: Mapping[str, Any], name: str) -> None:
        """One name of a class, of a module or of a function's globals, whether it is there or not."""
        self._names.append((path, names, name, names.get(name, ABSENT)))

    def add_function(self, path: str, function: FunctionType) -> None:
        """A function's code and defaults, which may be assigned to."""
        self._functions.append((path, function, _FUNCTION(function)))

    def add_cell(self, path: str, cell: CellType, variable: str = "") -> None:
        """What a closure's variable holds."""
        self._variables[id(cell)] = variable
        self._cells.append((path, cell, _content(cell)))

    def add_type(self, path: str, subject: Any) -> None:
        """The class of an object, which may be assigned to."""
        self._types.append((path, subject, type(subject)))

    def add_tensor(self, path: str, tensor: torch.Tensor) -> None:
        """The numbers of a tensor that is neither a parameter nor a buffer of the model."""
        self._tensors.append((path, tensor, _TENSOR(tensor) if not tensor.is_inference() else ()))
        if _is_small(tensor):
            content = _bits(tensor).clone()
            self._parts.append(_Parts(path, tensor, lambda: (torch.equal(_bits(tensor), content),), (True,)))

    def add_parameter(self, path: str, parameter: torch.Tensor) -> None:
        """Whether a parameter requires a gradient, and its hooks. Its numbers are read by every step anew."""
        self._parameters.append((path, parameter, _PARAMETER(parameter)))

    def add_parts(self, path: str, subject: Any, read: Callable[[], Sequence[Any]]) -> None:
        """Anything else: what `read` gives, part by part."""
        self._parts.append(_Parts(path, subject, read, read()))

    def __len__(self) -> int:
        rest = self._empty, self._lists, self._names, self._functions, self._cells, self._types, self._tensors
        sizes = [len(one) for one in (*(table.expected for table in self._tables), *rest)]
        return sum(sizes) + len(self._parameters) + len(self._parts)

    def places(self) -> Iterator[tuple[str, Any, Hashable, Any]]:
        """All places that are looked at: path, container, the name in it (None: it as a whole), what was there."""
        for table in self._tables:
            held = table.expected.get
            yield from [(table.path_of(name), table.entries, name, held(name, ABSENT)) for name in [*table.entries]]
        yield from ((path, items, None, before) for path, items, before in self._lists)
        yield from ((path, cell, None, before) for path, cell, before in self._cells)
        yield from self._names
        yield from ((part.path, part.subject, None, ABSENT) for part in self._parts)

    # -- whether it holds -------------------------------------------------------------------------------------

    def changed(self) -> str:
        """What has changed, by its path from the model; empty where all is as it was."""
        try:
            if self._passes is not None and all(one() for one in self._passes):
                return ""
        except (ValueError, RuntimeError, AttributeError, TypeError, KeyError):
            pass  # a cell that is empty now, a dict that another thread writes to: looked at one by one
        for path, _ in self.named_changes():
            return path
        # Equal values under other identities: those are the ones to expect from now on.
        self._refresh()
        self._passes = self._compile()
        return ""

    def changes(self) -> list[Change]:
        """All guards that do not hold."""
        return [change for _, change in self.named_changes()]

    def counted(self) -> dict[tuple[int, Hashable], tuple[str, str, Any]]:
        """The plain numbers that are others now: by guard, the path, the name in code, and the number now."""
        found: dict[tuple[int, Hashable], tuple[str, str, Any]] = {}
        for table in self._tables:
            for name, before in table.expected.items():
                now = dict.get(table.entries, name, ABSENT)
                if _is_number(before) and _is_number(now) and not same(before, now) and isinstance(name, str):
                    found[id(table.entries), name] = table.path_of(name), name, now
        for path, names, name, before in self._names:
            now = names.get(name, ABSENT)
            if _is_number(before) and _is_number(now) and not same(before, now):
                found[id(names), name] = path, name, now
        for path, cell, before in self._cells:
            now = _content(cell)
            if _is_number(before) and _is_number(now) and not same(before, now):
                found[id(cell), None] = path, self._variables.get(id(cell), ""), now
        for path, items, before in self._lists:
            for index, (one, now) in enumerate(zip(before, items, strict=False)):
                if _is_number(one) and _is_number(now) and not same(one, now):
                    found[id(items), index] = f"{path}[{index}]", path.rpartition(".")[2], now
        return found

    def without(self, changes: Iterable[Change]) -> None:
        """Let go of these guards: what they look at is changed by the code that is captured itself."""
        dropped = {(id(subject), name) for subject, name in changes}
        for table in self._tables:
            own = {name for identity, name in dropped if identity == id(table.entries)}
            if own:
                names = table.names if table.names is not None else frozenset(table.expected)
                table.names = names - own
                table.expected = {name: value for name, value in table.expected.items() if name not in own}
        self._empty = [one for one in self._empty if (id(one[1]), None) not in dropped]
        self._lists = [one for one in self._lists if (id(one[1]), None) not in dropped]
        self._names = [one for one in self._names if (id(one[1]), one[2]) not in dropped]
        self._cells = [one for one in self._cells if (id(one[1]), None) not in dropped]
        self._tensors = [one for one in self._tensors if (id(one[1]), None) not in dropped]
        self._functions = [one for one in self._functions if (id(one[1]), None) not in dropped]
        self._parts = [one for one in self._parts if (id(one.subject), None) not in dropped]
        self._passes = None

    def named_changes(self) -> Iterable[tuple[str, Change]]:
        """All guards that do not hold, each with its path."""
        for table in self._tables:
            if table.owner is not None and vars(table.owner) is not table.entries:
                yield table.path, (table.owner, "__dict__")
            elif not _as_before(table):
                yield from table.changes()
        for path, entries in self._empty:
            if entries:
                yield path, (entries, None)
        before: Any
        for path, items, before in self._lists:
            if len(items) != len(before) or not all(map(same, items, before)):
                yield path, (items, None)
        for path, names, name, before in self._names:
            if not same(names.get(name, ABSENT), before):
                yield path, (names, name)
        for path, function, before in self._functions:
            if not all(map(same, _FUNCTION(function), before)):
                yield path, (function, None)
        for path, cell, before in self._cells:
            if not same(_content(cell), before):
                yield path, (cell, None)
        for path, subject, before in self._types:
            if type(subject) is not before:
                yield f"{path}.__class__", (subject, "__class__")
        for path, tensor, before in self._tensors:
            if before and _TENSOR(tensor) != before:
                yield path, (tensor, None)
        for path, parameter, before in self._parameters:
            for name, one, now in zip(_PARAMETER_FIELDS, before, _PARAMETER(parameter), strict=True):
                if (one or None) is not (now or None):
                    yield f"{path}.{name}", (parameter, name)
        for part in self._parts:
            if part.changed():
                yield part.path, (part.subject, None)

    def _refresh(self) -> None:
        """Expect the objects that are there now, which are equal to those that were."""
        for table in self._tables:
            for name in table.expected:
                table.expected[name] = dict.get(table.entries, name, ABSENT)
        self._lists = [(path, items, list(items)) for path, items, _ in self._lists]
        self._names = [(path, names, name, names.get(name, ABSENT)) for path, names, name, _ in self._names]
        self._functions = [(path, function, _FUNCTION(function)) for path, function, _ in self._functions]
        self._cells = [(path, cell, _content(cell)) for path, cell, _ in self._cells]

    def _compile(self) -> list[Callable[[], bool]]:
        """The passes, each of which goes over many guards without running Python code for any one of them.

        Of tables of which names were chosen those are picked, and the names that were not there must not be there. The
        others are compared whole, where only presence counts too: if a value differs all are looked at one by one.
        """
        picked = [table for table in self._tables if len(table.expected) > 1 and table.names is not None]
        pick = [itemgetter(*table.expected) for table in picked]
        picked_from = [table.entries for table in picked]
        picks = [*chain.from_iterable(table.expected.values() for table in picked)]
        missing = [(table.entries, name) for table in picked for name in (table.names or ()) - table.expected.keys()]
        missing_in, missing_names = [one for one, _ in missing], [name for _, name in missing]
        chosen = {id(table) for table in picked}
        tables = [table.entries for table in self._tables if id(table) not in chosen]
        keys, values = [*chain.from_iterable(map(dict.keys, tables))], [*chain.from_iterable(map(dict.values, tables))]
        ordered = [entries for entries in tables if isinstance(entries, OrderedDict)]
        order = [*chain.from_iterable(map(OrderedDict.__iter__, ordered))]
        lists = [items for _, items, _ in self._lists]
        items = [*chain.from_iterable(before for _, _, before in self._lists)]
        sizes = [*map(dict.__len__, tables)], [len(before) for _, _, before in self._lists]
        owners = [table.owner for table in self._tables if table.owner is not None]
        owned = [table.entries for table in self._tables if table.owner is not None]
        in_dicts = [one for one in self._names if isinstance(one[1], dict)]
        in_classes = [one for one in self._names if not isinstance(one[1], dict)]
        functions = [function for _, function, _ in self._functions]
        codes = [*chain.from_iterable(before for _, _, before in self._functions)]
        cells, contents = [cell for _, cell, _ in self._cells], [content for _, _, content in self._cells]
        filled = [place for place, content in enumerate(contents) if content is not ABSENT]
        cells, contents = [cells[place] for place in filled], [contents[place] for place in filled]
        subjects, types = [one for _, one, _ in self._types], [kind for _, _, kind in self._types]
        tensors = [tensor for _, tensor, before in self._tensors if before]
        versions = [before for _, _, before in self._tensors if before]
        parameters = [parameter for _, parameter, _ in self._parameters]
        flags = [*chain.from_iterable(map(_PARAMETER, parameters))]
        parts, empty = list(self._parts), [entries for _, entries in self._empty]

        def names_pass(look_up: Any, group: Sequence[tuple[str, Any, str, Any]]) -> Callable[[], bool]:
            holders, names = [one[1] for one in group], [one[2] for one in group]
            before = [one[3] for one in group]
            return lambda: all(map(is_, map(look_up, holders, names, repeat(ABSENT)), before))

        return [
            lambda: not any(empty),
            lambda: all(map(is_, chain.from_iterable(map(itemgetter.__call__, pick, picked_from)), picks)),
            lambda: not any(map(dict.__contains__, missing_in, missing_names)),
            lambda: [*map(dict.__len__, tables)] == sizes[0] and [*map(list.__len__, lists)] == sizes[1],
            lambda: all(map(is_, chain.from_iterable(map(dict.values, tables)), values)),
            lambda: all(map(is_, chain.from_iterable(map(dict.keys, tables)), keys)),
            lambda: all(map(is_, chain.from_iterable(map(OrderedDict.__iter__, ordered)), order)),
            lambda: all(map(is_, chain.from_iterable(lists), items)),
            lambda: all(map(is_, map(_DICT, owners), owned)),
            names_pass(dict.get, in_dicts),
            names_pass(MappingProxyType.get, in_classes),
            lambda: all(map(is_, chain.from_iterable(map(_FUNCTION, functions)), codes)),
            lambda: all(map(is_, map(_CONTENT, cells), contents)),
            lambda: all(map(is_, map(type, subjects), types)),
            lambda: [*map(_TENSOR, tensors)] == versions,
            lambda: all(map(is_, chain.from_iterable(map(_PARAMETER, parameters)), flags)),
            lambda: not any(part.changed() for part in parts),
        ]


_PARAMETER_FIELDS = ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_PARAMETER = attrgetter(*_PARAMETER_FIELDS)
_TENSOR = attrgetter("_version", "requires_grad", "shape", "dtype")
_FUNCTION = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_CONTENT = attrgetter("cell_contents")
_DICT = attrgetter("__dict__")


def _as_before(table: _Table) -> bool:
    """Whether all entries of a table are there, in their order and by identity: the quick answer for most."""
    keys, expected = _keys(table.entries), table.expected
    return len(keys) == len(expected) and all(
        map(is_, chain(keys, map(dict.get, repeat(table.entries), keys)), chain(expected, expected.values()))
    )


def _keys(entries: dict[Any, Any]) -> list[Any]:
    """The keys in their order, whatever a subclass makes of its methods; an OrderedDict keeps an order of its own."""
    return [*(OrderedDict.__iter__(entries) if isinstance(entries, OrderedDict) else dict.__iter__(entries))]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float, complex)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that was deleted, or is not there yet
        return ABSENT


def _is_small(tensor: torch.Tensor) -> bool:
    ordinary = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    ordinary = ordinary and not tensor.is_meta and not tensor.is_quantized
    return ordinary and tensor.numel() * tensor.element_size() <= EXACT_BYTES


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as bytes, in which NaNs and zeros of either sign are what they are."""
    with torch.no_grad():
        return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
