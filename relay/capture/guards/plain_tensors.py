"""Tensors in plain attributes of a module, which are neither parameters nor buffers.

Code may store a tensor in an attribute for inspection (attention weights), or read one as a constant. Both work in a
trace, since attributes are restored after each run of the code. A tensor that is read and then replaced is a state that
lasts from call to call. It is refused, because every run of the traced program would read the first value. Where the
first call puts a tensor in the place of None, a second run shows whether it is such a state, or is made once and kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from relay.capture.guards.attribute_reads import Reads, reads_unrecorded
from relay.capture.states.escaped_values import note_attribute
from relay.errors import CaptureError


class KeepsState(CaptureError):
    """Code keeps a tensor from one call to the next in an attribute that is no buffer."""


class PlainTensors:
    """A context that restores the tensors in the attributes of a module and its submodules on exit."""

    def __init__(self, module: nn.Module) -> None:
        with reads_unrecorded():  # to look at all attributes is not what the code does
            self._before = [
                (path, part, {name: value for name, value in vars(part).items() if isinstance(value, torch.Tensor)})
                for path, part in module.named_modules()
            ]
            # An attribute may hold None, say, until a forward puts a tensor there.
            self._other = {id(part): dict(vars(part)) for _, part, _ in self._before}
        self._replaced: list[tuple[str, torch.Tensor]] = []
        self._new: list[tuple[nn.Module, str, torch.Tensor]] = []

    def __enter__(self) -> PlainTensors:
        return self

    def __exit__(self, *_: Any) -> None:
        """Restore replaced tensors, and remove tensors in new attributes."""
        with reads_unrecorded():
            self._restore()

    def _restore(self) -> None:
        for path, module, tensors in self._before:
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor) and name not in tensors:
                    note_attribute(module, name, value)
                    del vars(module)[name]
                    if name in (other := self._other[id(module)]):
                        vars(module)[name] = other[name]
                        self._new.append((module, name, value))
            for name, tensor in tensors.items():
                if (now := vars(module).get(name)) is not tensor:
                    note_attribute(module, name, now)
                    self._replaced.append((f"{path}.{name}".lstrip("."), tensor))
            vars(module).update(tensors)

    def take(self, inner: PlainTensors) -> None:
        """Note what was seen in a context within this one."""
        self._replaced += inner._replaced
        self._new += inner._new

    @contextlib.contextmanager
    def as_after_a_call(self, reads: Reads | None) -> Iterator[bool]:
        """While open, attributes that held no tensor until a call hold one, as in a second call: zeros.

        Yields whether there are such attributes among the `reads` (all count as read if it is None).
        """
        new = [
            (module, name, tensor)
            for module, name, tensor in self._new
            if reads is None or name in (reads.get(id(module), ()) or (name,))
        ]
        before = [(module, name, vars(module)[name]) for module, name, _ in new]
        for module, name, tensor in new:
            vars(module)[name] = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
        try:
            yield bool(new)
        finally:
            for module, name, other in before:
                vars(module)[name] = other

    def refuse_states(self, layer: str, used: Collection[int]) -> None:
        """Raise CaptureError if a replaced tensor is among those `used`, which are given by their addresses."""
        for path, tensor in self._replaced:
            if _address(tensor) in used:
                raise KeepsState(
                    f"layer {layer!r} keeps a tensor from one call to the next in the attribute {path!r}, which is no "
                    "buffer, so it would change too often or not at all. Register it with register_buffer.",
                    layer=layer,
                )


def constants_of(traced: fx.GraphModule) -> set[int]:
    """The addresses of the tensors that a trace holds as constants."""
    names = [node.target for node in traced.graph.nodes if node.op == "get_attr"]
    return {_address(getattr(traced, name, None)) for name in names}


class UsedTensors(TorchDispatchMode):
    """A mode that collects the addresses of all tensors that are arguments of ops."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.addresses.update(map(_address, pytree.tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))


def _address(tensor: Any) -> int:
    """The address of a tensor's memory, or the id of an object without memory."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() and not tensor.is_meta:
        return tensor.data_ptr()
    return id(tensor)
