"""A whole model as one ONNX file: what `relay export --onnx` writes beside the weights.

The model is captured as one segment, in evaluation, and handed to the backend that knows the format; parameters,
buffers and inputs keep their own names. Shapes are those of the example. Nothing is trained and nothing is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hal import registry
from hal.program import Role
from relay.capture import Lowering, capture


class _Named(nn.Module):
    """The model as a segment: values in the order of their names, and one of its outputs."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], output: str | None) -> None:
        super().__init__()
        self.model, self.names, self.output = model, names, output

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor]:
        result: Any = self.model(**dict(zip(self.names, values, strict=True)))
        return (result if self.output is None else getattr(result, self.output),)


def export_onnx(
    model: nn.Module, example: Mapping[str, torch.Tensor], path: str | Path, output: str | None = "logits"
) -> Path:
    """Write `model(**example)` as an .onnx file with its weights. Returns the path.

    `output` is the attribute of the model's result that the file gives, or None where the result is a tensor. Inputs
    have the names and shapes of `example`, weights those of `state_dict()`. The model's mode (training or not) is as it
    was afterwards. Raises Unsupported for ops outside `hal.ops`, naming them, and Unavailable without onnx.
    """
    names = tuple(example)
    training = model.training
    model.eval()
    try:
        segment = _Named(model, names, output)
        found = capture(segment, list(example.values()), "model", lowering=Lowering.CORE, training=False)
    finally:
        model.train(training)
    inner = "model."
    of_role = {
        Role.PARAMETER: [each[0].removeprefix(inner) for each in found.parameter_names],
        Role.BUFFER: [name.removeprefix(inner) for name in found.buffer_names],
        Role.VALUE: list(names),
    }
    inputs = [of_role[port.role][port.index] for port in found.forward.inputs]
    outputs = [output or "output" if port.role is Role.VALUE else f"new {port.index}" for port in found.forward.outputs]
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return registry.backend("onnx").export(found.forward, Path(path), inputs, outputs, weights)
