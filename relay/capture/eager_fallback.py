"""The universal fallback: a segment that cannot be captured as a graph runs eagerly, op by op, at every visit.

Its programs are graphs of one node, a call of Python (`eager_call`); only devices that execute Python over torch
tensors (the CPU) can compile them, others name the call as an op they lack. Ops that depend on data may do as they
like inside; what must be known beforehand are the shapes that come out, and those are found by running the module
once, on made-up numbers. Invariant: the ports are those that a captured segment of the same module would have.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import _disable_current_modes

from hal.program import Port, Program, Role
from relay.capture.eager_call import EagerCall, EagerLayouts, EagerSegment
from relay.capture.guards.functional_call import call_with
from relay.capture.guards.messages import changed_parameter, explain, name_of_program
from relay.capture.guards.unsupported import hooks_wait
from relay.capture.memory_order import Order, as_written, order_of, stored, stored_shape

_numbers = itertools.count()


@dataclass(frozen=True)
class EagerPrograms:
    """What `eager_programs` makes: programs by kind, which outputs ask for gradients, the bytes that autograd keeps,
    the copies of buffers that the forward keeps for the backward (see `Captured.kept`), and how values lie."""

    segment: EagerSegment
    programs: dict[str, Program | None]
    wants: tuple[bool, ...]
    saved_bytes: int
    saved: tuple[Port, ...]
    layouts: EagerLayouts


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
    with _disable_current_modes(), torch.random.fork_rng(devices=()), warnings.catch_warnings():
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

        with hooks_wait(), torch.no_grad():
            return call_with(Shell(), originals, states, ())


def eager_programs(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    name: str,
    ends_in_loss: bool,
    compute: Callable[[], AbstractContextManager[Any]],
    training: bool = True,
    seeds: Mapping[int, torch.Tensor] | None = None,
    gradients: Mapping[int, Order] | None = None,
    strides: bool = True,
    unreached: frozenset[int] = frozenset(),
) -> EagerPrograms:
    """The programs for `module(*inputs)`; `seeds`, `gradients`, `strides` and `unreached` as `capture` takes
    them.

    Raises whatever the module raises when run on made-up numbers.
    """
    segment = EagerSegment(module, compute)
    parameters, buffers = segment.tensors, segment.buffer_tensors
    saved_bytes = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved_bytes
        saved_bytes += tensor.numel() * tensor.element_size()
        return tensor

    with torch.random.fork_rng(devices=()), warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        values = [
            as_written(stored(tensor, order_of(like)), order_of(like)).detach().requires_grad_(like.requires_grad)
            for tensor, like in zip(made_up(inputs), inputs, strict=True)
        ]
        leaves = [
            tensor.requires_grad_(wanted) for tensor, wanted in zip(made_up(parameters), segment.trainable, strict=True)
        ]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            before = made_up(buffers)
            written = [leaf._version for leaf in leaves]
            outputs, after = segment.run(leaves, values, before)
            for leaf, version, names in zip(leaves, written, segment.parameters, strict=True):
                if leaf._version != version:
                    raise changed_parameter(name, names[0])
        layouts = EagerLayouts({}, {}, {}, {})
        wants = tuple(output.requires_grad and number not in unreached for number, output in enumerate(outputs))
        if strides:
            layouts = _layouts_of(values, outputs, wants, seeds or {}, gradients or {})
        if training:
            _try_backward(leaves, outputs, name)
    # Which buffers a forward changes, data may decide too: in training all of them are written back.
    changing = any(part.training and part._buffers for part in module.modules())
    updates = list(range(len(after))) if changing else []
    differentiates = any(wants)
    read = _read_in_training(module)
    saved_buffers = [number for number in updates if id(buffers[number]) in read]
    if ends_in_loss or not differentiates or not training:
        saved_buffers = []
    copies = tuple(
        Port(Role.VALUE, len(outputs) + offset, tuple(buffers[number].shape), buffers[number].dtype)
        for offset, number in enumerate(saved_buffers)
    )
    counts = (len(parameters), len(buffers), len(values))
    ports = [
        Port(role, number, tuple(tensor.shape), tensor.dtype)
        for role, tensors in ((Role.PARAMETER, parameters), (Role.BUFFER, buffers))
        for number, tensor in enumerate(tensors)
    ]

    def stored_port(
        role: Role, number: int, tensor: torch.Tensor, orders: dict[int, Order], added: bool = False
    ) -> Port:
        return Port(role, number, stored_shape(tensor.shape, orders.get(number, ())), tensor.dtype, added)

    ports += [stored_port(Role.VALUE, number, value, layouts.inputs) for number, value in enumerate(values)]

    def program(kind: str) -> Program:
        call = EagerCall(segment, kind, name, counts, layouts)
        call.shapes = [tuple(output.shape) for output in outputs]
        call.differentiated = [number for number, value in enumerate(values) if value.requires_grad]
        call.training = training
        shown = list(enumerate(outputs)) if kind == "forward" else [(0, outputs[0])] if kind != "backward" else []
        results = [stored_port(Role.VALUE, number, value, layouts.outputs) for number, value in shown]
        if kind in ("forward", "backward"):
            call.saved_buffers = saved_buffers
        if kind == "forward":
            results += copies
        if kind != "backward":
            call.updates = updates
            results += [
                Port(Role.BUFFER_UPDATE, number, tuple(buffers[number].shape), buffers[number].dtype)
                for number in updates
            ]
        taken_seeds: list[Port] = []
        if kind in ("backward", "joint"):
            asked = wants if kind == "backward" else wants[:1]
            call.seeded = [number for number, wanted in enumerate(asked) if wanted]
            taken_seeds = [stored_port(Role.SEED, number, outputs[number], layouts.seeds) for number in call.seeded]
            call.gradients = [number for number, wanted in enumerate(segment.trainable) if wanted]
            call.value_gradients = call.differentiated
            results += [
                Port(Role.PARAMETER_GRADIENT, number, tuple(parameters[number].shape), parameters[number].dtype, True)
                for number in call.gradients
            ]
            results += [
                stored_port(Role.VALUE_GRADIENT, number, values[number], layouts.gradients, True)
                for number in call.value_gradients
            ]
        taken = [Port(Role.VALUE, len(values) + offset, port.shape, port.dtype) for offset, port in enumerate(copies)]
        if kind != "backward":
            taken = []
        return _one_node(call, name_of_program(name, kind), [*ports, *taken, *taken_seeds], results, saved_bytes)

    programs: dict[str, Program | None] = {
        "forward": program("forward"),
        "backward": program("backward") if differentiates and not ends_in_loss else None,
        "loss": program("loss") if ends_in_loss else None,
        "joint": program("joint") if ends_in_loss else None,
    }
    return EagerPrograms(segment, programs, wants, saved_bytes, copies, layouts)


def _layouts_of(
    values: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    wants: Sequence[bool],
    seeds: Mapping[int, torch.Tensor],
    gradients: Mapping[int, Order],
) -> EagerLayouts:
    """How everything lies; for that of the gradients a backward is run on made-up numbers."""
    asking = [number for number, wanted in enumerate(wants) if wanted]
    taken = {number: seeds.get(number, outputs[number]) for number in asking}
    wanted = [number for number, value in enumerate(values) if value.requires_grad]
    found: Sequence[torch.Tensor | None] = ()
    if asking and wanted:
        ones = [torch.empty_like(taken[number]).fill_(1) for number in asking]
        found = torch.autograd.grad(
            [outputs[number] for number in asking], [values[number] for number in wanted], ones, True, allow_unused=True
        )
    made = {number: order_of(gradient) for number, gradient in zip(wanted, found, strict=False) if gradient is not None}
    return EagerLayouts(
        {number: order_of(value) for number, value in enumerate(values)},
        {number: order_of(output) for number, output in enumerate(outputs)},
        {number: order_of(seed) for number, seed in taken.items()},
        {number: gradients.get(number, made.get(number, ())) for number in wanted if asking},
    )


def _try_backward(leaves: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], name: str) -> None:
    """Raise CaptureError where autograd cannot go back to the parameters: there are ops that it has no derivative of.

    Found here, before a step, and not in its middle.
    """
    asking = [output for output in outputs if output.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if asking and wanted:
        try:
            torch.autograd.grad(asking, wanted, [torch.ones_like(output) for output in asking], allow_unused=True)
        except Exception as failure:
            raise explain(failure, name) from failure


def _read_in_training(module: nn.Module) -> set[int]:
    """The buffers, by identity, that a forward may read: all but the statistics of BatchNorm in training."""
    return {
        id(buffer)
        for part in module.modules()
        if not (part.training and type(part).forward is nn.BatchNorm1d.forward)
        for buffer in part._buffers.values()
        if buffer is not None
    }


def _one_node(call: EagerCall, name: str, inputs: Sequence[Port], outputs: Sequence[Port], saved_bytes: int) -> Program:
    graph = fx.Graph()
    placeholders = []
    for number, port in enumerate(inputs):
        node = graph.placeholder(f"input_{number}")
        node.meta = {"val": torch.empty(port.shape, dtype=port.dtype, device="meta")}
        placeholders.append(node)
    key = graph.placeholder("key")
    called = graph.call_function(call, (*placeholders, key))
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
        workspace=saved_bytes + sum(port.size for port in outputs),
        fingerprint=f"eager {next(_numbers)}",
    )
