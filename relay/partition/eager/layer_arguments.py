"""A model whose code before its last layer cannot be traced: all code around its layers runs eagerly.

Images merged into token embeddings by a mask, or an autograd function before the first layer, have no graph. What the
layers are given then comes from the model's own forward with its layers left out: what depends on no layer from one run
of it, the prologue, and what depends on layers before from a run for each such layer, an interlude. Layers that are
given the very output of another take it as it is. Invariant: every argument, buffer and random number is computed by
exactly one part; a forward in which that cannot be seen to hold is not taken on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from relay.capture import BlockCall
from relay.errors import CaptureError
from relay.graph.pytree import TensorTree
from relay.partition.eager.around import Around, AroundLayers
from relay.partition.eager.dry_run import DryRun, Labels, LayerCall, Origin
from relay.partition.eager.epilogue import Loss, add_epilogue, epilogue_states, needed_outputs
from relay.partition.graph_split import BlockSegment, layer_segment
from relay.partition.segments import Partition, Segment, Value

PROLOGUE = -1
"""The number of the part before all layers. Others have that of the layer's call that they come before."""


class _Ended(BaseException):
    """Ends a forward once all that is wanted of it is there. No code of a model's catches it."""


class LayerArguments(AroundLayers):
    """(tensors of the batch, some outputs of layers) -> the `wanted` arguments of layers, in order."""

    def __init__(
        self,
        around: Around,
        found: DryRun,
        outputs: Sequence[Origin],
        states: set[str],
        wanted: Sequence[Origin],
        checked: Sequence[int],
        where: str,
        why: str,
    ) -> None:
        super().__init__(around, found, outputs, states, where, why)
        self.wanted = list(wanted)
        self.checked = frozenset(checked)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: dict[Origin, torch.Tensor] = {}
        wanted = frozenset(self.wanted)
        last = max([*self.checked, *(call for call, _ in self.wanted)])

        def seen(number: int, call: LayerCall, given: Sequence[torch.Tensor], tree: TensorTree) -> None:
            if number in self.checked:
                _check_constants(call, tree)
            for index, tensor in enumerate(given):
                if (number, index) in wanted:
                    _check_shape(call, index, tensor)
                    found[number, index] = tensor
            if number == last:
                raise _Ended

        with contextlib.suppress(_Ended):
            self.run(tensors, seen)
        return tuple(found[origin] for origin in self.wanted)


def _check_constants(call: LayerCall, tree: TensorTree) -> None:
    """Raise CaptureError if a layer is given other numbers than it was compiled for, or a tensor where it had none."""
    expected = call.input_tree
    plain = (bool, int, float, complex, str, type(None), torch.dtype)
    differing = tree.spec != expected.spec or tree.places() != expected.places()
    for own, other in zip(tree.constants, expected.constants, strict=False):
        differing |= isinstance(own, plain) and isinstance(other, plain) and own != other
    if differing:
        raise CaptureError(
            f"layer {call.name!r} is given arguments {tree.constants}, but was compiled for {expected.constants}: they "
            "depend on the data. Pass such numbers as tensors.",
            layer=call.name,
        )


def _check_shape(call: LayerCall, index: int, tensor: torch.Tensor) -> None:
    """Raise CaptureError if a layer is given a tensor of another shape or dtype than it was compiled for."""
    expected = call.arguments[index]
    if (tuple(tensor.shape), tensor.dtype) != (expected.shape, expected.dtype):
        raise CaptureError(
            f"layer {call.name!r} is given a tensor of shape {tuple(tensor.shape)} in {tensor.dtype}, but was compiled "
            f"for {expected.shape} in {expected.dtype}. Shapes must not depend on the data: pad it to one shape.",
            layer=call.name,
        )


def argument_parts(found: DryRun) -> dict[int, list[Origin]]:
    """The arguments that each part computes: of the prologue, and of the interludes before some calls."""
    parts: dict[int, list[Origin]] = {}
    for number, call in enumerate(found.calls):
        for index, argument in enumerate(call.arguments):
            if argument.output is None and argument.first == (number, index):
                part = number if _outputs_in(argument.labels) else PROLOGUE
                parts.setdefault(part, []).append((number, index))
    return parts


def _outputs_in(labels: Labels) -> list[Origin]:
    return sorted(origin for kind, origin in labels if kind == "output")


def _states_of(found: DryRun, parts: Mapping[int, list[Origin]]) -> dict[int, set[str]]:
    """The parameters and buffers that each part takes, and the buffers that it changes; the last is the epilogue."""
    last = len(found.calls)
    states = {
        part: {
            name
            for call, index in wanted
            for kind, name in found.calls[call].arguments[index].labels
            if kind == "state"
        }
        for part, wanted in parts.items()
    }
    states[last] = epilogue_states(found)
    for name, changes in found.changed.items():
        if changes[-1] < last:
            part = changes[0] if _outputs_in(found.changed_by[name]) else PROLOGUE
            states.setdefault(part, set()).add(name)
    return states


