"""A part of a traced model as a module: the segments that are no calls of layers, and what computes a loss.

The ops of the trace are copied into a graph of their own, with gradients on or off as they were, and the tensors that
the model made while it was traced as constants in it. Which ops belong together is decided elsewhere
(`relay.partition.graph_split`). Invariant: the trace stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from relay.capture import SET_GRAD_ENABLED
from relay.capture.fake_tensors import is_fake
from relay.errors import PartitionError
from relay.graph.autocast_regions import enter_regions


class GraphSegment(nn.Module):
    """A stage of a traced model as a module. It holds those of the model's parameters and buffers that it uses."""

    outside_layers = True

    def __init__(self, graph: fx.Graph, states: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.graph = fx.GraphModule(nn.Module(), graph)
        self.state_names = [name.replace(".", "__") for name, _ in states]
        for name, (_, tensor) in zip(self.state_names, states, strict=True):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    def names_of(self, states: Sequence[tuple[str, torch.Tensor]], parameters: bool) -> dict[str, str]:
        """The model's names of the parameters (or else of the buffers), by this module's names."""
        return {
            local: full
            for local, (full, tensor) in zip(self.state_names, states, strict=True)
            if isinstance(tensor, nn.Parameter) == parameters
        }

    def described(self) -> list[Any]:
        """What of its parameters and buffers decides whether it is built like another."""
        return described([(name, getattr(self, name)) for name in self.state_names])

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = [getattr(self, name) for name in self.state_names]
        return tuple(self.graph(*states, *values))


def graph_of_loss(
    traced: fx.GraphModule,
    loss: fx.Node,
    states: Mapping[fx.Node, tuple[str, torch.Tensor]],
    inputs: Sequence[fx.Node],
) -> GraphSegment:
    """What of a trace computes the loss from `inputs`, as a module that holds the parameters and buffers it uses."""
    needed: set[fx.Node] = set()
    stack = [loss]
    while stack:
        node = stack.pop()
        if node not in needed and node not in inputs:
            needed.add(node)
            stack += node.all_input_nodes
    gradients_on = True
    modes: dict[fx.Node, bool] = {}
    for node in traced.graph.nodes:
        if node.target is SET_GRAD_ENABLED:
            gradients_on = bool(node.args[0])
        modes[node] = gradients_on
    used = [node for node in states if node in needed]
    nodes = [node for node in traced.graph.nodes if node in needed and node not in states]
    graph, environment = copied_graph(traced, nodes, [*used, *inputs], modes)
    graph.output((environment[loss],))
    return GraphSegment(graph, [states[node] for node in used])


def copied_graph(
    traced: fx.GraphModule, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], gradients_on: Mapping[fx.Node, bool]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A graph of these nodes, each with gradients on or off and under the autocast that it was under.

    Returns it with its nodes by those that they copy.
    """
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(inputs):
        environment[node] = graph.placeholder(f"input_{position}")
    on = True
    for node in nodes:
        if gradients_on[node] != on:
            on = gradients_on[node]
            graph.call_function(SET_GRAD_ENABLED, (on,))
        if node.op == "get_attr":
            constant = getattr(traced, str(node.target))
            _raise_if_left_behind(constant, traced)
            _raise_if_large(constant, node)
            environment[node] = graph.call_function(torch.tensor, (constant.tolist(),), {"dtype": constant.dtype})
        else:
            environment[node] = graph.node_copy(node, environment.__getitem__)
    if not on:
        graph.call_function(SET_GRAD_ENABLED, (True,))
    enter_regions(graph)
    return graph, environment


def described(states: Sequence[tuple[str, torch.Tensor]]) -> list[Any]:
    """What of parameters and buffers decides whether two segments are built alike."""
    return [(name, tensor.shape, tensor.dtype, tensor.requires_grad, type(tensor)) for name, tensor in states]


def _raise_if_left_behind(constant: torch.Tensor, traced: fx.GraphModule) -> None:
    """Raise PartitionError for a fake tensor among the constants: the model used a tensor that no traced op made."""
    if is_fake(constant):
        raise PartitionError(f"the model {traced.meta['unseen'].why(constant)}")


def _raise_if_large(constant: torch.Tensor, node: fx.Node) -> None:
    """Raise PartitionError for a constant of more than 65,536 elements, which is probably a weight."""
    if constant.numel() > 1 << 16:
        raise PartitionError(
            f"the forward of the model makes a constant tensor of {constant.numel():,} elements ({node.target}). "
            "Constants may have up to 65,536 elements. Register the tensor as a buffer."
        )
