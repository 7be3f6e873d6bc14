"""A model whose code after its last layer cannot be traced: that code runs eagerly, as the model's own Python.

A mask that selects rows, a loss like CTC's, or an autograd function of the model's own has no graph. The last segment
then calls the model's forward with its layers left out: each returns what it was given, or, if nothing depends on it,
zeros. Parameters and buffers on which nothing there depends are zeros too, and are not loaded. What comes before the
last layer is traced as always. Invariant: the loss, the results and their gradients are those of the model's forward;
a forward in which that cannot be seen to hold is not taken on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from relay.capture import BLOCK, call_with
from relay.capture.guards.unsupported import hooks_refused
from relay.errors import CaptureError
from relay.graph.pytree import TensorTree, tensor_leaves
from relay.models.huggingface import without_cache
from relay.partition.dry_run import DryRun, dry_run, layers_replaced
from relay.partition.segments import Partition, Segment, Value

SEEDS = 4
"""How many dry runs must call the same layers. A random number that decides which layers run shows in these."""


@dataclass(frozen=True, eq=False)
class Around:
    """A model and what its forward is called with: for running the code around its layers."""

    model: nn.Module
    blocks: Mapping[str, nn.Module]
    skipped: Container[str]
    states: Mapping[str, torch.Tensor]
    batch: Sequence[torch.Tensor]
    tree: TensorTree
    compute: torch.dtype

    def outside(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers outside of the layers."""
        inside = {id(tensor) for block in self.blocks.values() for tensor in [*block.parameters(), *block.buffers()]}
        used = {id(part) for block in self.blocks.values() for part in block.modules()}
        own = {
            id(tensor)
            for part in self.model.modules()
            if id(part) not in used
            for tensor in [*part._parameters.values(), *part._buffers.values()]
            if tensor is not None
        }
        return {name: one for name, one in self.states.items() if id(one) in own or id(one) not in inside}

    def dry_run(self) -> DryRun | None:
        """A dry run, or None where the code cannot run by itself: it fails, or other layers run in another run."""
        if any(tensor.is_meta or type(tensor) is not torch.Tensor for tensor in self.batch):
            return None
        runs = []
        for seed in range(SEEDS):
            try:
                with hooks_refused():
                    found = dry_run(
                        self.model, self.blocks, self.skipped, self.outside(), self.batch, self.tree, self.compute, seed
                    )
            except Exception:
                return None
            runs.append(found)
            if [(one.name, one.outputs) for one in found.calls] != [(one.name, one.outputs) for one in runs[0].calls]:
                return None
        return runs[-1] if runs[-1].calls else None


def needed_outputs(found: DryRun) -> list[tuple[int, int]]:
    """The outputs of layers on which the loss and the results depend: (call, number), in order."""
    return sorted(index for kind, index in found.needed if kind == "output")


def refusal(found: DryRun, loss: Callable[[Any], torch.Tensor | None]) -> str:
    """Why the code after the last layer cannot run by itself; empty if it can."""
    if loss(found.output) is None:
        return "there is no loss"
    if any(kind == "draw" and index < len(found.calls) for kind, index in found.needed):
        return "the loss depends on random numbers drawn before the last layer"
    if any(early and late for early, late in found.changed.values()):
        return "a buffer is changed both before and after the last layer"
    return ""


def drop_after_layers(graph: fx.Graph) -> None:
    """Remove from a trace that ends in outputs of layers what was traced after the last layer, writes included."""
    for node in reversed(list(graph.nodes)):
        if node.target is BLOCK:
            return
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)


def with_eager_epilogue(
    partition: Partition, around: Around, found: DryRun, loss: Callable[[Any], torch.Tensor | None], why: str
) -> Partition:
    """The partition of a trace that ends in the needed outputs, with the eager segment in place of its last one."""
    *segments, last = partition.segments
    model = type(around.model).__name__
    warnings.warn(
        f"the code of {model} after its last layer runs eagerly, op by op, since {why}. Results are the same, but it "
        "is slower, and only devices that execute PyTorch can do it.",
        stacklevel=2,
    )
    outputs = needed_outputs(found)
    outside = around.outside()
    names = [name for name in outside if ("state", name) in found.needed or found.changed.get(name, (False, False))[1]]
    module = EagerEpilogue(around, found, outputs, {name: outside[name] for name in names}, loss)
    values: list[Value] = partition.values
    made_by_last = set(last.outputs)
    for value in values:
        if last.index in value.consumers:
            value.consumers.remove(last.index)
    inputs = (*partition.inputs, *(_source(partition, last, position) for position in range(len(outputs))))
    results, tree = tensor_leaves(found.output)
    kept = [value for value in values if value.index not in made_by_last]
    assert [value.index for value in kept] == list(range(len(kept)))
    new = [
        Value(len(kept) + position, tuple(result.shape), result.dtype, last.index)
        for position, result in enumerate([torch.empty(()), *results])
    ]
    segment = Segment(
        last.index, "epilogue", module, inputs, tuple(value.index for value in new),
        {own: name for own, name in module.names.items() if isinstance(outside[name], nn.Parameter)},
        {own: name for own, name in module.names.items() if not isinstance(outside[name], nn.Parameter)},
    )  # fmt: skip
    for number in inputs:
        kept[number].consumers.append(last.index)
    partition.segments, partition.values = [*segments, segment], [*kept, *new]
    partition.has_loss, partition.result_tree = True, tree
    partition.results = tuple(value.index for value in new[1:])
    return partition


