"""One visit of a segment that runs eagerly: Python runs the module, with PyTorch's autograd.

Programs and ports are made in `relay.capture.eager_fallback`. Invariant: results are those of plain PyTorch, gradients
that a step did not find are recorded as absent, and random ops draw the same numbers in the forward and the recompute,
from the random key of the visit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hal.random import RandomKey
from relay.capture.guards.bypasses import bypassed
from relay.capture.guards.counters import CountedStates
from relay.capture.guards.functional_call import call_with
from relay.capture.guards.held_tensors import HeldView, Replacing, replacing
from relay.capture.guards.unsupported import hooks_wait
from relay.capture.memory_order import Order, as_written, stored
from relay.capture.states.own_generators import seeded
from relay.errors import CaptureError

_one_at_a_time = threading.RLock()


class ObservedGradientPresence:
    """Which gradients the backward of an eager segment has found in the latest step.

    Gradients are numbered as the segment's backward returns them: those of its parameters, then those of its inputs.
    `version` counts the calls of `record`, so that a reader can tell whether anything has been recorded since.
    """

    def __init__(self) -> None:
        self.version = 0
        self._reached: set[int] = set()

    def record(self, microbatch: int, indices: Sequence[int]) -> None:
        """Add the gradients found in one micro-batch. Micro-batch 0 starts a new step, also when a step is repeated."""
        self.version += 1
        if microbatch == 0:
            self._reached = set()
        self._reached.update(indices)

    def reached(self) -> frozenset[int]:
        """The indices of all gradients found in any micro-batch of the step."""
        return frozenset(self._reached)


class EagerSegment:
    """A module that Python runs at every visit.

    `parameters` are all names of each parameter, and `buffers` the name of each buffer, in the order of the programs.
    `context` returns a new context to run the module in (autocast). `held` are the tensors that its code was found to
    hold by itself, `counted` the numbers that it counts and computes with, and `generators` those that it draws from
    besides PyTorch's own (`draws_python`: from Python's or numpy's).
    """

    def __init__(self, module: nn.Module, name: str, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.module = module
        self.name = name
        self.held: dict[int, HeldView] = {}
        self.counted = CountedStates(())
        self.generators: list[torch.Generator] = []
        self.draws_python = False
        self.presence = ObservedGradientPresence()
        self.context = context
        self.tensors = list(module.parameters())
        self.buffer_tensors = list(module.buffers())
        names: dict[int, list[str]] = {}
        for name, tensor in [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]:
            names.setdefault(id(tensor), []).append(name)
        self.parameters = [tuple(names[id(tensor)]) for tensor in self.tensors]
        self.buffers = [names[id(tensor)][0] for tensor in self.buffer_tensors]
        self.trainable = [tensor.requires_grad for tensor in self.tensors]
        self._with_buffers = _WithBuffers(module, self.buffers)

    def run(
        self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """The outputs of the module, and its buffers after the call, for these parameters, inputs and buffers."""
        own = [buffer.clone() for buffer in buffers]
        originals = [*self.tensors, *self.buffer_tensors]
        current = [*parameters, *own]
        with self.context(), self._replacing(originals, current) as replaced:
            outputs, after = call_with(self._with_buffers, originals, current, values)
        if replaced is not None:
            self.held.update(replaced.used)
        return outputs, [tensor.detach() for tensor in after]

    def _replacing(self, originals: Sequence[torch.Tensor], current: Sequence[torch.Tensor]) -> Any:
        """A mode that replaces what the module's code holds, which is found out while the model is compiled."""
        if self.held:
            return Replacing(originals, current, self.name, None, self.held)
        return replacing(originals, current, self.name, constants=False)


@dataclass(frozen=True)
class EagerLayouts:
    """The memory orders of inputs, outputs, seeds and gradients of inputs, by number."""

    inputs: dict[int, Order]
    outputs: dict[int, Order]
    seeds: dict[int, Order]
    gradients: dict[int, Order]


