"""Several layers a slot: consecutive layers of a partition made into one segment.

A slot then holds several layers: fewer and larger transfers, fewer values between segments to stash, for a larger
slot and work space. What is merged runs as it would in plain PyTorch; what stands between layers (a prologue, the
last segment with its loss) stays by itself. It changes no module. Invariant: the merged partition computes what the
given one does, op for op, and draws the same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from relay.capture import layer_of_segment
from relay.partition.segments import Partition, Segment, Value


class LayersSegment(nn.Module):
    """Several segments' modules as one: the values that come from outside -> those that are used outside.

    `places[i]` says for each argument of layer i which of the known values it is: the inputs, then what each layer
    made, in order; `used` which of them are handed on.
    """

    def __init__(self, layers: Sequence[nn.Module], places: Sequence[tuple[int, ...]], used: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.places = tuple(places)
        self.used = tuple(used)

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        known = list(values)
        for number, (layer, places) in enumerate(zip(self.layers, self.places, strict=True)):
            with layer_of_segment(number):
                known += layer(*[known[place] for place in places])
        return tuple(known[place] for place in self.used)


def merge_layers(partition: Partition, count: int) -> Partition:
    """The partition with up to `count` consecutive layers in a segment; itself for 1."""
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
            values[value].consumers = [one for one in values[value].consumers if one != new]
        for value in segment.inputs:  # once, however many of its layers take it
            values[value].consumers = list(dict.fromkeys(values[value].consumers))
        segments.append(segment)
    return replace(partition, segments=segments, values=values)


@dataclass
class _Run:
    """Consecutive layers that may be merged."""

    kind: object
    segments: list[Segment]


def _groups(segments: Sequence[Segment], count: int) -> list[list[Segment]]:
    runs: list[_Run] = []
    for segment in segments:
        if runs and segment.kind is not None and runs[-1].kind == segment.kind:
            runs[-1].segments.append(segment)
        else:
            runs.append(_Run(segment.kind, [segment]))
    # Layers of a list that are all of another class than their neighbours (linear, activation, ...) are one run too.
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
    """Whether one buffer would be two in a merged segment, each with a new value of its own."""
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
    inputs = tuple(dict.fromkeys(value for one in group for value in one.inputs if value not in made))
    known = [*inputs, *made]
    outside = {value for value in made if not set(partition.values[value].consumers) <= inside}
    handed_on = [value for value in made if value in outside or value in partition.results]
    places = [tuple(known.index(value) for value in one.inputs) for one in group]
    used = [known.index(value) for value in handed_on]
    alike = None
    if all(one.alike is not None for one in group):
        alike = ([one.alike[0] for one in group], [one.alike[1:] for one in group], places, used)
    return Segment(
        index,
        "+".join(one.name for one in group),  # all of them: with active_layers= any layers may come together
        LayersSegment([one.module for one in group], places, used),
        inputs,
        tuple(handed_on),
        {f"layers.{n}.{own}": name for n, one in enumerate(group) for own, name in one.parameters.items()},
        {f"layers.{n}.{own}": name for n, one in enumerate(group) for own, name in one.buffers.items()},
        alike,
        first.kind,
        first.layer_index,
        len(group),
    )
