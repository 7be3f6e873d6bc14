"""A whole model as one ONNX file: what `relay export --onnx` writes beside the weights.

The model is captured as one segment in evaluation mode, and the ONNX backend writes the file. Parameters, buffers and
inputs keep their names, and shapes are those of the example. Nothing is trained and nothing is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hal import registry
from hal.program import Role
from relay.capture import CaptureRequest, Lowering, capture


class _Named(nn.Module):
    """The model as a segment: inputs in the order of their names -> one output."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], output: str | None) -> None:
        super().__init__()
        self.model, self.names, self.output = model, names, output

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor]:
        result: Any = self.model(**dict(zip(self.names, values, strict=True)))
        return (result if self.output is None else getattr(result, self.output),)


def export_onnx(
    model: nn.Module, example: Mapping[str, torch.Tensor], path: str | Path, output: str | None = "logits"
) -> Path:
    """Write `model(**example)` as an .onnx file with its weights, and return the path.

    `output` is the attribute of the model's result that becomes the output of the file, or None if the result is a
    tensor. Inputs have the names and shapes of `example`, weights the names of `state_dict()`. The model's training
    mode is restored. Raises Unsupported, naming the op, for an op outside `hal.ops`, and Unavailable if onnx is
    missing.
    """
    names = tuple(example)
    training = model.training
    model.eval()
    try:
        segment = _Named(model, names, output)
        found = capture(
            CaptureRequest(segment, list(example.values()), "model", lowering=Lowering.CORE, training=False)
        )
    finally:
        model.train(training)
    inner = "model."
    of_role = {
        Role.PARAMETER: [aliases[0].removeprefix(inner) for aliases in found.parameter_names],
        Role.BUFFER: [name.removeprefix(inner) for name in found.buffer_names],
        Role.VALUE: list(names),
    }
    inputs = [of_role[port.role][port.index] for port in found.forward.inputs]
    outputs = [output or "output" if port.role is Role.VALUE else f"new {port.index}" for port in found.forward.outputs]
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return registry.backend("onnx").export(found.forward, Path(path), inputs, outputs, weights)
