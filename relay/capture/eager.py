"""The universal fallback: a segment that cannot be captured as a graph runs eagerly, op by op, at every visit.

Its programs are graphs of one node, a call of Python that runs the module with PyTorch's autograd inside the visit;
only devices that execute Python over torch tensors (the CPU) can compile them, others name the call as an op they
lack. Ops that depend on data may do as they like inside; what must be known beforehand are the shapes that come
out, and those are found by running the module once, on made-up numbers.

Invariant: results are those of plain PyTorch, a parameter that a step did not reach has no gradient in it, and
random ops draw the same in the forward and in the recompute, from the same key as everywhere else.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from hal.kernel import Port, Program, Role
from hal.random import RandomKey
from relay.capture.explain import changed_parameter
from relay.capture.states import call_with
from relay.errors import CaptureError

_numbers = itertools.count()


class Presence:
    """Which parameters the latest step's backward has reached, by their place among the segment's gradients."""

    def __init__(self) -> None:
        self._step = -1
        self._reached: set[int] = set()

    def note(self, step: int, places: Sequence[int]) -> None:
        """These were reached in that step."""
        if step != self._step:
            self._step, self._reached = step, set()
        self._reached.update(places)

    def reached(self) -> frozenset[int]:
        """All that were reached, in whichever micro-batch."""
        return frozenset(self._reached)


class EagerSegment:
    """A module that is run by Python at every visit. `parameters` are its names in the programs' order."""

    def __init__(self, module: nn.Module, compute: Callable[[], AbstractContextManager[Any]]) -> None:
        self.module = module
        self.presence = Presence()
        self.compute = compute
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
        self._looking = _Looking(module, self.buffers)

    def run(
        self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]
    ) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
        """The module's outputs, and its buffers as they are afterwards."""
        own = [buffer.clone() for buffer in buffers]
        originals = [*self.tensors, *self.buffer_tensors]
        with self.compute():
            outputs, after = call_with(self._looking, originals, [*parameters, *own], values)
        return outputs, [tensor.detach() for tensor in after]


