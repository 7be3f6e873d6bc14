"""Numbers, flags and texts that a forward changes at every call (`self.calls += 1`), and whether it computes with them.

A program would keep the number of its trace. A number that only counts does no harm. One that is read in any other way
than to count on is a state of the layer: the layer then runs eagerly, where Python changes it. Whether a number is
read is decided by the source of the functions that ran. A number that is set to the same value again (the longest
length so far) is none of these. Invariant: nothing is changed here.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import itertools
import sysconfig
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn

from relay.capture.guards.attribute_reads import reads_unrecorded
from relay.errors import PartitionError

_NUMBERS = (int, float, complex, bool, str)
_WRITING = frozenset({"append", "extend", "add", "clear", "appendleft", "update"})
"""Methods of containers that read nothing, where their result is not used."""
_MISSING: Any = object()
"""The number of an attribute that is not there yet: a forward makes it at its first call, or a class has it."""
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_RELAY = Path(__file__).parents[2]
_LIBRARIES = (
    str(Path(torch.__file__).parent),
    sysconfig.get_path("stdlib"),
    *(str(_RELAY / folder) for folder in ("capture", "data", "graph", "partition", "runtime")),
)
"""Where no code of a model is, though it may use names that a model uses."""


@dataclass(frozen=True, eq=False)
class Counter:
    """A number of a module that its forward changes: an attribute, or an entry (`key`) of a list or dict in one."""

    module: nn.Module
    path: str
    name: str
    key: Any = None

    @property
    def label(self) -> str:
        """Its path from the layer, for messages."""
        entry = "" if self.key is None else f"[{self.key!r}]"
        return f"{self.path}.{self.name}".lstrip(".") + entry

    @property
    def change(self) -> tuple[Any, Any]:
        """The guard that does not hold when the number changes, as `relay.capture.guards.code_guards` names it."""
        if self.key is None:
            return vars(self.module), self.name
        entries = vars(self.module)[self.name]
        return entries, None if isinstance(entries, list) else self.key


Numbers = dict[tuple[int, str, Any], tuple[Counter, Any]]


def numbers_of(module: nn.Module) -> Numbers:
    """All plain numbers in the attributes of a module and its parts, and in lists and dicts there."""
    found: Numbers = {}
    with reads_unrecorded():  # a trace may be recording what the module's code reads
        for path, part in module.named_modules():
            for name, value in vars(part).items():
                if type(value) in _NUMBERS:
                    found[id(part), name, None] = Counter(part, path, name), value
                elif type(value) in (list, dict) and name not in _OF_EVERY_MODULE:
                    entries = enumerate(value) if isinstance(value, list) else value.items()
                    for key, entry in entries:
                        if type(entry) in _NUMBERS:
                            found[id(part), name, key] = Counter(part, path, name, key), entry
    return found


def changed(before: Numbers, after: Numbers, ran: Collection[CodeType] = ()) -> list[Counter]:
    """The numbers that are there in both and differ, and new ones that the functions `ran` count on."""
    return [
        counter
        for place, (counter, value) in after.items()
        if (repr(before[place][1]) != repr(value) if place in before else _is_counted_on(counter.name, ran))
    ]


def computed_with(counters: Collection[Counter], ran: Collection[CodeType]) -> list[Counter]:
    """Those of the counters that the functions `ran` read for more than to count on."""
    return [counter for counter in counters if is_read(counter.name, ran)]


def refuse_counters(
    first: Mapping[Any, tuple[str, str, Any]], second: Mapping[Any, tuple[str, str, Any]], ran: Collection[CodeType]
) -> None:
    """Raise PartitionError for a number outside of modules that forwards change and compute with.

    `first` and `second` are what has changed after a capture, and after one more: by place its path, its name in code
    and the number.
    """
    for place, (path, name, number) in second.items():
        if (place not in first or first[place][2] != number) and is_read(name, ran):
            raise PartitionError(
                f"every forward changes the number {path} and computes with it, so a compiled program would keep the "
                "one that it was made with. Keep it in a buffer (register_buffer), in an attribute of the layer that "
                "counts, or give it as part of the batch."
            )


@functools.lru_cache(maxsize=10_000)
def writes_outside(code: CodeType) -> bool:
    """Whether a function writes to a global, or to a variable of a function around it."""
    if code.co_filename.startswith(_LIBRARIES):
        return False
    written = ((one.opname, one.argval) for one in dis.get_instructions(code))
    return any(op == "STORE_GLOBAL" or (op == "STORE_DEREF" and name in code.co_freevars) for op, name in written)


def is_read(name: str, ran: Collection[CodeType]) -> bool:
    """Whether code reads a name (an attribute, a global, a variable of a closure) for more than to count on."""
    mentioning = (code for code in ran if not code.co_filename.startswith(_LIBRARIES) and _mentions(code, name))
    return any(_reads(code, name) for code in mentioning)


def _is_counted_on(name: str, ran: Collection[CodeType]) -> bool:
    """Whether code adds to an attribute: `x.name += 1`, `x.name = x.name + 1`, `x.name = getattr(x, "name", 0) + 1`."""
    return any(not code.co_filename.startswith(_LIBRARIES) and _counts_on(code, name) for code in ran)


def _mentions(code: CodeType, name: str) -> bool:
    return name in code.co_names or name in code.co_freevars or name in code.co_consts


@functools.lru_cache(maxsize=1000)
def _reads(code: CodeType, name: str) -> bool:
    if code.co_name == "<lambda>":  # whose source is a part of a statement
        sets = "setattr" in code.co_names
        ran = [one for one in dis.get_instructions(code) if one.opname != "LOAD_CONST" or not sets]
        after = [next_one.argval for one, next_one in itertools.pairwise(ran) if one.argval == name]
        return not all(isinstance(called, str) and called in _WRITING for called in after)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return True  # without its source, it may
    counting: set[int] = set()
    for node in ast.walk(tree):
        for target, value in _counted(node):
            counting.update(id(inner) for inner in ast.walk(target))
            if isinstance(value, ast.BinOp) and isinstance(value.right, ast.Constant) and _same(value.left, target):
                counting.update(id(inner) for inner in ast.walk(value.left))
    return any(_is_load(node, name) for node in ast.walk(tree) if id(node) not in counting)


@functools.lru_cache(maxsize=1000)
def _counts_on(code: CodeType, name: str) -> bool:
    if not _mentions(code, name) or code.co_name == "<lambda>":
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError):
        return False
    for node in ast.walk(tree):
        for target, value in _counted(node):
            named = isinstance(target, ast.Attribute) and target.attr == name
            adds = isinstance(value, ast.BinOp) and _same(value.left, target)
            if named and (isinstance(node, ast.AugAssign) or adds):
                return True
    return False


def _counted(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """The assignments of a statement: `x += 1` and `x = x + 1`, and calls that only write: `x.append(...)`."""
    if isinstance(node, ast.AugAssign):
        return [(node.target, node.value)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        return [(node.args[1], node)] if len(node.args) == 3 else []
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        only_written = node.value.func.attr in _WRITING
        return [(node.value.func.value, node.value)] if only_written else []
    if isinstance(node, ast.Assign):
        return [(target, node.value) for target in node.targets if not isinstance(target, (ast.Tuple, ast.List))]
    return []


def _same(left: ast.AST, target: ast.AST) -> bool:
    """Whether two expressions are one, but for being read and written, or `getattr` with a number instead."""
    if isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and left.func.id == "getattr" and left.args:
        if not isinstance(target, ast.Attribute) or any(not isinstance(one, ast.Constant) for one in left.args[1:]):
            return False
        return _same(left.args[0], target.value) and ast.dump(left.args[1]) == ast.dump(ast.Constant(target.attr))
    return ast.dump(left).replace("Store()", "Load()") == ast.dump(target).replace("Store()", "Load()")


def _is_load(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == name and isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Constant) and node.value == name


class CountedStates:
    """The counters of a module that runs eagerly: a recompute begins with the numbers that its forward began with."""

    def __init__(self, counters: Collection[Counter]) -> None:
        self.counters = list(counters)
        self._began: dict[int, list[Any]] = {}

    def forward(self, microbatch: int) -> None:
        """Before a forward: note the numbers."""
        self._began[microbatch] = self.values()

    def recompute(self, microbatch: int, run: Callable[[], Any]) -> Any:
        """Run with the numbers of before the micro-batch's forward, and put back what they are now."""
        now = self.values()
        self.set(self._began.get(microbatch, now))
        try:
            return run()
        finally:
            self.set(now)

    def values(self) -> list[Any]:
        """The numbers, in the order of the counters."""
        return [
            vars(one.module).get(one.name, _MISSING) if one.key is None else getattr(one.module, one.name)[one.key]
            for one in self.counters
        ]

    def set(self, values: Collection[Any]) -> None:
        """Set the numbers."""
        for counter, value in zip(self.counters, values, strict=True):
            if value is _MISSING:
                vars(counter.module).pop(counter.name, None)
            elif counter.key is None:
                vars(counter.module)[counter.name] = value
            else:
                vars(counter.module)[counter.name][counter.key] = value
