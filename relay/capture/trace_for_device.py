"""Tracing for a device other than the CPU, with fake tensors on that device.

PyTorch chooses by the device which ops autograd runs: flash or memory-efficient attention on a GPU, another fused
kernel on the CPU, other casts under autocast. Traced with fake tensors on the device, a segment becomes the graph that
eager autograd would run there. No data is moved: parameters and buffers are replaced by fakes during the trace, and
tensors that the segment creates on the CPU are created on the device instead.

What a device supports is PyTorch's answer. Invariant: dropout inside attention draws its mask by a separate op, since
masks come from `hal.random`. A segment for which the device would fuse it is traced with attention as matrix products.
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
    """The reason why nothing can be traced for a device on this machine; empty if it can.

    Fake tensors on a device type that PyTorch was built without, or finds no device of, cannot be differentiated: the
    autograd engine asks the device type for a stream, and aborts the process if there is none.
    """
    try:
        there = torch.get_device_module(device).is_available()
    except (RuntimeError, AttributeError) as failure:
        return f"this PyTorch does not support {device.type!r} devices ({str(failure).splitlines()[0]})"
    return "" if there else f"this PyTorch finds no {device.type!r} device"


class OnDevice(TorchFunctionMode):
    """While open, tensors that would be created on the CPU are created on `device`."""

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
    """While open, the module's parameters and buffers are fake tensors on `device`. Yields fakes of the inputs there.

    A tensor that the module holds under several names is one fake.
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

    tables: list[Any] = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    real = [dict(table) for table in tables]
    fakes = pytree.tree_map_only(torch.Tensor, fake, real)
    with contextlib.ExitStack() as stack:
        if device.index is not None:
            # PyTorch chooses the attention kernel by the current device of the thread.
            stack.enter_context(torch.get_device_module(device).device(device))
        for table, own, replaced in zip(tables, real, fakes, strict=True):
            stack.callback(table.update, own)
            table.update(replaced)
        yield tuple(fake(tensor) for tensor in inputs)


def spell_out(graph: fx.Graph) -> None:
    """Replace arguments of the backward of fused attention that it need not take from the forward.

    These are sizes, and without dropout the random seeds, which it does not read. Otherwise they would have to be
    saved, or the attention recomputed for them, in dtypes that no device stores.
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
