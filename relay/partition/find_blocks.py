"""Repeated blocks: finding them in a model, and deciding whether two blocks are built alike.

Blocks are found by structure, not by name: they are the elements of the outermost lists of layers. Two blocks are alike
if everything that their code could read is equal, except the values of parameters and buffers; then one program serves
both. If that cannot be decided they count as different, and each is captured by itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from relay.capture.guards.attribute_reads import Reads
from relay.capture.guards.code_walk import HOOKS
from relay.capture.states.escaped_values import note_attribute


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks by name, in the model's order; empty where there are none.

    A block is an element of an outermost ModuleList, or a non-leaf element of an outermost Sequential or of a
    ModuleDict with no list in it, in which at least two elements with parameters are of one class; or the one element
    of a ModuleList of depth one.
    """
    found: dict[str, nn.Module] = {}
    _search(model, "", found)
    first = {id(block): name for name, block in reversed(found.items())}
    return {name: block for name, block in found.items() if first[id(block)] == name}  # a layer may appear twice


def _search(module: nn.Module, prefix: str, found: dict[str, nn.Module]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            blocks = _blocks_of(child)
            if blocks:
                found.update({f"{path}.{key}": block for key, block in blocks.items()})
                continue
        before = len(found)
        _search(child, f"{path}.", found)
        if isinstance(child, nn.ModuleDict) and len(found) == before:
            # A ModuleDict usually holds the parts of a model, but it may be the list of layers itself.
            found.update({f"{path}.{key}": block for key, block in _blocks_of(child).items()})


def _blocks_of(layers: nn.ModuleList | nn.Sequential | nn.ModuleDict) -> dict[str, nn.Module]:
    is_list = isinstance(layers, nn.ModuleList)
    # What `torch.compile(layer)` wraps is the layer.
    plain = {name: getattr(layer, "_orig_mod", layer) for name, layer in layers._modules.items()}
    members = {
        name: layer
        for name, layer in plain.items()
        if layer is not None
        and any(True for _ in layer.parameters())
        and (is_list or any(True for _ in layer.children()))
        and inspect.getattr_static(type(layer), "forward") is not nn.Module.forward
    }
    classes = [type(layer) for layer in members.values()]
    repeats = len(set(classes)) < len(classes)
    # A list of one layer, made of others, is a stack of depth one.
    lone = is_list and len(members) == 1 and any(True for _ in next(iter(members.values())).children())
    if not (repeats or lone):
        return {}
    distinct = {id(layer): name for name, layer in reversed(members.items())}  # a layer may appear several times
    return {name: layer for name, layer in members.items() if distinct[id(layer)] == name}


def tie_pattern(module: nn.Module) -> list[int]:
    """Which of a module's parameters and buffers are one tensor: for each, the index of its first occurrence."""
    first: dict[int, int] = {}
    tensors = [
        *(tensor for _, tensor in module.named_parameters(remove_duplicate=False)),
        *(tensor for _, tensor in module.named_buffers(remove_duplicate=False)),
    ]
    return [first.setdefault(id(tensor), index) for index, tensor in enumerate(tensors)]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore the numbers, flags, strings, lists and dicts in the attributes of every module on exit.

    Tracing runs forwards, which may count calls. Attributes of these types that a forward adds are deleted. Hooks that
    a forward installs stay, as they do in plain PyTorch.
    """
    before = [(module, _own_values(module.__dict__)) for module in model.modules()]
    tables = [vars(module).get(name) for module in model.modules() for name in HOOKS]
    hooks = [(table, dict(table)) for table in tables if table is not None]
    contents: dict[int, tuple[Any, Any]] = {}
    for _, values in before:
        for value in values.values():
            _note_contents(value, contents)
    try:
        yield
    finally:
        # A forward that installed hooks noted that in a flag; without it the next one would install them once more.
        installed = any(table.keys() != before_it.keys() for table, before_it in hooks)
        for module, _ in before:
            for name, value in _own_values(vars(module)).items():
                if type(value) in _CONTAINERS:
                    note_attribute(module, name, value)
        for container, content in contents.values():
            _restore(container, content)
        for module, values in before:
            for name, added in _own_values(module.__dict__).items():
                if name not in values and not (installed and added is True):
                    del module.__dict__[name]
            for name, value in values.items():
                if module.__dict__.get(name) is not value:
                    module.__dict__[name] = value


def _own_values(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in attributes.items()
        if type(value) in _PLAIN or (type(value) in _CONTAINERS and name not in _BOOKKEEPING)
    }


def _note_contents(container: Any, contents: dict[int, tuple[Any, Any]]) -> None:
    """Copies of a container and of those in it, by identity."""
    if type(container) not in _CONTAINERS or id(container) in contents:
        return
    contents[id(container)] = (container, container.copy())
    for value in container.values() if isinstance(container, dict) else container:
        _note_contents(value, contents)


def _restore(container: Any, content: Any) -> None:
    if isinstance(container, list):
        container[:] = content
    elif list(container) != list(content) or any(container[key] is not content[key] for key in content):
        container.clear()
        container.update(content)


_PLAIN = {bool, int, float, str}
_CONTAINERS = {list, dict}

_BOOKKEEPING = {"_parameters", "_buffers", "_modules", "_is_full_backward_hook", "_compiled_call_impl"}


def same_structure(first: Any, second: Any, reads: Reads | None = None, depth: int = 0) -> bool:
    """Whether two modules, or two attributes of modules, are equal except for the values of parameters and buffers.

    `reads` are the attributes that were read while the first module was traced; the others are not compared. Without
    it all attributes are.
    """
    if first is second:
        return True
    if type(first) is not type(second) or depth > 20:
        return False
    if isinstance(first, nn.Module):
        return _same_module(first, second, reads, depth)
    if isinstance(first, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)):
        return bool(first == second)
    if isinstance(first, (set, frozenset)):
        return first == second and all(isinstance(member, (int, str)) for member in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(
            same_structure(ours, theirs, reads, depth + 1) for ours, theirs in zip(first, second, strict=True)
        )
    if isinstance(first, dict):
        return list(first) == list(second) and all(
            same_structure(first[key], second[key], reads, depth + 1) for key in first
        )
    if isinstance(first, functools.partial):  # such as an activation with its options bound
        return first.func is second.func and all(
            same_structure(ours, theirs, reads, depth + 1)
            for ours, theirs in ((first.args, second.args), (first.keywords, second.keywords))
        )
    # Any other object (a configuration, a function) is equal to itself alone.
    return False


def _same_module(first: nn.Module, second: nn.Module, reads: Reads | None, depth: int) -> bool:
    ours, theirs = first.__dict__, second.__dict__
    if list(ours) != list(theirs):
        return False
    read = None if reads is None else reads.get(id(first))
    counting = [key for key in ours if key not in _BOOKKEEPING and (read is None or key in read)]
    if not all(same_structure(ours[key], theirs[key], reads, depth + 1) for key in counting):
        return False
    if not _same_tensors(first._parameters, second._parameters) or not _same_tensors(first._buffers, second._buffers):
        return False
    return list(first._modules) == list(second._modules) and all(
        same_structure(first._modules[key], second._modules[key], reads, depth + 1) for key in first._modules
    )


def _same_tensors(first: dict[str, Any], second: dict[str, Any]) -> bool:
    if list(first) != list(second):
        return False
    for ours, theirs in zip(first.values(), second.values(), strict=True):
        if (ours is None) != (theirs is None):
            return False
        if ours is not None and (
            ours.shape != theirs.shape or ours.dtype != theirs.dtype or ours.requires_grad != theirs.requires_grad
        ):
            return False
    return True
