"""What a program costs on a described device: seconds for each op, summed, and the bytes it moves.

An op takes `launch + max((flops + ramp) / sustained, bytes / bandwidth)`: `ramp` is what makes small matrix products
slow. Attention has an efficiency of its own beside the matrix products'. Everything else moves bytes only, of which
`pointwise` is the share that reaches memory where software fuses such ops. Views cost nothing.

Figures come from shapes; nothing is run. Sustained rates are those of large products, measured where anybody did.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hal.errors import Unsupported
from hal.kernel import Program
from hal.spec import Machine, SpecError

aten = torch.ops.aten

_KINDS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_FREE = {operator.getitem, aten._unsafe_view.default, aten.detach.default, aten.alias.default}
_NAMED = ("attention", "sdpa")


@dataclass(frozen=True)
class Work:
    """A program's demands: `seconds` of compute, of which `launch` is neither arithmetic nor bytes."""

    seconds: float
    launch: float
    flops: float
    moved: float


class CostModel:
    """Costs of programs on one machine."""

    def __init__(self, machine: Machine) -> None:
        device = machine.device
        self._device = device
        self._pointwise = machine.pointwise
        self._launch = device["launch"]
        self._ramp = device["ramp"]
        self.bandwidth = device["bandwidth_achieved"]

    def of(self, program: Program) -> Work:
        """The work of a program. Raises Unsupported for arithmetic that the device does not have."""
        seconds = launch = flops = moved = 0.0
        for node in program.graph.nodes:
            if node.op != "call_function" or _is_view(node):
                continue
            op_flops, attention = flops_of(node)
            op_bytes = sum(_size(value) for value in _tensors_of(node))
            op_bytes += sum(_size(value) for argument in node.all_input_nodes for value in _tensors_of(argument))
            launch += self._launch
            flops += op_flops
            if op_flops:
                rate = self._rate(node, program) * (self._device["attention"] if attention else 1.0)
                busy = max((op_flops + self._ramp) / rate, op_bytes / self.bandwidth)
            else:
                op_bytes *= self._pointwise
                busy = op_bytes / self.bandwidth
            moved += op_bytes
            seconds += self._launch + busy
        return Work(seconds, launch, flops, moved)

    def added(self, sizes: Sequence[int]) -> Work:
        """What it costs to add outputs of these sizes to what is there: two reads and a write, each an op."""
        launch = self._launch * len(sizes)
        moved = 3.0 * sum(sizes)
        return Work(launch + moved / self.bandwidth, launch, 0.0, moved)

    def _rate(self, node: fx.Node, program: Program) -> float:
        operand = next(value for argument in node.all_input_nodes for value in _tensors_of(argument))
        kind = _KINDS.get(operand.dtype, "fp32")
        try:
            return self._device.sustained(kind)
        except SpecError as missing:
            raise Unsupported(
                f"{program.name}: {missing}", op=str(node.target), dtype=kind, device=self._device.name
            ) from missing


def flops_of(node: fx.Node) -> tuple[float, bool]:
    """An op's multiplications and additions, and whether it is attention. Causal attention counts in full."""
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    attention = any(part in name for part in _NAMED)
    if packet in flop_registry:
        values = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
        return float(flop_registry[packet](*values[0], **values[1], out_val=node.meta.get("val"))), attention
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):  # which torch's registry leaves out
        tensors = [argument.meta["val"].shape for argument in node.args if isinstance(argument, fx.Node)]
        if name.endswith("backward"):
            return float(sdpa_backward_flop_count(*tensors[:4])), True
        return float(sdpa_flop_count(*tensors[:3])), True
    return 0.0, False


def _tensors_of(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


def _size(value: torch.Tensor) -> int:
    return value.numel() * value.dtype.itemsize


def _is_view(node: fx.Node) -> bool:
    if node.target in _FREE:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
