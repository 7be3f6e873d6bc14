"""Several layers per slot: consecutive layers of a partition merged into one segment.

Merged layers make fewer and larger transfers, and fewer values to stash, at the price of larger slots and workspaces.
Segments that are not layers (a prologue, an interlude, the last segment with the loss) stay by themselves. No module is
changed. Invariant: the merged partition computes what the given one does, op for op, with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from relay.capture import layer_of_segment
from relay.partition.segments import Partition, Segment, Value


class LayersSegment(nn.Module):
    """The modules of several segments as one: values from outside -> values that are used outside.

    The inputs and then the outputs of each layer, in order, form one list of values. `indices[i]` are the indices in it
    of layer i's arguments, `used` those of the outputs.
    """

    def __init__(self, layers: Sequence[nn.Module], indices: Sequence[tuple[int, ...]], used: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.indices = tuple(indices)
        self.used = tuple(used)

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        known = list(values)
        for number, (layer, indices) in enumerate(zip(self.layers, self.indices, strict=True)):
            with layer_of_segment(number):
                known += layer(*[known[index] for index in indices])
        return tuple(known[index] for index in self.used)


def merge_layers(partition: Partition, count: int) -> Partition:
    """The partition with up to `count` consecutive layers in a segment. For a count of 1 it is returned unchanged."""
    if count == 1:
        return partition
    *rest, last = partition.segments
    groups = [*_groups(rest, count), [last]] if partition.has_loss else _groups(partition.segments, count)
    number = {segment.index: new for new, group in enumerate(groups) for segment in group}
    values = [
        Value(
            value.index,
            value.shape,
            value.dtype,
            None if value.producer is None else number[value.producer],
            [number[consumer] for consumer in value.consumers],
            order=value.order,
        )
        for value in partition.values
    ]
    segments = []
    for new, group in enumerate(groups):
        segment = _merged(group, new, partition)
        for value in _made(group):
            values[value].consumers = [consumer for consumer in values[value].consumers if consumer != new]
        for value in segment.inputs:  # once, also if several of its layers use it
            values[value].consumers = list(dict.fromkeys(values[value].consumers))
        segments.append(segment)
    return replace(partition, segments=segments, values=values)


@dataclass
class _Run:
    """Consecutive segments of one kind. Layers of a run may be merged."""

    kind: object
    segments: list[Segment]


def _groups(segments: Sequence[Segment], count: int) -> list[list[Segment]]:
    runs: list[_Run] = []
    for segment in segments:
        if runs and segment.kind is not None and runs[-1].kind == segment.kind:
            runs[-1].segments.append(segment)
        else:
            runs.append(_Run(segment.kind, [segment]))
    # Consecutive layers that each differ in class from their neighbours (linear, activation, ...) also form one run.
    joined: list[_Run] = []
    for run in runs:
        alone = len(run.segments) == 1 and run.kind is not None
        if alone and joined and joined[-1].kind == "mixed":
            joined[-1].segments += run.segments
        else:
            joined.append(_Run("mixed" if alone else run.kind, run.segments))
    groups: list[list[Segment]] = []
    for run in joined:
        started = False
        for segment in run.segments:
            fits = started and run.kind is not None and len(groups[-1]) < count
            if fits and not _share_a_buffer(groups[-1], segment):
                groups[-1].append(segment)
            else:
                groups.append([segment])
                started = True
    return groups


def _share_a_buffer(group: Sequence[Segment], segment: Segment) -> bool:
    """Whether a merged segment would hold one buffer twice, with two new values."""
    return any(set(other.buffers.values()) & set(segment.buffers.values()) for other in group)


def _made(group: Sequence[Segment]) -> list[int]:
    return [value for segment in group for value in segment.outputs]


def _merged(group: Sequence[Segment], index: int, partition: Partition) -> Segment:
    first = group[0]
    if len(group) == 1:
        return Segment(
            index, first.name, first.module, first.inputs, first.outputs, first.parameters, first.buffers,
            first.alike, first.kind, first.layer_index,
        )  # fmt: skip
    made = _made(group)
    inside = {segment.index for segment in group}
    inputs = tuple(dict.fromkeys(value for segment in group for value in segment.inputs if value not in made))
    known = [*inputs, *made]
    outside = {value for value in made if not set(partition.values[value].consumers) <= inside}
    handed_on = [value for value in made if value in outside or value in partition.results]
    indices = [tuple(known.index(value) for value in segment.inputs) for segment in group]
    used = [known.index(value) for value in handed_on]
    alike = None
    if all(segment.alike is not None for segment in group):
        alike = ([segment.alike[0] for segment in group], [segment.alike[1:] for segment in group], indices, used)
    return Segment(
        index,
        "+".join(segment.name for segment in group),  # all of them: with active_layers= any layers may come together
        LayersSegment([segment.module for segment in group], indices, used),
        inputs,
        tuple(handed_on),
        {f"layers.{n}.{own}": name for n, segment in enumerate(group) for own, name in segment.parameters.items()},
        {f"layers.{n}.{own}": name for n, segment in enumerate(group) for own, name in segment.buffers.items()},
        alike,
        first.kind,
        first.layer_index,
        len(group),
    )
