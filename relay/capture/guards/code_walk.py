"""What code may read, found by following it: from a model's modules and other roots to guards over all of it.

Of a module, its hooks, its mode and the attributes that code was seen to read (`attribute_reads`) count. From there the
walk follows functions to their closures, their defaults and the globals that they name; methods, partials and
decorators to what they wrap; containers and objects to their contents; classes to the names that code mentions. Code
of PyTorch, numpy and the standard library is compared by identity and not followed.

What code reads in other ways is not found: files, environment variables, the clock, C extensions, names that are put
together at run time. The numbers of parameters and buffers do not count: they are inputs of a program.
"""

from __future__ import annotations

import collections
import functools
import logging
import sys
import types
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_globals

from relay.capture.guards.attribute_reads import Reads
from relay.capture.guards.code_guards import CodeGuards
from relay.capture.guards.executed_code import has_run
from relay.capture.guards.followed_code import (
    IMMUTABLE,
    is_a_modules_code,
    is_array,
    is_data,
    is_opaque,
    is_slot,
    mentioned_by,
)
from relay.capture.guards.held_tensors import is_held

logger = logging.getLogger(__name__)

LIMIT = 20_000
"""Objects that are followed at most, the nearest first; what is reached beyond them is taken for constant."""

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
"""The dicts of a module that hold its hooks."""

_GLOBAL_HOOKS = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_with_kwargs",
    "_global_forward_hooks_always_called", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip

