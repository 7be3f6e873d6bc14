"""One run of a model's own forward with its layers left out: what the code around the layers takes from where.

For models whose code around the layers cannot be traced. The batch is real, layers return made-up numbers of the right
shapes, and every op is watched: each tensor is labelled with the layers' outputs and the parameters that it depends on.
Tensors that share memory share labels, so writes in place are seen. Invariant: the model is as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from relay.capture import as_fake, autocast, call_with, run_fake
from relay.capture.guards.data_guards import READS
from relay.capture.guards.mutated_arguments import call_observed, write_back
from relay.capture.guards.plain_tensors import PlainTensors
from relay.capture.guards.unsupported import hooks_wait
from relay.capture.states.own_generators import have_drawn, python_numbers, same_python_numbers
from relay.graph.pytree import TensorTree, tensor_leaves
from relay.graph.recorded_outputs import recorded_names
from relay.models.huggingface import without_cache
from relay.partition.state_at_calls import StateAtCalls

Labels = frozenset[tuple[str, Any]]
"""What a tensor depends on: ("output", (call, number)), ("state", name), ("draw", (calls before it, its number))."""

Origin = tuple[int, int]
"""A tensor of a call, by the call's number and the tensor's number."""


@dataclass(frozen=True, eq=False)
class Argument:
    """A tensor that a layer is given. `output` is the output of a layer that it is, `first` where it was given first.

    `labels` are what it depends on, and what decides that it is given.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    output: Origin | None
    first: Origin
    labels: Labels


@dataclass(frozen=True, eq=False)
class LayerCall:
    """A call of a layer: its outputs' shapes and dtypes, how they are nested, and what is needed to repeat it.

    `gradients` tells whether it is outside of no_grad, `labels` what decides that it is called.
    """

    name: str
    block: nn.Module
    forward: Callable[..., Any]
    gradients: bool
    arguments: tuple[Argument, ...]
    input_tree: TensorTree
    labels: Labels
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    output_tree: TensorTree
    changes: bool

    @property
    def described(self) -> Any:
        """What must be equal in every run."""
        given = [(one.shape, one.dtype, one.output, one.first) for one in self.arguments]
        return self.name, self.gradients, given, self.outputs

    def returned(self, outputs: Sequence[torch.Tensor], args: Any, kwargs: Any, tensors: Sequence[torch.Tensor]) -> Any:
        """What the layer returns, given its output tensors; its arguments are changed as it changes them."""
        if not self.changes:
            return self.output_tree.fill(outputs)
        result, given = self.output_tree.fill(outputs)
        write_back((args, kwargs), given, tensors)
        return result


