"""The programs of device parts: one for each function and shape, traced as the device takes programs.

A program replaces its matrix by the result, in the same memory. Nothing is compiled here. Invariant: what PyTorch's own
devices run are the ops of the function, in its order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from hal.program import Port, Program, Role
from relay.capture import CaptureRequest, Lowering, capture, fingerprint
from relay.optim.tensor_optimizer import DevicePart


class _Module(nn.Module):
    """A device part as a segment."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, matrix: torch.Tensor) -> tuple[torch.Tensor]:
        return (self._function(matrix),)


@functools.lru_cache(maxsize=1024)
def program_of(part: DevicePart, shape: tuple[int, ...], lowering: Lowering, device: torch.device) -> Program:
    """The program of a part for one shape, for devices that take this lowering."""
    name = f"{type(part).__name__} of {'x'.join(map(str, shape))}"
    example = torch.empty(shape, dtype=torch.bfloat16)
    function = part.in_float32 if lowering is Lowering.CORE else part.__call__
    program = capture(
        CaptureRequest(_Module(function), (example,), name, lowering=lowering, device=device, training=False)
    ).forward
    inputs = (Port(Role.BUFFER, 0, shape, torch.bfloat16),)
    outputs = (Port(Role.BUFFER_UPDATE, 0, shape, torch.bfloat16),)
    key = fingerprint(program.graph, inputs, outputs, program.constants)
    return replace(program, name=name, inputs=inputs, outputs=outputs, fingerprint=key)
