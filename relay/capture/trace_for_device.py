"""Tracing for a device whose kernels are not the CPU's: with fake tensors of that device's own type.

PyTorch decides by the device which ops autograd runs: flash attention or its memory-efficient sister on a GPU, another
fused kernel on the CPU, other casts under autocast. Traced with fake tensors of the device's type, a segment becomes
the graph that eager autograd would run there. Nothing is moved: parameters and buffers are swapped for fakes while
the trace lasts, and what the segment makes on the CPU it makes on the device instead, as everything of the segment
lives there.

It does not know what a device can do; it asks PyTorch. Invariant: attention that drops draws its mask by an op of its
own, whatever the device would fuse, since masks are ours (`hal.random`): such a segment is traced with its attention
as matrix products.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._device import _device_constructors

from hal.device import NATIVE, DeviceInfo
from relay.capture.core.lowering import Lowering

CPU = torch.device("cpu")
aten = torch.ops.aten


def graphs_for(info: DeviceInfo) -> tuple[Lowering, torch.device]:
    """The lowering that a device wants, and the device that its native graphs are traced for."""
    return (Lowering.NATIVE if NATIVE in info.tags else Lowering.CORE), torch.device(info.traced_for)


def missing(device: torch.device) -> str:
    """Why no trace can be made for a device here; empty where one can.

    Fake tensors of a type that this PyTorch was built without, or finds no device of, cannot be differentiated: the
    autograd engine asks the type's own code for a stream, and ends the process where there is none.
    """
    try:
        there = torch.get_device_module(device).is_available()
    except (RuntimeError, AttributeError) as failure:
        return f"this PyTorch knows nothing of {device.type!r} devices ({str(failure).splitlines()[0]})"
    return "" if there else f"this PyTorch finds no {device.type!r} device"


class OnDevice(TorchFunctionMode):
    """While open, what would be made on the CPU is made on `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        args = tuple(self._moved(argument) for argument in args)
        if kwargs.get("device") is not None:
            kwargs["device"] = self._moved(torch.device(kwargs["device"]))
        elif function in _device_constructors():
            kwargs["device"] = self._device
        return function(*args, **kwargs)

    def _moved(self, argument: Any) -> Any:
        cpu = argument == CPU if isinstance(argument, torch.device) else isinstance(argument, str) and argument == "cpu"
        return self._device if cpu else argument


@contextlib.contextmanager
def fakes_on(
    device: torch.device, mode: FakeTensorMode, module: nn.Module, inputs: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, ...]]:
    """While open, the module's parameters and buffers are fake tensors on `device`. Yields such inputs.

    A tensor that the module has under several names is one fake, as it is one tensor.
    """
    known: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            with mode:
                like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
                if isinstance(tensor, nn.Parameter):
                    like = nn.Parameter(like, requires_grad=tensor.requires_grad)
                elif tensor.requires_grad:
                    like.requires_grad_()
            known[id(tensor)] = like
        return known[id(tensor)]

    tables: list[Any] = [table for one in module.modules() for table in (one._parameters, one._buffers)]
    real = [dict(table) for table in tables]
    fakes = pytree.tree_map_only(torch.Tensor, fake, real)
    with contextlib.ExitStack() as stack:
        if device.index is not None:
            # Which attention is chosen depends on the thread's current device.
            stack.enter_context(torch.get_device_module(device).device(device))
        for table, own, replaced in zip(tables, real, fakes, strict=True):
            stack.callback(table.update, own)
            table.update(replaced)
        yield tuple(fake(tensor) for tensor in inputs)


def spell_out(graph: fx.Graph) -> None:
    """Write into the backward of fused attention what it need not be told by the forward.

    Those are sizes, and where nothing is dropped seeds, which it does not read: else they would be values to keep, or
    to compute the attention again for, in dtypes that no device stores.
    """
    for node in list(graph.nodes):
        names = [argument.name for argument in getattr(getattr(node.target, "_schema", None), "arguments", ())]
        if "philox_seed" not in names:
            continue
        unread = () if node.args[names.index("dropout_p")] else ("philox_seed", "philox_offset")
        args = list(node.args)
        for position, (name, argument) in enumerate(zip(names, node.args, strict=False)):
            value = argument.meta.get("val") if isinstance(argument, fx.Node) else argument
            if not isinstance(value, torch.Tensor):
                args[position] = value
            elif name in unread:
                with graph.inserting_before(node):
                    args[position] = graph.call_function(
                        aten.empty.memory_format, (list(value.shape),), {"dtype": value.dtype, "device": value.device}
                    )
                args[position].meta = {"val": value}
        node.args = tuple(args)
    graph.eliminate_dead_code()
