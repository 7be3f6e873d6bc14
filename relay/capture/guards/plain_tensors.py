"""Tensors that a module keeps in plain attributes, neither parameters nor buffers, and what a trace does to them.

Code may leave a tensor in an attribute for a look (attention weights), and read one as a constant. Both are fine in a
trace, which runs the code on tensors without numbers and puts everything back afterwards. What cannot work is a tensor
that is read and then replaced, a state from call to call: the trace would go on reading the first one for ever.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from relay.errors import CaptureError


class PlainTensors:
    """The tensors in the attributes of a module and of those within it, put back when this closes as a context."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [
            (path, one, {name: value for name, value in vars(one).items() if isinstance(value, torch.Tensor)})
            for path, one in module.named_modules()
        ]
        self._replaced: list[tuple[str, torch.Tensor]] = []

    def __enter__(self) -> PlainTensors:
        return self

    def __exit__(self, *_: Any) -> None:
        """Undo what code that ran did to them; what it left in new attributes goes."""
        for path, module, tensors in self._before:
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor) and name not in tensors:
                    del vars(module)[name]
            for name, tensor in tensors.items():
                if vars(module).get(name) is not tensor:
                    self._replaced.append((f"{path}.{name}".lstrip("."), tensor))
            vars(module).update(tensors)

    def refuse_states(self, layer: str, used: Collection[int]) -> None:
        """Raise CaptureError where one was replaced that had also been `used`: those are addresses of tensors."""
        for path, tensor in self._replaced:
            if _address(tensor) in used:
                raise CaptureError(
                    f"layer {layer!r} keeps a tensor from one call to the next in the attribute {path!r}, which is no "
                    "buffer, so it would be changed too often or not at all. Register it with register_buffer.",
                    layer=layer,
                )


def constants_of(traced: fx.GraphModule) -> set[int]:
    """The addresses of the tensors that a trace found and took for constants."""
    names = [node.target for node in traced.graph.nodes if node.op == "get_attr"]
    return {_address(getattr(traced, name, None)) for name in names}


class UsedTensors(TorchDispatchMode):
    """While open, notes the addresses of all tensors that ops are given."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.addresses.update(map(_address, pytree.tree_leaves((args, kwargs))))
        return func(*args, **(kwargs or {}))


def _address(tensor: Any) -> int:
    """Where a tensor's numbers lie; the identity of anything without numbers."""
    if type(tensor) is torch.Tensor and tensor.numel() and tensor.device.type != "meta":
        return tensor.data_ptr()
    return id(tensor)