def refusal_around(found: DryRun) -> str:
    """Why the code around the layers cannot run in parts; empty if it can."""
    parts, last = argument_parts(found), len(found.calls)
    states = _states_of(found, parts)
    for name, changes in found.changed.items():
        if len(changes) > 1 or sum(name in own for own in states.values()) > 1:
            return f"the buffer {name!r} is changed in one part of the code around the layers, and used in another"
    if absent := set(states) - set(parts) - {last}:
        return f"a buffer is changed before {found.calls[max(absent)].name!r}, which takes nothing of that code"
    draws: dict[Any, int] = {}
    for part, labels in [
        *((part, found.calls[call].arguments[index].labels) for part, own in parts.items() for call, index in own),
        (last, found.needed),
    ]:
        for kind, draw in labels:
            if kind == "draw" and draws.setdefault(draw, part) != part:
                return "a random number is used in several parts of the code around the layers"
    return ""


def partition_around(around: Around, found: DryRun, loss: Loss, names: dict[int, str], why: str) -> Partition:
    """The partition of a model of which its layers alone are captured. `names` are those of tensors, by id."""
    parts = argument_parts(found)
    states = _states_of(found, parts)
    values = [Value(number, tuple(tensor.shape), tensor.dtype, None) for number, tensor in enumerate(around.batch)]
    partition = Partition([], values, tuple(range(len(values))), False, (), found.calls[0].input_tree)
    used = {argument.output for call in found.calls for argument in call.arguments if argument.output is not None}
    used |= {output for own in parts.values() for origin in own for output in _outputs_in(_labels(found, origin))}
    used |= set(needed_outputs(found))
    value_of: dict[tuple[str, Origin], int] = {}

    def add(segment: Segment, made: Sequence[tuple[tuple[str, Origin], Any]]) -> None:
        for key, (shape, dtype) in made:
            value_of[key] = len(values)
            values.append(Value(len(values), shape, dtype, segment.index))
        segment.outputs = tuple(value_of[key] for key, _ in made)
        for number in segment.inputs:
            values[number].consumers.append(segment.index)
        partition.segments.append(segment)

    def add_part(part: int) -> None:
        wanted = parts[part]
        outputs = sorted({output for origin in wanted for output in _outputs_in(_labels(found, origin))})
        checked = [part] if part != PROLOGUE else _calls_by_no_output(found)
        where = "" if partition.segments else "around its layers"
        module = LayerArguments(around, found, outputs, states[part], wanted, checked, where, why)
        inputs = (*partition.inputs, *(value_of["output", output] for output in outputs))
        name = "prologue" if part == PROLOGUE else f"interlude.{part}"
        segment = Segment(
            len(partition.segments), name, module, inputs, (), module.model_parameters, module.model_buffers
        )
        made = [(origin, found.calls[origin[0]].arguments[origin[1]]) for origin in wanted]
        add(segment, [(("argument", origin), (one.shape, one.dtype)) for origin, one in made])

    if PROLOGUE in parts:
        add_part(PROLOGUE)
    for number, call in enumerate(found.calls):
        if number in parts:
            add_part(number)
        if call.name in around.skipped:
            continue
        arguments = [
            value_of["argument", one.first] if one.output is None else value_of["output", one.output]
            for one in call.arguments
        ]
        sources = tuple(dict.fromkeys(arguments))
        own = [index for index in range(len(call.outputs)) if (number, index) in used]
        block_call = BlockCall(
            call.name, call.block, call.forward, around.compute, call.gradients, call.input_tree, call.output_tree,
            changes=call.changes,
        )  # fmt: skip
        module = BlockSegment(block_call, [sources.index(argument) for argument in arguments], own)
        add(
            layer_segment(partition.segments, call.name, module, sources, names),
            [(("output", (number, index)), call.outputs[index]) for index in own],
        )
    inputs = (*partition.inputs, *(value_of["output", output] for output in needed_outputs(found)))
    add_epilogue(partition, around, found, loss, inputs, "", why)
    return partition


def _labels(found: DryRun, origin: Origin) -> Labels:
    return found.calls[origin[0]].arguments[origin[1]].labels


def _calls_by_no_output(found: DryRun) -> list[int]:
    """The calls that no output of a layer decides on."""
    return [number for number, call in enumerate(found.calls) if not _outputs_in(call.labels)]
