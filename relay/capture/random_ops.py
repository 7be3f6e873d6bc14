"""Copying the nodes of a traced graph into a program, with random ops replaced by counter-based ones.

Random ops become calls of `hal.random` with a key. They are numbered layer by layer in the order of the joint graph,
needed or not. Invariant: an op has the same number, and so the same mask, in every program of its segment, and in
whichever segment its layer is.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from hal import random as counter_random
from relay.errors import CaptureError

aten = torch.ops.aten

_LAYER = "relay_layer"


def layer_of_segment(number: int) -> contextlib.AbstractContextManager[Any]:
    """A context around the call of layer `number` of a segment. Ops traced in it carry the number; it has no other
    effect."""
    if get_proxy_mode() is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = traceback.annotate({_LAYER: number})
    return context


def layer_of(node: fx.Node) -> int:
    """The number of the layer in whose call an op was traced; 0 for an op outside of `layer_of_segment`."""
    number: int = node.meta.get("custom", {}).get(_LAYER, 0)
    return number


_RANDOM = {
    aten.rand.default: counter_random.uniform,
    aten.rand_like.default: counter_random.uniform,
    aten.randn.default: counter_random.normal,
    aten.randn_like.default: counter_random.normal,
}


def copy_nodes(
    source: fx.Graph, needed: set[fx.Node], graph: fx.Graph, environment: dict[fx.Node, Any], key: fx.Node, layer: str
) -> None:
    """Copy the `needed` nodes of `source` into `graph`, with random ops keyed by the node `key`.

    `environment` maps nodes of `source` to nodes of `graph`, and is extended. `layer` is the layer's name in errors.
    Raises CaptureError for a random op that has no counter-based form.
    """
    counts: dict[int, int] = {}
    for node in source.nodes:
        target = node.target
        if node.op in ("placeholder", "output"):
            continue
        draws = draws_by_itself(node)
        of_layer = layer_of(node)
        counts[of_layer] = counts.get(of_layer, -1) + draws
        if node not in needed or node in environment:
            continue
        number = of_layer * counter_random.OP_LIMIT + counts[of_layer]
        if draws and counts[of_layer] >= counter_random.OP_LIMIT:
            raise CaptureError(
                f"layer {layer!r} has more than {counter_random.OP_LIMIT} ops that draw random numbers. Split it into "
                "several layers.",
                layer=layer,
                op=str(target),
            )
        if target is operator.getitem and isinstance(environment[node.args[0]], tuple):
            environment[node] = environment[node.args[0]][node.args[1]]
        elif draws and target is aten.native_dropout.default:
            environment[node] = _keyed_dropout(graph, environment[node.args[0]], node, key, number)
        elif draws and target is aten.bernoulli.p:
            environment[node] = _keyed_bernoulli(graph, node, key, number)
        elif draws and target in _RANDOM and has_keyed_form(node):
            drawn = graph.call_function(_RANDOM[target], (key, number, tuple(node.meta["val"].shape)))
            drawn.meta = {"val": node.meta["val"]}
            environment[node] = drawn
        elif draws:
            raise CaptureError(
                f"layer {layer!r} draws random numbers by {target}, which has no counter-based form. Use dropout, or "
                "torch.rand, rand_like, randn or randn_like in float32.",
                layer=layer,
                op=str(target),
            )
        else:
            environment[node] = graph.node_copy(node, environment.__getitem__)


def has_keyed_form(node: fx.Node) -> bool:
    """Whether `copy_nodes` can replace an op that draws by a counter-based one."""
    if node.target in (aten.native_dropout.default, aten.bernoulli.p):
        return True
    return node.target in _RANDOM and node.meta["val"].dtype is torch.float32


def draws_by_itself(node: fx.Node) -> bool:
    """Whether an op draws random numbers from PyTorch's generator, given its arguments (dropout of 0 does not)."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    if node.target is aten.native_dropout.default:
        return node.args[2] is not False
    schema = node.target._schema  # type: ignore[union-attr]
    for position, argument in enumerate(schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout", "training"):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, 0.0)
            return bool(given)
    return True


def _keyed_bernoulli(graph: fx.Graph, node: fx.Node, key: fx.Node, number: int) -> fx.Node:
    """Ones with probability p, else zeros: what dropout of whole channels draws."""
    value = node.meta["val"]
    probability = float(node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5))  # type: ignore[arg-type]
    mask = graph.call_function(counter_random.keep_mask, (key, number, tuple(value.shape), 1.0 - probability))
    mask.meta = {"val": torch.empty(value.shape, dtype=torch.bool, device="meta")}
    ones = graph.call_function(aten._to_copy.default, (mask,), {"dtype": value.dtype})
    ones.meta = {"val": value}
    return ones


def _keyed_dropout(graph: fx.Graph, source: fx.Node, node: fx.Node, key: fx.Node, number: int) -> tuple[Any, Any]:
    """native_dropout as PyTorch computes it, with a keyed mask: (source * mask) * (1 / (1 - p)).

    Graphs for the CPU have a scale of their own (`relay.capture.native.dropout_scale`).
    """
    probability = float(node.args[1])  # type: ignore[arg-type]
    value = source.meta["val"]
    scale = node.meta.get("scale", 0.0 if probability == 1.0 else 1.0 / (1.0 - probability))
    mask = graph.call_function(counter_random.keep_mask, (key, number, tuple(value.shape), probability))
    mask.meta = {"val": torch.empty(value.shape, dtype=torch.bool, device="meta")}
    masked = graph.call_function(aten.mul.Tensor, (source, mask))
    masked.meta = {"val": value}
    scaled = graph.call_function(aten.mul.Scalar, (masked, scale))
    scaled.meta = {"val": value}
    return scaled, mask


def ancestors(wanted: Sequence[Sequence[fx.Node]], given: set[fx.Node] | None = None) -> set[fx.Node]:
    """The `wanted` nodes and all nodes that they depend on. The search stops at nodes in `given`."""
    seen: set[fx.Node] = set()
    stack = [node for nodes in wanted for node in nodes]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if given is None or node not in given:
                stack.extend(node.all_input_nodes)
    return seen
