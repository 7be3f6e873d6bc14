"""What a model's code decides by looking at the batch while it is traced, and how to tell whether another batch agrees.

Models look: is no token masked (then attention needs no mask), do positions run through (then sequences are not
packed), how long is the longest row. In a trace there are no numbers to look at; but what was computed from the batch
alone, without a parameter or a layer, can be computed from the real batch there and then. The answer is what eager
would have got, the branch is the one that eager takes, and the question is kept: the trace serves any batch that
gives the same answers to the questions in their order.

It answers nothing that depends on parameters, layers or random numbers: those answers may change within a step.
Invariant: the batch is only read.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from relay.graph.mutations import memory_roots, written_by

_READS = {
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.equal,
    torch.Tensor.allclose,
    torch.Tensor.is_nonzero,
    torch.equal,
    torch.allclose,
    torch.is_nonzero,
}
"""Calls that hand numbers to Python."""

_FAKE_TEST = ("transformers.utils.import_utils", "is_fake_tensor")
"""By which `transformers` tells that it is being traced, and then looks at no numbers."""


@dataclass(frozen=True, eq=False)
class Guard:
    """A question about the batch: `read` of what `graph` computes from the batch's tensors, and its answer."""

    graph: fx.GraphModule
    read: Callable[..., Any]
    rest: tuple[Any, ...]
    answer: Any

    def holds(self, batch: Sequence[torch.Tensor]) -> bool:
        """Whether another batch of the same shapes gives the same answer."""
        with torch.no_grad():
            return bool(self.read(*self.graph(*batch), *self.rest) == self.answer)


class GuardTracer(TorchFunctionMode):
    """Answers questions about a batch during one trace. `guards` are those it has answered, in order."""

    def __init__(self, batch: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.guards: list[Guard] = []
        self._batch = list(batch)
        # A batch of shapes alone has no answers.
        self._has_numbers = not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in batch)
        self._asked: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not kwargs:
            count = 2 if func.__name__ in ("equal", "allclose") else 1
            nodes = [_node_of(tensor) for tensor in args[:count]]
            graph = self._graph_of(nodes)
            if graph is not None:
                return self._answer(func, nodes, graph, tuple(args[count:]))
        return func(*args, **(kwargs or {}))

    def knows(self, tensor: Any) -> bool:
        """Whether a tensor's numbers follow from the batch."""
        return isinstance(tensor, torch.Tensor) and self._graph_of([_node_of(tensor)]) is not None

    def _answer(self, read: Any, nodes: Sequence[Any], graph: fx.GraphModule, rest: tuple[Any, ...]) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            answer = read(*graph(*self._batch), *rest)
        question = (read, *nodes)
        if question not in self._asked:
            self._asked.add(question)
            if any(node.users for node in graph.graph.find_nodes(op="placeholder")):
                self.guards.append(Guard(graph, read, rest, answer))
        return answer

    def _graph_of(self, nodes: Sequence[fx.Node | None]) -> fx.GraphModule | None:
        """From the batch's tensors to these nodes; None where they depend on anything else."""
        wanted = [node for node in nodes if node is not None]
        if not self._has_numbers or not wanted or len(wanted) < len(nodes):
            return None
        source = wanted[0].graph
        placeholders = source.find_nodes(op="placeholder")
        given = placeholders[len(placeholders) - len(self._batch) :]
        needed = _needed(source, wanted)
        for node in needed:
            outside = node.op == "placeholder" and node not in given
            draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if outside or draws or getattr(node.target, "namespace", "") == "relay":
                return None
        memory = memory_roots(source)
        if any(memory.get(target) in given for target in map(written_by, needed) if target is not None):
            return None  # to answer would be to write to the batch
        graph = fx.Graph()
        environment = {node: graph.placeholder(node.name) for node in given}
        for node in source.nodes:
            if node in needed and node.op != "placeholder":
                environment[node] = graph.node_copy(node, environment.__getitem__)
        graph.output(tuple(environment[node] for node in wanted))
        return fx.GraphModule(_root_of_trace(), graph)


@contextmanager
def guarding(guard_tracer: GuardTracer) -> Iterator[None]:
    """While open, this thread's model code gets its answers from `guard_tracer`."""
    name, attribute = _FAKE_TEST
    module, thread = sys.modules.get(name), threading.get_ident()
    original = getattr(module, attribute, None)

    def is_fake(tensor: Any) -> bool:
        assert original is not None
        return bool(original(tensor)) and not (threading.get_ident() == thread and guard_tracer.knows(tensor))

    if original is not None:
        setattr(module, attribute, is_fake)
    try:
        with guard_tracer:
            yield
    finally:
        if original is not None:
            setattr(module, attribute, original)


def _needed(source: fx.Graph, wanted: Sequence[fx.Node]) -> set[fx.Node]:
    """All that a node's numbers depend on, writes to memory that it looks at included."""
    needed: set[fx.Node] = set()
    stack = list(wanted)
    memory = memory_roots(source)
    while stack:
        while stack:
            node = stack.pop()
            if node not in needed:
                needed.add(node)
                stack.extend(node.all_input_nodes)
        looked_at = {memory[node] for node in needed if node in memory}
        stack = [
            node
            for node in source.nodes
            if node not in needed and (target := written_by(node)) is not None and memory.get(target) in looked_at
        ]
    return needed


def _node_of(tensor: Any) -> fx.Node | None:
    """The node of the trace under way that made a tensor."""
    mode = get_proxy_mode()
    if mode is None or not isinstance(tensor, torch.Tensor):
        return None
    slot: Any = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _root_of_trace() -> Any:
    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer.root
