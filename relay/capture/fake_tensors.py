"""Fake tensors: tensors with shapes, dtypes and devices, and no memory.

PyTorch's fake tensors are private to it, so the rest of the relay makes and recognises them through the functions here.
Nothing is traced or run. Invariant: no function here changes the tensors or modules that it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from relay.capture.native.kernel_strides import kernel_strides_mode

FakeMode = AbstractContextManager[Any]
"""A context in which every new tensor is fake. Fake tensors of one mode work with each other only."""


def fake_mode(allow_real_inputs: bool = False) -> FakeMode:
    """A new mode for fake tensors. With `allow_real_inputs` its ops also take real tensors beside fake ones."""
    return kernel_strides_mode(allow_non_fake_inputs=allow_real_inputs)


@contextmanager
def modes_off() -> Iterator[None]:
    """While open, new tensors are real, and no trace records what is done with tensors."""
    with _disable_current_modes():
        yield


def is_fake(tensor: object) -> bool:
    """Whether an object is a fake tensor."""
    return isinstance(tensor, FakeTensor)


def as_fake(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fake tensors of the same shapes, dtypes and devices, all of one new mode that also takes real parameters."""
    mode = kernel_strides_mode(allow_non_fake_inputs=True)
    return [mode.from_tensor(tensor) for tensor in tensors]


def fake_on_cpu(tensor: torch.Tensor, mode: FakeMode) -> torch.Tensor:
    """A fake CPU tensor of the same shape and dtype, in `mode`. `tensor` may be on the meta device."""
    assert isinstance(mode, FakeTensorMode)
    meta = tensor.detach().to("meta")
    return mode.fake_tensor_converter.from_meta_and_device(mode, meta, torch.device("cpu"))


def copy_with_fakes(module: nn.Module, mode: FakeMode) -> nn.Module:
    """A copy of `module` whose parameters and buffers are fake CPU tensors in `mode`. Tied tensors stay tied."""
    fakes: dict[int, torch.Tensor] = {}
    clone = copy.deepcopy(module)
    for part in clone.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in fakes:
                    fakes[id(parameter)] = nn.Parameter(fake_on_cpu(parameter, mode), parameter.requires_grad)
                part._parameters[name] = fakes[id(parameter)]  # type: ignore[assignment]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = fakes.setdefault(id(buffer), fake_on_cpu(buffer, mode))
    return clone
