"""Small modules captured as programs, and a run of one on a device: all that it gives, by role and index.

Around every output of `run_program` lie bytes that must stay, so a kernel that writes beside its outputs fails here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from hal.device import Device, KernelCall
from hal.event import Event
from hal.program import Program, Role
from hal.random import RandomKey
from relay.capture import Captured, CaptureRequest, capture
from tests.support.cpu_devices import fetch, upload

GUARD = 256  # bytes


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.mixed = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor]:
        q, k, v = self.mixed(self.norm(inputs)).view(*inputs.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (inputs + self.out(functional.gelu(heads.transpose(1, 2).reshape(inputs.shape))),)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.relu(self.norm(self.convolution(inputs))),)


class SeveralOutputs(nn.Module):
    """Among them the same value twice and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = first @ self.weight
        return product, product, torch.relu(product), (product * second).sum()


class AliasingOutputs(nn.Module):
    """Among them an input, a view of one, and two views of one value."""

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = first + second
        return total, first, second.view(-1), total.t(), total[1:]


class Reductions(nn.Module):
    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs.mean(), inputs.amax(0), inputs.norm(), inputs.var(1), inputs.logsumexp(1), inputs.cumsum(0)


class Shifting(nn.Module):
    """Buffers of which one takes the other's old value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("now", torch.tensor([1.0, 2.0]))
        self.register_buffer("past", torch.tensor([3.0, 4.0]))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor]:
        self.past.copy_(self.now)
        self.now.add_(inputs.detach())
        return (inputs * self.now + self.past,)


class Tuple(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.inner(*inputs),)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


MODULES: dict[str, tuple[Callable[[], nn.Module], list[torch.Tensor]]] = {
    "linear": (lambda: Tuple(nn.Linear(5, 3)), [numbers(7, 5)]),
    "bfloat16": (lambda: Tuple(nn.Linear(5, 3)).bfloat16(), [numbers(7, 5).bfloat16()]),
    "mlp": (lambda: Tuple(nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 1))), [numbers(2, 3, 9)]),
    "attention": (Attention, [numbers(2, 5, 12)]),
    "embedding": (lambda: Tuple(nn.Embedding(11, 6)), [torch.tensor([[1, 10, 0], [3, 3, 3]])]),
    "convolution": (Convolution, [numbers(3, 2, 5, 4)]),
    "several outputs": (SeveralOutputs, [numbers(4, 4), numbers(4, 4) + 1]),
    "aliasing outputs": (AliasingOutputs, [numbers(4, 4), numbers(4, 4) + 1]),
    "shifting": (Shifting, [numbers(2)]),
    "cross entropy": (lambda: Tuple(nn.CrossEntropyLoss()), [numbers(6, 4), torch.tensor([0, 1, 2, 3, 3, 3])]),
    "squared error": (lambda: Tuple(nn.MSELoss()), [numbers(6, 40), numbers(6, 40) + 1]),
    "huber": (lambda: Tuple(nn.HuberLoss()), [numbers(6, 40), numbers(6, 40) + 1]),
    "binary": (lambda: Tuple(nn.BCELoss()), [numbers(6, 40).sigmoid(), numbers(6, 40).sigmoid()]),
    "reductions": (Reductions, [numbers(6, 40)]),
}


def module_and_inputs(which: str) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    make, inputs = MODULES[which]
    return make(), [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]


@functools.cache
def captured_from(which: str, save: bool = False) -> Captured:
    """Programs are the same for every device, so they are captured once."""
    return capture(CaptureRequest(*module_and_inputs(which), which, save=save, strides=False))


def run_program(
    device: Device,
    program: Program,
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor] = (),
    key: RandomKey | None = None,
) -> dict[tuple[Role, int], torch.Tensor]:
    """Run it with a module's parameters and buffers, and fetch all outputs by role and index."""
    given = {
        Role.PARAMETER: list(module.parameters()),
        Role.BUFFER: list(module.buffers()),
        Role.VALUE: list(inputs),
        Role.SEED: list(seeds),
    }
    views = {(port.role, port.index): upload(device, given[port.role][port.index]) for port in program.inputs}
    results, guards = {}, []
    for port in program.outputs:
        if port.role is Role.BUFFER_UPDATE:  # in place, as the contract of programs allows
            results[port.role, port.index] = views[Role.BUFFER, port.index]
        else:
            # Garbage within, and as much on both sides, which must stay.
            room = device.alloc(port.size + 2 * GUARD)
            device.queue("load").fill(room.view(0, (room.size,), torch.uint8), 77).wait()
            results[port.role, port.index] = room.view(GUARD, port.shape, port.dtype)
            guards += [room.view(0, (GUARD,), torch.uint8), room.view(GUARD + port.size, (GUARD,), torch.uint8)]
    kernel = device.compile(program)
    device.queue("compute").run(KernelCall(kernel, list(views.values()), list(results.values()), key=key)).wait()
    for guard in guards:
        assert (fetch(device, guard) == 77).all(), f"{program.name} writes beside its outputs"
    return {at: fetch(device, view) for at, view in results.items()}


def failing_lookup(device: Device, wait: Sequence[Event] = ()) -> Event:
    """A kernel that fails within torch: it looks up a row that is not there."""
    module = Tuple(nn.Embedding(4, 2))
    program = capture(CaptureRequest(module, [torch.tensor([0, 1])], "lookup")).forward
    inputs = [upload(device, module.inner.weight), upload(device, torch.tensor([1, 4]))]
    output = upload(device, torch.zeros(2, 2))
    return device.queue("compute").run(KernelCall(device.compile(program), inputs, [output]), wait)
