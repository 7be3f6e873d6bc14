"""What one op of a program works on: FLOPs and bytes, from the shapes in the graph's meta data. Nothing is run.

FLOPs are multiplications and additions of matrix products and attention (2 a multiply-add), as
torch.utils.flop_counter counts them; the CPU's fused attention, which it leaves out, is counted here. Causal attention
counts in full, as the field counts it, but its kernels leave out what is masked: `done` is what they do. Bytes are
operands and results, each once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten

_FREE = {operator.getitem, aten._unsafe_view.default, aten.detach.default, aten.alias.default}
_ATTENTION = ("attention", "sdpa")

TILE = 128
"""Rows of queries that a fused kernel takes at a time: causal attention is computed up to the end of each such tile's
diagonal (64 or 128 in FlashAttention-2, arXiv 2307.08691, section 3.3; 32 to 256 on PyTorch's CPU)."""


@dataclass(frozen=True)
class OpWork:
    """`flops` is 0 for ops that only move bytes; `attention` tells which kind of product it is."""

    flops: float
    done: float
    moved: float
    attention: bool
    dtype: torch.dtype


def work_of(node: fx.Node) -> OpWork | None:
    """The work of a node; None for nodes that compute nothing (inputs, views)."""
    if node.op != "call_function" or is_view(node):
        return None
    operands = [value for argument in node.all_input_nodes for value in tensors_of(argument)]
    results = tensors_of(node)
    moved = float(sum(value.numel() * value.dtype.itemsize for value in [*operands, *results]))
    flops, attention = _flops_of(node)
    tensors = operands or results
    done = flops * _unmasked(node) if attention else flops
    return OpWork(flops, done, moved, attention, tensors[0].dtype if tensors else torch.float32)


def _flops_of(node: fx.Node) -> tuple[float, bool]:
    packet = getattr(node.target, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    attention = any(part in name for part in _ATTENTION)
    if packet in flop_registry:
        arguments, options = fx.node.map_arg((node.args, node.kwargs), lambda argument: argument.meta.get("val"))
        return float(flop_registry[packet](*arguments, **options, out_val=node.meta.get("val"))), attention
    if name == "_grouped_mm":  # every row meets the matrix of one group
        first, second = (argument.meta["val"] for argument in node.args[:2])  # type: ignore[union-attr]
        return 2.0 * first.shape[-2] * first.shape[-1] * second.shape[-1], False
    if name.startswith("_scaled_dot_product_flash_attention_for_cpu"):
        shapes = [argument.meta["val"].shape for argument in node.args if isinstance(argument, fx.Node)]
        if name.endswith("backward"):
            return float(sdpa_backward_flop_count(*shapes[:4])), True  # type: ignore[no-untyped-call]
        return float(sdpa_flop_count(*shapes[:3])), True  # type: ignore[no-untyped-call]
    if getattr(node.target, "namespace", "") == "torch_nn":  # a product for the logits, and one for each gradient
        given = _fused_arguments(node)
        size = given["input"].meta["val"].numel() * len(given["linear_weight"].meta["val"])
        products = 1 + given.get("compute_input_grad", False) + given.get("compute_linear_weight_grad", False)
        return 2.0 * size * products, False
    return 0.0, attention


def _unmasked(node: fx.Node) -> float:
    """The share of the scores that a fused attention computes."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == "is_causal":
            causal = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, False)
            length = next(value.meta["val"].shape[-2] for value in node.args if isinstance(value, fx.Node))
            return min(1.0, (1 + TILE / length) / 2) if causal else 1.0
    return 1.0


def scratch_of(node: fx.Node) -> int:
    """Bytes that an op needs besides operands and results, where it is an op that holds the logits of a chunk."""
    if getattr(node.target, "namespace", "") != "torch_nn":
        return 0
    arguments = _fused_arguments(node)
    rows, classes = arguments["input"].meta["val"], len(arguments["linear_weight"].meta["val"])
    chunk = min(len(rows), int(arguments["batch_chunk_size"]))
    return chunk * classes * int(arguments["acc_dtype"].itemsize)


def _fused_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a fused linear cross-entropy by name."""
    return dict(zip((one.name for one in node.target._schema.arguments), node.args, strict=False))  # type: ignore[union-attr]


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """What a node gives, by its meta data."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


def is_view(node: fx.Node) -> bool:
    """Whether a node's result lies in the memory of what it is given, or is an item of it."""
    if node.target in _FREE:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