class _Looking(nn.Module):
    """A module that also returns its buffers as they are then: written to, or others put in their place."""

    def __init__(self, module: nn.Module, buffers: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.buffers_of = [name.rpartition(".") for name in buffers]

    def forward(self, *values: torch.Tensor) -> Any:
        outputs = self.module(*values)
        return outputs, [getattr(self.module.get_submodule(path), name) for path, _, name in self.buffers_of]


class _Call:
    """What the one node of a program calls: (parameters, buffers, values, seeds, key) -> the program's outputs."""

    def __init__(self, segment: EagerSegment, kind: str, name: str, counts: tuple[int, int, int]) -> None:
        self.segment = segment
        self.kind = kind
        self.counts = counts
        self.updates: list[int] = []
        self.kept: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.seeded: list[int] = []
        self.gradients: list[int] = []
        self.value_gradients: list[int] = []
        self.differentiated: list[int] = []
        self.training = True
        self.name = name
        self.__name__ = self.__qualname__ = f"eager_{kind}"

    def __call__(self, *arguments: Any) -> tuple[torch.Tensor, ...]:
        *tensors, key = arguments
        ends = list(itertools.accumulate(self.counts))
        parameters, buffers = tensors[: ends[0]], tensors[ends[0] : ends[1]]
        values, seeds = tensors[ends[1] : ends[2]], tensors[ends[2] :]
        if self.kind == "backward":
            # The recompute finds the buffers as the forward found them, not as it left them.
            found, seeds = seeds[: len(self.kept)], seeds[len(self.kept) :]
            for number, buffer in zip(self.kept, found, strict=True):
                buffers[number] = buffer
        # The generator is torch's own for the while: an op that draws knows no other.
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(_seed_of(key))
            if not seeds:
                return self._forward(parameters, buffers, values)
            return self._backward(parameters, buffers, values, seeds, key)

    def _forward(
        self, parameters: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        # Some kernels (oneDNN's LSTM) round otherwise where no gradient will be asked for.
        with torch.set_grad_enabled(self.training):
            outputs, after = self.segment.run(*self._leaves(parameters, values), buffers)
        self._check(outputs)
        shown = outputs if self.kind == "forward" else outputs[:1]
        copies = [buffers[number].clone() for number in self.kept] if self.kind == "forward" else []
        return (*(output.detach() for output in shown), *copies, *(after[number] for number in self.updates))

    def _leaves(
        self, parameters: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        leaves = [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(parameters, self.segment.trainable, strict=True)
        ]
        inputs = [
            tensor.detach().requires_grad_(number in self.differentiated) for number, tensor in enumerate(values)
        ]
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
            wanted = [leaves[place] for place in self.gradients] + [inputs[place] for place in self.value_gradients]
            found = (
                torch.autograd.grad([one for one, _ in pairs], wanted, [seed for _, seed in pairs], allow_unused=True)
                if pairs
                else (None,) * len(wanted)
            )
        of_parameters = found[: len(self.gradients)]
        self.segment.presence.note(
            key.step, [place for place, gradient in enumerate(of_parameters) if gradient is not None]
        )
        made = [
            torch.zeros_like(tensor) if gradient is None else gradient
            for tensor, gradient in zip(wanted, found, strict=True)
        ]
        if self.kind == "backward":
            return tuple(made)
        return (outputs[0].detach(), *(after[number] for number in self.updates), *made)

    def _check(self, outputs: Sequence[torch.Tensor]) -> None:
        shapes = [tuple(output.shape) for output in outputs]
        if shapes != self.shapes:
            raise CaptureError(
                f"layer {self.name!r} returned tensors of shapes {shapes}; for inputs of these shapes it was expected "
                f"to return {self.shapes}. What a layer hands on must have a shape that does not depend on the data: "
                "pad it, or keep what makes and what uses it in one layer.",
                layer=self.name,
            )


def _seed_of(key: RandomKey) -> int:
    """A 63-bit number from a key; nearby keys give unlike numbers (the constants are splitmix64's)."""
    state = 0
    for part in (key.seed, key.step, key.segment, key.microbatch):
        state = (state + part + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1


def made_up(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Real tensors of these shapes and dtypes: small numbers where they are floats, zeros elsewhere."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for tensor in tensors:
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if dtype.is_floating_point:
            made.append(torch.randn(shape, generator=generator).mul_(0.1).to(dtype))
        else:
            made.append(torch.zeros(shape, dtype=dtype))
    return made


def run_made_up(module: nn.Module, forward: Callable[..., Any], fill: Callable[[Any], Any], inputs: Any) -> Any:
    """`forward` on made-up numbers of the inputs' shapes, nothing in the module changed: for the shapes it returns.

    `fill` makes (args, kwargs) of the tensors.
    """
    with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        originals = [*module.parameters(), *module.buffers()]
        states = made_up(originals)
        args, kwargs = fill(made_up(inputs))

        class Shell(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = module

            def forward(self) -> Any:
                return forward(*args, **kwargs)

        return call_with(Shell(), originals, states, ())


def eager_programs(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    name: str,
    ends_in_loss: bool,
    compute: Callable[[], AbstractContextManager[Any]],
    training: bool = True,
) -> tuple[EagerSegment, dict[str, Program | None], tuple[bool, ...], int, tuple[Port, ...]]:
    """Programs by kind for `module(*inputs)`, which outputs ask for gradients, and the bytes that autograd keeps.

    Last come the copies of buffers that the forward keeps for the backward (see `Captured.kept`). Raises whatever the
    module raises when run on made-up numbers.
    """
    segment = EagerSegment(module, compute)
    parameters, buffers = segment.tensors, segment.buffer_tensors
    saved = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.numel() * tensor.element_size()
        return tensor

    with torch.random.fork_rng(devices=()), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        values = [
            tensor.requires_grad_(like.requires_grad) for tensor, like in zip(made_up(inputs), inputs, strict=True)
        ]
        leaves = [
            tensor.requires_grad_(wanted)
            for tensor, wanted in zip(made_up(parameters), segment.trainable, strict=True)
        ]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            before = made_up(buffers)
            written = [leaf._version for leaf in leaves]
            outputs, after = segment.run(leaves, values, before)
            for leaf, version, names in zip(leaves, written, segment.parameters, strict=True):
                if leaf._version != version:
                    raise changed_parameter(name, names[0])
    # Which buffers a forward changes, data may decide too: in training all of them are written back.
    changing = any(one.training and one._buffers for one in module.modules())
    updates = list(range(len(after))) if changing else []
    wants = tuple(output.requires_grad for output in outputs)
    differentiates = any(wants)
    read = _read_in_training(module)
    kept = [number for number in updates if id(buffers[number]) in read]
    if ends_in_loss or not differentiates or not training:
        kept = []
    copies = tuple(
        Port(Role.VALUE, len(outputs) + place, tuple(buffers[number].shape), buffers[number].dtype)
        for place, number in enumerate(kept)
    )
    counts = (len(parameters), len(buffers), len(values))
    ports = [
        Port(role, number, tuple(tensor.shape), tensor.dtype)
        for role, tensors in ((Role.PARAMETER, parameters), (Role.BUFFER, buffers), (Role.VALUE, values))
        for number, tensor in enumerate(tensors)
    ]

    def program(kind: str) -> Program:
        call = _Call(segment, kind, name, counts)
        call.shapes = [tuple(output.shape) for output in outputs]
        call.differentiated = [number for number, one in enumerate(values) if one.requires_grad]
        call.training = training
        shown = list(enumerate(outputs)) if kind == "forward" else [(0, outputs[0])] if kind != "backward" else []
        results = [Port(Role.VALUE, number, tuple(one.shape), one.dtype) for number, one in shown]
        if kind in ("forward", "backward"):
            call.kept = kept
        if kind == "forward":
            results += copies
        if kind != "backward":
            call.updates = updates
            results += [
                Port(Role.BUFFER_UPDATE, number, tuple(buffers[number].shape), buffers[number].dtype)
                for number in updates
            ]
        seeds: list[Port] = []
        if kind in ("backward", "joint"):
            asked = wants if kind == "backward" else wants[:1]
            call.seeded = [number for number, wanted in enumerate(asked) if wanted]
            seeds = [
                Port(Role.SEED, number, tuple(outputs[number].shape), outputs[number].dtype) for number in call.seeded
            ]
            call.gradients = [number for number, wanted in enumerate(segment.trainable) if wanted]
            call.value_gradients = call.differentiated
            results += [
                Port(Role.PARAMETER_GRADIENT, number, tuple(parameters[number].shape), parameters[number].dtype, True)
                for number in call.gradients
            ]
            results += [
                Port(Role.VALUE_GRADIENT, number, tuple(values[number].shape), values[number].dtype, True)
                for number in call.value_gradients
            ]
        taken = [
            Port(Role.VALUE, len(values) + place, port.shape, port.dtype) for place, port in enumerate(copies)
        ]
        if kind != "backward":
            taken = []
        return _one_node(call, f"{name} {kind}", [*ports, *taken, *seeds], results, saved)

    programs: dict[str, Program | None] = {
        "forward": program("forward"),
        "backward": program("backward") if differentiates and not ends_in_loss else None,
        "loss": program("loss") if ends_in_loss else None,
        "joint": program("joint") if ends_in_loss else None,
    }
    return segment, programs, wants, saved, copies


def _read_in_training(module: nn.Module) -> set[int]:
    """The buffers, by identity, that a forward may read: all but the statistics of BatchNorm in training."""
    return {
        id(buffer)
        for one in module.modules()
        if not (one.training and type(one).forward is nn.BatchNorm1d.forward)
        for buffer in one._buffers.values()
        if buffer is not None
    }


def _one_node(call: _Call, name: str, inputs: Sequence[Port], outputs: Sequence[Port], saved: int) -> Program:
    graph = fx.Graph()
    places = []
    for number, port in enumerate(inputs):
        node = graph.placeholder(f"input_{number}")
        node.meta = {"val": torch.empty(port.shape, dtype=port.dtype, device="meta")}
        places.append(node)
    key = graph.placeholder("key")
    called = graph.call_function(call, (*places, key))
    results = []
    for number, port in enumerate(outputs):
        node = graph.call_function(operator.getitem, (called, number))
        node.meta = {"val": torch.empty(port.shape, dtype=port.dtype, device="meta")}
        results.append(node)
    graph.output(tuple(results))
    moved = sum(port.size for port in [*inputs, *outputs])
    return Program(
        name=name,
        graph=graph,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        constants={},
        draws=True,
        flops=0,
        moved=moved,
        workspace=saved + sum(port.size for port in outputs),
        fingerprint=f"eager {next(_numbers)}",
    )
