"""What ops are called, what they take, and which kinds of them the rules of positions know.

Nothing is labelled or built here. Invariant: names are those of ATen's schemas, without the overload.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

IDENTITIES = {"alias", "detach", "contiguous", "clone", "to", "_to_copy", "lift_fresh", "lift_fresh_copy", "type_as"}
RESHAPES = {"view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"}
ALONG = {
    "softmax", "log_softmax", "_softmax", "_log_softmax", "logsumexp", "amax", "amin", "cumsum", "argmax", "argmin",
    "var", "std", "norm", "linalg_vector_norm", "max", "min", "sum", "mean", "glu", "prod", "topk", "sort", "select",
    "narrow", "index_select", "unbind", "chunk", "split", "flip", "var_mean", "gather", "logcumsumexp", "cat", "slice",
    "transpose",
}  # fmt: skip
"""Ops that go along dimensions which they name."""
REORDERS = {"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "mT"}
CLASSES = {"cross_entropy_loss", "nll_loss", "nll_loss_nd"}
LIKE = {"zeros_like", "ones_like", "full_like", "empty_like"}
LOSSES = {
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "kl_div", "soft_margin_loss",
}  # fmt: skip
NONE, MEAN, SUM = 0, 1, 2
"""PyTorch's numbers for the reductions of a loss."""


def name_of(node: fx.Node) -> str:
    """An op's name without its overload, or the name of another function."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None else getattr(node.target, "__name__", str(node.target))


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """An op's arguments by name, defaults included."""
    schema = getattr(node.target, "_schema", None)
    found = {}
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        default = argument.default_value if argument.has_default_value() else None
        found[argument.name] = default if given is None else given
    return found


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's tensor."""
    return tuple(node.meta["val"].shape)


def order_of(node: fx.Node) -> tuple[int, ...]:
    """The dimensions of what an op reorders, as they stand afterwards."""
    count = len(shape_of(node))
    example = torch.empty([2] * count, device="meta")
    strides = node.target(example, *node.args[1:], **node.kwargs).stride()  # type: ignore[operator]
    return tuple(count - stride.bit_length() for stride in strides)