class _WithBuffers(nn.Module):
    """A module that also returns its buffers after the call, whether changed in place or assigned anew."""

    def __init__(self, module: nn.Module, buffers: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.buffers_of = [name.rpartition(".") for name in buffers]

    def forward(self, *values: torch.Tensor) -> Any:
        outputs = self.module(*values)
        return outputs, [getattr(self.module.get_submodule(path), name) for path, _, name in self.buffers_of]


class EagerCall:
    """The function that the single node of a program calls, with (parameters, buffers, values, seeds, key).

    Attributes are numbers of parameters, buffers, inputs or outputs, and are filled in by
    `relay.capture.eager_fallback`: `updates` (buffers that are written back), `saved_buffers` (buffers copied for the
    backward), `seeded` (outputs with a seed), `gradients` and `value_gradients` (parameters and inputs to differentiate
    by), `differentiated` (inputs that require a gradient), `shown` (outputs that are returned). `shapes` are those
    expected of the outputs.
    """

    def __init__(
        self, segment: EagerSegment, kind: str, name: str, counts: tuple[int, int, int], layouts: EagerLayouts
    ) -> None:
        self.segment = segment
        self.layouts = layouts
        self.kind = kind
        self.counts = counts
        self.updates: list[int] = []
        self.saved_buffers: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.seeded: list[int] = []
        self.gradients: list[int] = []
        self.value_gradients: list[int] = []
        self.differentiated: list[int] = []
        self.shown: list[int] = []
        self.training = True
        self.name = name
        self.__name__ = self.__qualname__ = f"eager_{kind}"

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        *tensors, key = arguments
        ends = list(itertools.accumulate(self.counts))
        parameters, buffers = tensors[: ends[0]], tensors[ends[0] : ends[1]]
        values, seeds = tensors[ends[1] : ends[2]], tensors[ends[2] :]
        if self.kind == "backward":
            # The recompute starts from the buffers as they were before the forward.
            found, seeds = seeds[: len(self.saved_buffers)], seeds[len(self.saved_buffers) :]
            for number, buffer in zip(self.saved_buffers, found, strict=True):
                buffers[number] = buffer
        values = [as_written(value, self.layouts.inputs.get(number, ())) for number, value in enumerate(values)]
        seeds = [
            as_written(seed, self.layouts.seeds.get(number, ()))
            for number, seed in zip(self.seeded, seeds, strict=True)
        ]
        # Eager ops draw from torch's generator, which is seeded from the key and restored afterwards. It is the whole
        # process's, so of several devices one runs such a layer at a time.
        with _one_at_a_time, bypassed(), torch.random.fork_rng(**generators_of(tensors)):
            torch.manual_seed(seed_of(key))
            counted = self.segment.counted
            with seeded(seed_of(key), self.segment.generators, self.segment.draws_python):
                if self.kind == "backward":
                    return counted.recompute(
                        key.microbatch, lambda: self._backward(parameters, buffers, values, seeds, key)
                    )
                counted.forward(key.microbatch)
                if not seeds:
                    return self._forward(parameters, buffers, values)
                return self._backward(parameters, buffers, values, seeds, key)

    def _forward(
        self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        # Some kernels (oneDNN's LSTM) give other roundings when no gradient is required.
        with torch.set_grad_enabled(self.training), nullcontext() if self.training else hooks_wait():
            outputs, after = self.segment.run(*self._leaves(parameters, values), buffers)
        self._check(outputs)
        copies = [buffers[number].clone() for number in self.saved_buffers] if self.kind == "forward" else []
        return (*self._stored(outputs), *copies, *(after[number] for number in self.updates))

    def _leaves(
        self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        leaves = [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(parameters, self.segment.trainable, strict=True)
        ]
        inputs = [tensor.detach().requires_grad_(number in self.differentiated) for number, tensor in enumerate(values)]
        return leaves, inputs

    def _backward(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        seeds: Sequence[torch.Tensor],
        key: RandomKey,
    ) -> tuple[torch.Tensor, ...]:
        leaves, inputs = self._leaves(parameters, values)
        with torch.enable_grad():
            outputs, after = self.segment.run(leaves, inputs, buffers)
            self._check(outputs)
            pairs = [
                (outputs[number], seed)
                for number, seed in zip(self.seeded, seeds, strict=True)
                if outputs[number].requires_grad
            ]
            wanted = [leaves[index] for index in self.gradients] + [inputs[index] for index in self.value_gradients]
            found = (
                torch.autograd.grad(
                    [output for output, _ in pairs], wanted, [seed for _, seed in pairs], allow_unused=True
                )
                if pairs
                else (None,) * len(wanted)
            )
        reached = [index for index, gradient in enumerate(found) if gradient is not None]
        self.segment.presence.record(key.microbatch, reached)
        made = [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(wanted, found, strict=True)
        ]
        for index, number in enumerate(self.value_gradients, len(self.gradients)):
            made[index] = stored(made[index], self.layouts.gradients.get(number, ()))
        if self.kind == "backward":
            return tuple(made)
        return (*self._stored(outputs), *(after[number] for number in self.updates), *made)

    def _stored(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [stored(outputs[number].detach(), self.layouts.outputs.get(number, ())) for number in self.shown]

    def _check(self, outputs: Sequence[torch.Tensor]) -> None:
        shapes = [tuple(output.shape) for output in outputs]
        if self.kind in ("loss", "joint"):  # what is not returned may be of any shape
            shapes = [shapes[number] for number in self.shown]
        expected = [self.shapes[number] for number in self.shown] if self.kind in ("loss", "joint") else self.shapes
        if shapes != expected:
            raise CaptureError(
                f"layer {self.name!r} returned tensors of shapes {shapes}; for inputs of these shapes, "
                f"{expected} was expected. The shapes of a layer's outputs must not depend on the data. Pad the "
                "outputs, or move the code that makes them and the code that uses them into one layer.",
                layer=self.name,
            )


def generators_of(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Arguments of `torch.random.fork_rng` that restore the generators of the tensors' devices as well."""
    devices = {tensor.device for tensor in tensors if tensor.device.index is not None}
    if not devices:
        return {"devices": ()}
    return {"devices": sorted(device.index for device in devices), "device_type": next(iter(devices)).type}


def seed_of(key: RandomKey) -> int:
    """A 63-bit seed from a key. Neighbouring keys give unrelated seeds (the constants are those of splitmix64)."""
    state = 0
    for part in (key.seed, key.step, key.segment, key.microbatch):
        state = (state + part + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1
