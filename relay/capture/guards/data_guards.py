"""Guards: values that the code of a model reads from the batch while it is traced, checked again for other batches.

Some models branch on the batch: whether any token is masked, whether positions are consecutive, how long the longest
row is. Fake tensors have no values to read, but a value that is computed from the batch alone can be computed from the
real batch during the trace. The code then takes the branch that it would take in eager PyTorch. The computation and its
result are kept as a guard, as in Dynamo: the trace serves every batch for which all guards hold.

Values that depend on parameters, layers or random numbers are not computed, since they may change within a step.
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

from relay.graph.mutations import memory_roots, needed_by, written_by

READS = {
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
"""Functions that return numbers of a tensor to Python."""

_FAKE_TEST = ("transformers.utils.import_utils", "is_fake_tensor")
"""The function by which `transformers` detects a trace, in which it reads no values."""


@dataclass(frozen=True, eq=False)
class Guard:
    """A condition on a batch: `read(*graph(*batch), *rest)` equals `answer`."""

    graph: fx.GraphModule
    read: Callable[..., Any]
    rest: tuple[Any, ...]
    answer: Any

    def holds(self, batch: Sequence[torch.Tensor]) -> bool:
        """Whether the condition holds for a batch of the same shapes."""
        with torch.no_grad():
            return bool(self.read(*self.graph(*batch), *self.rest) == self.answer)


class GuardTracer(TorchFunctionMode):
    """Computes the values that code reads from a batch during one trace. `guards` are the conditions found, in order.

    `batch` are the real tensors of the batch. If they are fake or on the meta device, no value is computed.

    `answers` are all values that were read. If those of another trace are `repeated`, the code reads them again, and
    `repeats` is True.
    """

    def __init__(self, batch: Sequence[torch.Tensor], repeated: Sequence[Any] = ()) -> None:
        super().__init__()
        self.guards: list[Guard] = []
        self.answers: list[Any] = []
        self.repeats = bool(repeated)
        self._repeated = iter(repeated)
        self._batch = list(batch)
        # Tensors without memory have no values.
        self._has_numbers = not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in batch)
        self._asked: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and not kwargs:
            count = 2 if func.__name__ in ("equal", "allclose") else 1
            nodes = [_node_of(tensor) for tensor in args[:count]]
            graph = self._graph_of(nodes)
            if graph is not None:
                return self._answer(func, nodes, graph, tuple(args[count:]))
        return func(*args, **(kwargs or {}))

    def knows(self, tensor: Any) -> bool:
        """Whether the values of a tensor depend on the batch alone."""
        return isinstance(tensor, torch.Tensor) and self._graph_of([_node_of(tensor)]) is not None

    def _answer(self, read: Any, nodes: Sequence[Any], graph: fx.GraphModule, rest: tuple[Any, ...]) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            answer = next(self._repeated, None)
            answer = read(*graph(*self._batch), *rest) if answer is None else answer
        self.answers.append(answer)
        question = (read, *nodes)
        if question not in self._asked:
            self._asked.add(question)
            if any(node.users for node in graph.graph.find_nodes(op="placeholder")):
                self.guards.append(Guard(graph, read, rest, answer))
        return answer

    def _graph_of(self, nodes: Sequence[fx.Node | None]) -> fx.GraphModule | None:
        """The graph from the batch's tensors to these nodes; None if they depend on anything else."""
        wanted = [node for node in nodes if node is not None]
        if not self._has_numbers or not wanted or len(wanted) < len(nodes):
            return None
        source = wanted[0].graph
        placeholders = source.find_nodes(op="placeholder")
        given = placeholders[len(placeholders) - len(self._batch) :]
        needed = needed_by(wanted, source)
        for node in needed:
            outside = node.op == "placeholder" and node not in given
            draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if outside or draws or getattr(node.target, "namespace", "") == "relay":
                return None
        memory = memory_roots(source)
        if any(memory.get(target) in given for target in map(written_by, needed) if target is not None):
            return None  # computing the value would write to the batch
        graph = fx.Graph()
        environment = {node: graph.placeholder(node.name) for node in given}
        for node in source.nodes:
            if node in needed and node.op != "placeholder":
                environment[node] = graph.node_copy(node, environment.__getitem__)
        graph.output(tuple(environment[node] for node in wanted))
        return fx.GraphModule(_root_of_trace(), graph)


@contextmanager
def guarding(guard_tracer: GuardTracer) -> Iterator[None]:
    """While open, code of this thread reads values of the batch through `guard_tracer`."""
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


def _node_of(tensor: Any) -> fx.Node | None:
    """The node of the current trace that made a tensor, or None."""
    mode = get_proxy_mode()
    if mode is None or not isinstance(tensor, torch.Tensor):
        return None
    slot: Any = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _root_of_trace() -> Any:
    mode: Any = get_proxy_mode()
    assert mode is not None
    return mode.tracer.root