@dataclass(eq=False)
class DryRun:
    """What was seen: the layers' calls, the model's output, and what its loss and other results depend on."""

    calls: list[LayerCall] = field(default_factory=list)
    output: Any = None
    needed: Labels = frozenset()
    changed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Buffers that the code changes, each with how many calls of layers had been made when it did."""
    changed_by: dict[str, Labels] = field(default_factory=dict)
    """What the new values of these buffers depend on."""
    draws_python: bool = False
    """Whether the code around the layers draws numbers from Python's or numpy's generator."""


@contextmanager
def layers_replaced(
    blocks: Mapping[str, nn.Module], stand_in: Callable[[str, nn.Module, Callable[..., Any], Any, Any], Any]
) -> Iterator[None]:
    """While open, a call of a layer calls `stand_in(name, block, forward, args, kwargs)` instead."""
    originals = [(block, block.__dict__.get("forward")) for block in blocks.values()]

    def replaced(name: str, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: stand_in(name, block, forward, args, kwargs)

    try:
        for name, block in blocks.items():
            block.forward = replaced(name, block, block.forward)
        yield
    finally:
        for block, own in originals:
            if own is None:
                block.__dict__.pop("forward", None)
            else:
                block.forward = own


def dry_run(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    skipped: Container[str],
    states: Mapping[str, torch.Tensor],
    batch: Sequence[torch.Tensor],
    tree: TensorTree,
    compute: torch.dtype,
    seed: int,
) -> DryRun:
    """Run a model's forward without its layers, with random numbers of that seed. Raises whatever its code raises."""
    found = DryRun()
    watch = _Watch(found)
    at_calls = StateAtCalls(type(model).__name__)
    records: list[str] = []
    copies = [
        state.detach() if isinstance(state, nn.Parameter) else state.detach().clone() for state in states.values()
    ]
    versions = [[copy._version for copy in copies]]
    origins = _Origins(watch)

    def stand_in(name: str, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with watch.paused(), same_python_numbers(python_numbers()):
            tensors, input_tree = tensor_leaves((args, kwargs))
            observed = _Observed(block, forward, input_tree)
            with autocast(compute), at_calls.call(name, block):
                fakes = run_fake(observed, as_fake([tensor.detach() for tensor in tensors]), name)
            shapes = tuple((tuple(fake.shape), fake.dtype) for fake in fakes)
            number = len(found.calls)
            call = LayerCall(
                name, block, forward, torch.is_grad_enabled(), origins.arguments(tensors, number), input_tree,
                watch.control, shapes, observed.output_tree, observed.changes,
            )  # fmt: skip
            found.calls.append(call)
            records.extend(recorded_names())
            if name in skipped:
                outputs = tensors[:1]
            else:
                outputs = [_random(shape, dtype) for shape, dtype in shapes]
                for index, output in enumerate(outputs):
                    watch.label(output, frozenset({("output", (number, index))}))
                    origins.add(output, (number, index))
            versions.append([copy._version for copy in copies])
            return call.returned(outputs, args, kwargs, tensors)

    # Nothing here requires a gradient, so none is recorded; whether the model turns them off can be seen.
    with torch.random.fork_rng(devices=()), torch.enable_grad(), hooks_wait(), autocast(compute):
        torch.manual_seed(seed)
        for name, copy in zip(states, copies, strict=True):
            watch.label(copy, frozenset({("state", name)}))
        with PlainTensors(model), layers_replaced(blocks, stand_in), without_cache(model), watch:
            given, drawn = tree.fill([tensor.detach().clone() for tensor in batch]), python_numbers()
            found.output = call_with(model, list(states.values()), copies, (), given)
            found.draws_python = have_drawn(drawn)
            with watch.paused():
                at_calls.check()
    if records:
        raise NotImplementedError(f"hooks within layers record {records[0]!r}")
    results, _ = tensor_leaves(found.output)
    found.needed = watch.control.union(*(watch.labels(result) for result in results))
    versions.append([copy._version for copy in copies])
    for name, copy, own in zip(states, copies, zip(*versions, strict=True), strict=True):
        changes = tuple(done for done, (before, after) in enumerate(itertools.pairwise(own)) if before != after)
        if changes:
            found.changed[name], found.changed_by[name] = changes, watch.labels(copy)
    return found


class _Origins:
    """Which output of a layer a tensor is, or where it was first given to one, as long as nothing writes to it."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch
        self._outputs: dict[int, tuple[torch.Tensor, int, Origin]] = {}
        self._given: dict[int, tuple[torch.Tensor, int, Origin]] = {}

    def add(self, output: torch.Tensor, origin: Origin) -> None:
        """Note an output of a layer."""
        self._outputs[id(output)] = output, output._version, origin

    def arguments(self, tensors: Sequence[torch.Tensor], call: int) -> tuple[Argument, ...]:
        """The arguments of a layer."""
        found = []
        for number, tensor in enumerate(tensors):
            output = self._known(self._outputs, tensor)
            first = self._known(self._given, tensor)
            if first is None:
                first = call, number
                self._given[id(tensor)] = tensor, tensor._version, first
            labels = self._watch.labels(tensor) | self._watch.control
            found.append(Argument(tuple(tensor.shape), tensor.dtype, output, first, labels))
        return tuple(found)

    @staticmethod
    def _known(table: Mapping[int, tuple[torch.Tensor, int, Origin]], tensor: torch.Tensor) -> Origin | None:
        entry = table.get(id(tensor))
        return None if entry is None or tensor._version != entry[1] else entry[2]


class _Observed(nn.Module):
    """A layer as a function from tensors to tensors, which notes how its outputs are nested."""

    output_tree: TensorTree
    changes = False

    def __init__(self, block: nn.Module, forward: Callable[..., Any], input_tree: TensorTree) -> None:
        super().__init__()
        self.block = block
        self.call = forward
        self.input_tree = input_tree

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs = self.input_tree.fill(tensors)
        result, given = call_observed(self.call, args, kwargs)
        self.changes = given is not None
        outputs, self.output_tree = tensor_leaves((result, given) if self.changes else result)
        return tuple(outputs)


class _Watch(TorchFunctionMode):
    """Labels what every op returns and writes to. `control` is what Python numbers, and so branches, depend on."""

    def __init__(self, found: DryRun) -> None:
        super().__init__()
        self._found = found
        self._labels: dict[int, Labels] = {}
        self._alive: list[torch.Tensor] = []
        self._paused = False
        self._draws = 0
        self.control: Labels = frozenset()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While open, nothing is labelled."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def labels(self, tensor: torch.Tensor) -> Labels:
        """What a tensor depends on."""
        return self._labels.get(_memory(tensor), frozenset())

    def label(self, tensor: torch.Tensor, labels: Labels) -> None:
        """Add labels to all tensors in the memory of one."""
        if labels:
            self._alive.append(tensor)  # so that its memory is no other tensor's later
            self._labels[_memory(tensor)] = self.labels(tensor) | labels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        taken = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        with torch._C.DisableTorchFunction():
            versions = [tensor._version for tensor in taken]
            drawn = torch.get_rng_state()
        result = func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            labels: Labels = frozenset().union(*(self.labels(tensor) for tensor in taken))
            if not torch.equal(drawn, torch.get_rng_state()):
                self._draws += 1
                labels |= {("draw", (len(self._found.calls), self._draws))}
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            for tensor in made:
                self.label(tensor, labels)
            for tensor, version in zip(taken, versions, strict=True):
                if tensor._version != version:
                    self.label(tensor, labels)
            if func in READS or getattr(func, "__name__", "") in ("numpy", "__array__", "__contains__"):
                self.control |= labels
        return result


def _memory(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a sparse tensor, or one within a transform
        return id(tensor)


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32)).mul_(0.1).to(dtype)
    return torch.zeros(shape, dtype=dtype)
