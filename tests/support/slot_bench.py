"""A slot on a device, with what a kernel of it needs and a gate to hold calls back; and the gradients it should have.

`conftest` makes fixtures of it: `bench` is on each CPU device in turn, `apart` on the discrete one alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import nn

from hal.device import KernelCall, View
from hal.event import Event
from hal.host import Host
from hal.registry import open as open_device
from hal.slot.device_slot import DeviceSlot
from hal.slot.layout import SlotContent, lay_out
from relay.capture import CaptureRequest, capture

PATIENCE = 60  # seconds until a test that hangs is a failure
FEATURES = 3


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 2)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.inner(inputs),)


CAPTURED = capture(CaptureRequest(Linear(), [torch.zeros(4, FEATURES)], "linear"))
SHAPES = [((2, FEATURES), torch.float32), ((2,), torch.float32)]


def content_of(name: str, value: float) -> SlotContent:
    """A segment whose parameters all have that value."""
    fields, size = lay_out(SHAPES)
    flat = torch.zeros(size, dtype=torch.uint8)
    tensors = []
    for field in fields:
        nbytes = torch.Size(field.shape).numel() * field.dtype.itemsize
        tensors.append(flat[field.offset : field.offset + nbytes].view(field.dtype).view(field.shape).fill_(value))
    return SlotContent(name, fields, size, ((0, flat),), tuple(tensors), fields, size)


SIZE = lay_out(SHAPES)[1]


class Bench:
    """A device, a slot on it, a gate, and what a kernel of the slot needs."""

    def __init__(self, name: str) -> None:
        self.device = open_device(name)
        self.slot = DeviceSlot(self.device, 0, SIZE, SIZE)
        self.forward = self.device.compile(CAPTURED.forward)
        assert CAPTURED.backward is not None
        self.backward = self.device.compile(CAPTURED.backward)
        self.inputs = self._hold(torch.ones(4, FEATURES))
        self.seed = self._hold(torch.ones(4, 2))
        self.output = self._hold(torch.zeros(4, 2))
        self._host = Host()
        self._signal = threading.Event()
        self.gate = self._host.run(lambda: self._signal.wait(PATIENCE) and None)

    def _hold(self, tensor: torch.Tensor) -> View:
        view = self.device.alloc(tensor.nbytes).view(0, tensor.shape, tensor.dtype)
        self.device.queue("load").write(view, tensor).wait()
        return view

    def open_gate(self) -> None:
        self._signal.set()

    def load(self, content: SlotContent, version: int = 0, wait: Sequence[Event] = (), queue: str = "load") -> list:
        return self.slot.load(content, version, self.device.queue(queue), wait)

    def run_forward(self, wait: Sequence[Event] = ()) -> Event:
        return self.slot.run(
            self.device.queue("compute"),
            KernelCall(self.forward, [*self.slot.parameters, self.inputs], [self.output]),
            wait,
            False,
        )

    def run_backward(self, wait: Sequence[Event] = (), seed: View | None = None) -> Event:
        return self.slot.run(
            self.device.queue("compute"),
            KernelCall(self.backward, [*self.slot.parameters, self.inputs, seed or self.seed], self.slot.gradients),
            wait,
            True,
        )

    def drain(self, target: torch.Tensor, wait: Sequence[Event] = (), queue: str = "drain") -> list[Event]:
        assert self.slot.content is not None
        pieces = [(0, target[: self.slot.content.gradient_size])]
        return self.slot.drain(self.device.queue(queue), self.slot.flat_gradients(pieces), wait)

    def fetch(self, view: View) -> torch.Tensor:
        back = torch.empty(view.shape, dtype=view.dtype)
        self.device.queue("fetch").read(back, view).wait()
        return back

    def close(self) -> None:
        self.open_gate()
        self._host.close()
        self.device.close()


def expected_output(value: float) -> torch.Tensor:
    return nn.functional.linear(torch.ones(4, FEATURES), torch.full((2, FEATURES), value), torch.full((2,), value))


def gradient_bytes(seed: float) -> torch.Tensor:
    """The flat gradients of the bench's layer for a constant seed, from autograd."""
    fields, size = lay_out(SHAPES)
    weight, bias = (torch.zeros(shape, requires_grad=True) for shape, _ in SHAPES)
    nn.functional.linear(torch.ones(4, FEATURES), weight, bias).backward(torch.full((4, 2), seed))
    flat = torch.zeros(size, dtype=torch.uint8)
    for field, gradient in zip(fields, (weight.grad, bias.grad), strict=True):
        raw = gradient.contiguous().view(-1).view(torch.uint8)
        flat[field.offset : field.offset + raw.numel()] = raw
    return flat


def same_gradients(found: torch.Tensor, seed: float) -> bool:
    fields, _ = lay_out(SHAPES)
    expected = gradient_bytes(seed)
    return all(
        torch.equal(found[field.offset :][:size], expected[field.offset :][:size])
        for field, size in zip(fields, (24, 8), strict=True)
    )