def _source(partition: Partition, last: Segment, position: int) -> int:
    """The value that the last segment of the traced partition hands on as its result number `position`."""
    graph: fx.Graph = last.module.graph.graph  # type: ignore[union-attr,assignment]
    placeholders = graph.find_nodes(op="placeholder")
    result = next(iter(reversed(graph.nodes))).args[0][position]
    return last.inputs[placeholders.index(result) - len(last.module.state_names)]  # type: ignore[arg-type]


class EagerEpilogue(nn.Module):
    """(tensors of the batch, needed outputs of layers) -> (loss, results): the model's forward without its layers.

    `names` are the model's names of its parameters and buffers, by its own.
    """

    runs_eagerly = True

    def __init__(
        self,
        around: Around,
        found: DryRun,
        outputs: Sequence[tuple[int, int]],
        states: Mapping[str, torch.Tensor],
        loss: Callable[[Any], torch.Tensor | None],
    ) -> None:
        super().__init__()
        # The model is no part of this module: its layers are not loaded.
        self.__dict__["around"] = replace(around, batch=())
        self.count = len(around.batch)
        outside = around.outside()
        self.originals = tuple(outside.values())
        self.outside = {
            name: (tuple(one.shape), one.dtype, isinstance(one, nn.Parameter)) for name, one in outside.items()
        }
        self.calls = found.calls
        self.outputs = list(outputs)
        self.loss = loss
        self.names = {f"own__{name.replace('.', '__')}": name for name in states}
        for own, name in self.names.items():
            if isinstance(states[name], nn.Parameter):
                self.register_parameter(own, states[name])  # type: ignore[arg-type]
            else:
                self.register_buffer(own, states[name])

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        around: Around = self.__dict__["around"]
        count = self.count
        given = dict(zip(self.outputs, tensors[count:], strict=True))
        where = tensors[0].device if tensors else torch.device("cpu")
        own = {name: getattr(self, local) for local, name in self.names.items()}
        states = [own[name] if name in own else _zeros(*like, where) for name, like in self.outside.items()]
        done = 0

        def stand_in(name: str, _: nn.Module, __: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            nonlocal done
            if done == len(self.calls) or self.calls[done].name != name:
                expected = self.calls[done].name if done < len(self.calls) else "no further layer"
                raise CaptureError(
                    f"the model calls layer {name!r} where {expected!r} was expected: which layers run depends on the "
                    "data. Choose them by step(batch, active_layers=...).",
                    layer=name,
                )
            call, number = self.calls[done], done
            done += 1
            inputs, _tree = tensor_leaves((args, kwargs))
            if name in around.skipped:
                return call.returned(inputs[:1], args, kwargs, inputs)
            made = [
                given[number, index] if (number, index) in given else _zeros_of(shape, dtype, where)
                for index, (shape, dtype) in enumerate(call.outputs)
            ]
            return call.returned(made, args, kwargs, inputs)

        with layers_replaced(around.blocks, stand_in), without_cache(around.model), hooks_refused():
            shell = _WithAssignedBuffers(around.model)
            output = call_with(shell, self.originals, states, (), around.tree.fill(tensors[:count]))
        loss = self.loss(output)
        assert loss is not None
        results, _ = tensor_leaves(output)
        return (loss, *(result.detach() for result in results))


class _WithAssignedBuffers(nn.Module):
    """The model; what its forward assigns to buffers is copied into those that stand for them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        before = [(part, name, one) for part in self.model.modules() for name, one in part._buffers.items()]
        output = self.model(**inputs)
        for part, name, buffer in before:
            assigned = part._buffers.get(name)
            if buffer is not None and assigned is not None and assigned is not buffer:
                with torch.no_grad():
                    buffer.copy_(assigned)
        return output


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, trained: bool, where: torch.device) -> torch.Tensor:
    """What stands for a parameter or buffer on which nothing depends. A buffer may be written to, so it has memory."""
    return _zeros_of(shape, dtype, where) if trained else torch.zeros(shape, dtype=dtype, device=where)


def _zeros_of(shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    zeros = torch.zeros((), dtype=dtype, device=where).expand(shape).detach()
    return zeros.requires_grad_(dtype.is_floating_point and torch.is_grad_enabled())
