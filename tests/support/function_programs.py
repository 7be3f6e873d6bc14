"""A function of tensors as a core program, for tests of devices that execute these."""

from typing import Any

from torch import Tensor, nn

from hal.program import Program
from relay.capture import CaptureRequest, Lowering, capture


class Of(nn.Module):
    """A function as a segment."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        result = self.function(*inputs)
        return result if isinstance(result, tuple) else (result,)


def core(function: Any, *inputs: Tensor) -> Program:
    """A function's forward as a core program."""
    return capture(CaptureRequest(Of(function), inputs, "segment 7", lowering=Lowering.CORE)).forward
