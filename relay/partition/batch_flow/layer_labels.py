"""The labels of what a layer returns: its own code is traced for both lengths, and the batch followed through it.

Layers built alike are followed once. Two are alike here if they are equal but for parameters' values and for whole
numbers that are each layer's own place, as `layer_idx` is. Invariant: a layer is called on fake tensors only, and
is left as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from relay.capture import BlockCall, autocast, call_with, trace
from relay.capture.guards.held_tensors import replacing
from relay.capture.guards.mutated_arguments import call_recorded
from relay.capture.guards.plain_tensors import PlainTensors
from relay.capture.guards.unsupported import hooks_wait, inside_layer
from relay.errors import RelayError
from relay.graph.pytree import tensor_leaves
from relay.partition.batch_flow.flow import BatchFlow
from relay.partition.batch_flow.labels import Cause, Kind, Label, free
from relay.partition.batch_flow.sorted_rows import computes_rows_alone
from relay.partition.batch_flow.trace_pair import TracePair
from relay.partition.find_blocks import same_structure, undisturbed

SORTING = ("sort", "argsort", "histc", "bincount")
"""Ops that find the rows of each expert."""


@dataclass(frozen=True, eq=False)
class _Followed:
    name: str
    block: nn.Module
    number: int
    called: Any
    labels: tuple[Label, ...] | None
    causes: tuple[Cause, ...]


class LayerLabels:
    """Labels the outputs of layers, given the labels of their inputs. `assumed` are the ops taken for row-wise."""

    def __init__(self, lengths: tuple[int, int]) -> None:
        self.assumed: list[Cause] = []
        self._lengths = lengths
        self._followed: list[_Followed] = []
        self._numbers: dict[int, int] = {}

    def labels(
        self,
        call: BlockCall,
        small: Sequence[torch.Tensor],
        large: Sequence[torch.Tensor],
        given: Sequence[Label],
    ) -> tuple[Label, ...] | None:
        """The labels of what a call of a layer returns for fake tensors; None if it cannot be followed."""
        number = self._numbers.setdefault(id(call.block), len(self._numbers))
        shapes = tuple((tuple(one.shape), tuple(two.shape), one.dtype) for one, two in zip(small, large, strict=True))
        inputs = tuple(_taken(label) for label in given)
        called = (
            str(call.input_tree.spec), repr(call.input_tree.constants), call.compute, call.changes, shapes,
            tuple((label.kind, label.dim, label.unit) for label in inputs),
        )  # fmt: skip
        found = next(
            (one for one in self._followed if one.called == called and self._alike(one, call.block, number)), None
        )
        if found is None:
            labels, causes = self._follow(call, small, large, inputs)
            found = _Followed(call.name, call.block, number, called, labels, causes)
            self._followed.append(found)
        self.assumed += [replace(cause, layer=call.name) for cause in found.causes]
        if found.labels is None:
            return None
        return tuple(
            replace(label, cause=replace(label.cause, layer=call.name))
            if label.cause is not None and label.cause.layer == found.name
            else label
            for label in found.labels
        )

    def _alike(self, other: _Followed, block: nn.Module, number: int) -> bool:
        if other.block is block:
            return True
        # Attributes that hold the layers' own places, each its own, do not count.
        counting = {
            id(module): {
                name
                for name, value in module.__dict__.items()
                if not (type(value) is int and value == other.number and counterpart.__dict__.get(name) == number)
            }
            for module, counterpart in zip(other.block.modules(), block.modules(), strict=False)
        }
        return same_structure(other.block, block, counting)  # type: ignore[arg-type]

    def _follow(
        self, call: BlockCall, small: Sequence[torch.Tensor], large: Sequence[torch.Tensor], given: Sequence[Label]
    ) -> tuple[tuple[Label, ...] | None, tuple[Cause, ...]]:
        originals = [*call.block.parameters(), *call.block.buffers()]

        class Called(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.block = call.block

            def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
                args, kwargs = call.input_tree.fill(tensors)
                output, _ = call_recorded(call.forward, args, kwargs, call.recorded)
                return list(tensor_leaves(output)[0])

        def run(states: list[torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            with replacing(originals, states, call.name, constants=False, elsewhere=False):
                outputs: list[torch.Tensor] = call_with(Called(), originals, states, tensors)
            return outputs

        try:
            with inside_layer(), hooks_wait(), torch.no_grad(), autocast(call.compute):
                traces = []
                for tensors in (small, large):
                    with undisturbed(call.block), PlainTensors(call.block):  # both begin alike
                        traces.append(trace(run, (originals, list(tensors)), call.name))
        except (RelayError, RuntimeError, TypeError, ValueError, NotImplementedError):
            return None, (Cause("its code", "cannot be traced"),)
        try:
            first, second = traces
            pair = TracePair(first, second, self._lengths)
        except ValueError as unlike:
            return None, (Cause("its code", f"differs with the batch's length: {unlike}"),)
        inputs = dict.fromkeys(second.graph.find_nodes(op="placeholder"), free())
        placeholders = list(inputs)
        inputs.update(zip(placeholders[len(originals) :], given, strict=True))
        flow = BatchFlow(pair, inputs, None, call.name, inside=True)
        if _sorts_by_expert(second.graph, flow.outputs):
            found = computes_rows_alone(call, small, large, given, self._lengths)
            if found is None:
                return None, (Cause("grouped_mm", "takes rows that are sorted by expert, which is not followed"),)
            return tuple(_of_sorted(one, own, call.name) for one, own in zip(flow.outputs, found, strict=True)), ()
        return tuple(flow.outputs), tuple(flow.assumed)


def _sorts_by_expert(graph: fx.Graph, outputs: Sequence[Label]) -> bool:
    """Whether rows are sorted for a product in groups. Routed experts put them back, which is not followed."""
    mixed = [label.cause for label in outputs if label.kind is Kind.MIXED]
    grouped = any("grouped_mm" in str(node.target) for node in graph.nodes)
    return grouped and bool(mixed) and all(cause is not None and cause.op in SORTING for cause in mixed)


def _of_sorted(label: Label, found: Label, layer: str) -> Label:
    """The label of an output that sorting had made MIXED, by what runs of the layer have shown."""
    if label.kind is not Kind.MIXED or found.kind is not Kind.MIXED:
        return label if label.kind is not Kind.MIXED else found
    reason = "takes rows sorted by expert, and a sample comes out otherwise beside other samples (by a capacity?)"
    return replace(label, cause=Cause("grouped_mm", reason, layer=layer))


def _taken(label: Label) -> Label:
    """A label as a layer takes it: what it computes with parameters does not follow from the batch alone."""
    explained = label.kind in (Kind.MIXED, Kind.UNKNOWN)
    return replace(label, given=False, terms=(), cause=label.cause if explained else None)