_SPECIAL = frozenset(
    {"__init__", "__new__", "__call__", "__getattr__", "__getitem__", "__len__", "__iter__", "__bool__"}
)
_ALWAYS = frozenset({"training", "forward"})
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""What `nn.Module` itself keeps in an instance; hooks and tables are looked at on their own."""


def follow(
    model: nn.Module,
    reads: Mapping[type, Collection[str] | None],
    roots: Mapping[str, Any] | None = None,
    apart: Iterable[Any] = (),
) -> CodeGuards:
    """Guards over all that the code of `model` and of further `roots` (a loss, say) may read.

    `reads` are the names of attributes that code was seen to read, by the class of the module; None is all. What is
    `apart` is not followed.
    """
    walk = _Walk(model, reads, apart)
    for name, root in (roots or {}).items():
        walk.value(root, name)
    walk.run()
    return walk.guards


def reads_by_class(module: nn.Module, reads: Reads) -> dict[type, set[str] | None]:
    """What was read of the modules within one, by their class; None where all of one counts."""
    found: dict[type, set[str] | None] = {}
    for one in module.modules():
        names = reads.get(id(one), set())
        known = found.setdefault(type(one), set())
        found[type(one)] = None if names is None or known is None else known | names
    return found


class _Walk:
    """One walk, breadth first. Objects wait in `_waiting` with their paths, and whether they are reached from what the
    backward calls, of which it is not known whether it ran. `_names` are all that code that ran mentions.
    """

    def __init__(
        self, model: nn.Module, reads: Mapping[type, Collection[str] | None], apart: Iterable[Any] = ()
    ) -> None:
        self.guards = CodeGuards()
        self._reads = reads
        self._seen: dict[int, Any] = {id(one): one for one in apart}
        self._waiting: collections.deque[tuple[Any, str, bool]] = collections.deque()
        self._in_backward = False
        self._names: set[str] = {"__call__", "__getattr__", "__getitem__"}
        self._of_objects: dict[type, str] = {}
        self._looked_up: set[tuple[int, str]] = set()
        self._own_tensors = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self._tagged: list[tuple[str, torch.Tensor]] = []
        for name in _GLOBAL_HOOKS:
            self._table(f"torch.nn.modules.module.{name}", getattr(module_globals, name, {}))
        self.guards.add_parts("a setting of PyTorch", torch, _settings)
        for name, parameter in model.named_parameters():
            self.guards.add_parameter(name, parameter)
            for hooks in (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)):
                if hooks is not None:
                    self.guards.add_table(f"{name}._backward_hooks", hooks)
            self._tagged.append((name, parameter))
        for name, module in model.named_modules():
            self._seen[id(module)] = module
            self._module(module, name, own=True)

    def run(self) -> None:
        """Follow all that waits, and then the names of classes that code mentioned, until there is no more."""
        followed: dict[type, int] = {}
        while True:
            while self._waiting:
                value, path, self._in_backward = self._waiting.popleft()
                if len(self._seen) > LIMIT:
                    logger.debug("%s and what it reaches are taken for constant", path)
                    continue
                self._follow(value, path)
            pending = [kind for kind in self._of_objects if followed.get(kind) != len(self._names)]
            if not pending:
                break
            for kind in pending:
                followed[kind] = len(self._names)
                path, named = self._of_objects[kind], self._names
                if issubclass(kind, nn.Module):  # what else of it was read has been seen: only constants of the class
                    named = self._names & _names_of_data(kind)
                self._class_names(kind, path, named | _SPECIAL)
        for name, parameter in self._tagged:
            self.guards.add_table(name, vars(parameter), parameter, self._names & vars(parameter).keys() or None)

    def value(self, value: Any, path: str) -> None:
        """Follow an object later, once."""
        if not isinstance(value, IMMUTABLE) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._waiting.append((value, path, self._in_backward))

    def _follow(self, value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._own_tensors and not is_held(value):
                self.guards.add_tensor(path, value)
        elif isinstance(value, nn.Module):
            self._module(value, path, own=False)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.MethodType):
            self.value(value.__self__, path)
            self.value(value.__func__, path)
        elif isinstance(value, functools.partial):
            self.value(value.func, path)
            self.value(value.args, path)
            self._table(path, value.keywords)
        elif isinstance(value, (staticmethod, classmethod)):
            self.value(value.__func__, path)
        elif isinstance(value, property):
            self.value(value.fget, path)
        elif isinstance(value, functools.cached_property):
            self.value(value.func, path)
        elif isinstance(value, type):
            self._class(value, path, ())
        elif isinstance(value, types.ModuleType):
            pass  # by the names that code mentions, where it is met
        elif isinstance(value, dict):
            self._table(path, value)
            self._object(value, path)
        elif isinstance(value, list):
            self.guards.add_list(path, value)
            self._items(value, path)
            self._object(value, path)
        elif isinstance(value, (tuple, frozenset)):
            self._items(value, path)
        elif isinstance(value, (set, collections.deque)):
            self.guards.add_parts(path, value, functools.partial(tuple, value))
            self._items(value, path)
        elif is_array(value):
            self.guards.add_parts(path, value, lambda: (value.shape, str(value.dtype), value.tobytes()))
        else:
            wrapped = getattr(value, "__wrapped__", None)
            if isinstance(wrapped, (types.FunctionType, types.MethodType)):
                self.value(wrapped, path)
            self._object(value, path)

    # -- modules ----------------------------------------------------------------------------------------------

    def _module(self, module: nn.Module, path: str, own: bool) -> None:
        """A module of the model; or another one that code reaches, of which everything counts."""
        dot = f"{path}." if path else ""
        attributes, kind = vars(module), type(module)
        self.guards.add_type(path or "the model", module)
        if isinstance(module, torch.jit.ScriptModule):
            return  # holds no Python code, and is refused
        for name in HOOKS:
            if attributes.get(name):
                self._in_backward = "backward" in name
                self._table(f"{dot}{name}", attributes[name])
                self._in_backward = False
            else:
                self.guards.add_empty(f"{dot}{name}", attributes.get(name, {}))
        self.guards.add_table(f"{dot}_modules", attributes["_modules"])
        read = self._reads.get(kind, frozenset()) if own else None
        counting = set(attributes) if read is None else set(read)
        counting = (counting | _ALWAYS) - (_OF_EVERY_MODULE - _ALWAYS)
        self.guards.add_table(path or "the model", attributes, module, counting | set(HOOKS) | _TABLES)
        for name in counting & attributes.keys():
            self.value(attributes[name], f"{dot}{name}")
        for table in (module._parameters, module._buffers):
            self.guards.add_table(f"{dot}_parameters", table, presence_alone=True)
            if not own:
                for name, tensor in table.items():
                    self.value(tensor, f"{dot}{name}")
        for name, child in module._modules.items():
            self.value(child, f"{dot}{name}")
        self._class_names(kind, path, counting - attributes.keys() | {"forward", "__call__", "__getattr__"})
        self._of_objects[kind] = path

    # -- code -------------------------------------------------------------------------------------------------

    def _function(self, function: types.FunctionType, path: str) -> None:
        if not (has_run(function.__code__) or self._in_backward):
            return
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            where = f"{variable} (in the closure of {path})"
            self.guards.add_cell(where, cell, variable)
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            self._mentioned(content, where, mentioned_by(function.__code__))
        if is_opaque(function) and not is_a_modules_code(function):
            return
        self.guards.add_function(path, function)
        for default in function.__defaults__ or ():
            self.value(default, f"a default of {path}")
        if function.__kwdefaults__:
            self._table(f"a default of {path}", function.__kwdefaults__)
        if vars(function):
            self._table(path, vars(function))
        names = mentioned_by(function.__code__)
        if not is_opaque(function):
            self._names |= names
        known = function.__globals__
        builtin = vars(types)  # a dict to take the type from
        builtin = known.get("__builtins__", builtin)
        builtin = builtin if isinstance(builtin, dict) else vars(builtin)
        for name in names:
            if name in known:
                self._name(known, name, name, names)
            elif name in builtin:
                self.guards.add_name(name, known, name)  # a global of that name would come before it
                self._name(builtin, name, name, names)
            elif name in sys.modules:  # imported within the function
                self._names_of(sys.modules[name], name, names)

    def _name(self, names: Mapping[str, Any], name: str, path: str, mentioned: Collection[str]) -> None:
        """One name of a namespace, and what it stands for."""
        if (id(names), name) not in self._looked_up:
            self._looked_up.add((id(names), name))
            self._seen[id(names)] = names
            self.guards.add_name(path, names, name)
        value = names.get(name)
        self._mentioned(value, path, mentioned)

    def _mentioned(self, value: Any, path: str, mentioned: Collection[str]) -> None:
        """What a name stands for; of a module or class count the names that the code mentions."""
        if isinstance(value, types.ModuleType):
            self._names_of(value, path, mentioned)
        elif isinstance(value, type):
            self._class(value, path, mentioned)
        else:
            self.value(value, path)

    def _names_of(self, module: types.ModuleType, path: str, mentioned: Collection[str], depth: int = 0) -> None:
        names = vars(module)
        for name in mentioned:
            if name not in names or (id(names), name) in self._looked_up:
                continue
            if isinstance(names[name], types.ModuleType):
                self.guards.add_name(f"{path}.{name}", names, name)
                self._looked_up.add((id(names), name))
                if depth < 4:
                    self._names_of(names[name], f"{path}.{name}", mentioned, depth + 1)
            else:
                self._name(names, name, f"{path}.{name}", mentioned)

    # -- classes and objects ----------------------------------------------------------------------------------

    def _class(self, kind: type, path: str, names: Iterable[str]) -> None:
        """A class that code mentions: the names that the code mentions count, and those that make an object."""
        names = {*names, "__init__", "__new__", "__post_init__"}
        if issubclass(kind, torch.autograd.Function):
            self._in_backward, names = True, {*names, "forward", "backward", "setup_context", "jvp"}
        self._class_names(kind, path, names)

    def _class_names(self, kind: type, path: str, names: Collection[str]) -> None:
        of_module = issubclass(kind, nn.Module)
        if is_opaque(kind) and not of_module:
            return
        for name in names:
            defining = [one for one in kind.__mro__ if name in vars(one)]
            if not defining or defining[0] is object:
                continue
            first = kind.__mro__.index(defining[0])
            if defining[0] is nn.Module and name not in ("forward", "__call__"):
                first = 0  # a subclass that takes the place of such a method is another class
            for one in [*kind.__mro__[:first], *defining]:
                if (id(one), name) in self._looked_up:
                    continue
                self._looked_up.add((id(one), name))
                if not is_opaque(one) or issubclass(one, nn.Module):
                    self._name(vars(one), name, f"{one.__qualname__}.{name}", ())

    def _object(self, value: Any, path: str) -> None:
        """What an object of a class that is nobody's library holds in its attributes and slots."""
        kind = type(value)
        if is_opaque(kind) and not isinstance(value, (types.SimpleNamespace, dict, list)):
            attributes = getattr(value, "__dict__", None)
            if kind.__module__.split(".")[0] != "torch" or not isinstance(attributes, dict):
                return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._table(path, attributes, value)
        slots = [name for one in kind.__mro__ for name, held in vars(one).items() if is_slot(held)]
        if slots and not is_opaque(kind):
            self.guards.add_parts(path, value, lambda: [getattr(value, name, None) for name in slots])
            for name in slots:
                self.value(getattr(value, name, None), f"{path}.{name}")
        if not is_opaque(kind):
            self.guards.add_type(path, value)
            self._of_objects[kind] = path

    def _table(self, path: str, entries: dict[Any, Any], owner: Any = None) -> None:
        self._seen[id(entries)] = entries
        self.guards.add_table(path, entries, owner)
        for name, value in entries.items():
            self.value(value, f"{path}.{name}" if owner is not None else f"{path}[{name!r}]")

    def _items(self, values: Iterable[Any], path: str) -> None:
        for place, value in enumerate(values):
            self.value(value, f"{path}[{place}]")


def _names_of_data(kind: type) -> set[str]:
    """The attributes of a class that hold data, not code; of several by one name the first in its order of bases."""
    defined: dict[str, Any] = {}
    for one in reversed(kind.__mro__):
        defined.update(vars(one))
    return {name for name, value in defined.items() if is_data(value)}


def _settings() -> tuple[Any, ...]:
    """What of PyTorch's own settings decides what a trace holds."""
    cuda = torch.backends.cuda
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )
