"""Programs for a segment that cannot be traced: Python runs its module at every visit, op by op.

Each program is a graph of one node, a call of Python (`relay.capture.eager_call`). Devices that execute PyTorch can
compile it; others report the call as an op that they lack. Shapes inside the module may depend on data. The shapes of
its outputs must not: they are found by running the module once on made-up inputs. Invariant: the ports are those that
a traced segment of the same module would have.
"""

from __future__ import annotations

import functools
import itertools
import operator
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from hal.program import Port, Program, Role
from relay.capture.eager_call import EagerCall, EagerLayouts, EagerSegment
from relay.capture.fake_tensors import is_fake
from relay.capture.guards.bypasses import bypassed
from relay.capture.guards.counters import CountedStates, Counter, Numbers, changed, computed_with, numbers_of
from relay.capture.guards.executed_code import recorded_code
from relay.capture.guards.functional_call import call_with
from relay.capture.guards.held_tensors import leaves_of
from relay.capture.guards.messages import changed_parameter, explain, name_of_program
from relay.capture.guards.plain_tensors import PlainTensors
from relay.capture.guards.unsupported import hooks_wait
from relay.capture.memory_order import Order, as_written, order_of, stored, stored_shape
from relay.capture.request import CaptureRequest
from relay.capture.states.first_run import first_run
from relay.capture.traced_module import autocast
from relay.errors import CaptureError

_count = itertools.count()


@dataclass(frozen=True)
class EagerPrograms:
    """The programs of a segment by kind, with what `Captured` holds besides them.

    `wants` tells which outputs require a gradient. `saved` are copies of buffers, made by the forward for the backward.
    """

    segment: EagerSegment
    programs: dict[str, Program | None]
    wants: tuple[bool, ...]
    saved_bytes: int
    saved: tuple[Port, ...]
    layouts: EagerLayouts


def made_up(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Real tensors of these shapes and dtypes: small random numbers, and zeros where they are no floats."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for tensor in tensors:
        shape, dtype = tuple(tensor.shape), tensor.dtype
        if dtype.is_floating_point or dtype.is_complex:
            drawn = torch.float32 if dtype.is_floating_point else torch.complex64
            small = torch.randn(shape, generator=generator, dtype=drawn).mul_(0.1)
            # None is negative: some ops take probabilities.
            made.append((small if small.is_complex() else small.abs_()).to(dtype))
        else:
            made.append(torch.zeros(shape, dtype=dtype))
    return made


def _numbers(request: CaptureRequest) -> list[torch.Tensor]:
    """Numbers for the inputs: the batch's own where they are known, as code may check them, and made-up ones."""
    made = made_up(request.inputs)
    for number, tensor in request.values.items():
        if not (is_fake(tensor) or tensor.is_meta) and tensor.shape == made[number].shape:
            made[number] = tensor.detach().to("cpu", made[number].dtype, copy=True)
    return made


def as_they_are(states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of parameters or buffers, made-up numbers for fake ones.

    Shapes and checks inside a module may depend on its own state, as on a buffer of sizes.
    """
    return [
        made_up([state])[0] if is_fake(state) or state.is_meta else state.detach().to("cpu", copy=True)
        for state in states
    ]


def run_made_up(module: nn.Module, forward: Callable[..., Any], fill: Callable[[Any], Any], inputs: Any) -> Any:
    """Run `forward` on made-up numbers, for the shapes that it returns. Nothing in the module changes.

    `inputs` are tensors of the shapes and dtypes to use, and `fill` turns tensors into (args, kwargs). Raises whatever
    `forward` raises.
    """

    class Shell(nn.Module):
        def __init__(self, args: Any, kwargs: Any) -> None:
            super().__init__()
            self.inner = module
            self.given = args, kwargs

        def forward(self) -> Any:
            args, kwargs = self.given
            return forward(*args, **kwargs)

    def run() -> Any:
        with torch.random.fork_rng(devices=()), bypassed(), hooks_wait(), torch.no_grad(), PlainTensors(module):
            originals = [*module.parameters(), *module.buffers()]
            states = as_they_are(originals)
            return call_with(Shell(*fill(made_up(inputs))), originals, states, ())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _on_a_new_thread(run)


def _on_a_new_thread(function: Callable[[], Any]) -> Any:
    """The result of `function` outside of any trace, under this thread's autocast.

    What a trace sets for dispatch belongs to its thread. Not all of it can be turned off where `vmap` is used.
    """
    compute = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32

    def run() -> Any:
        with autocast(compute):
            return function()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def eager_programs(request: CaptureRequest) -> EagerPrograms:
    """The programs of a segment that runs eagerly. Raises whatever the module raises when run on made-up numbers."""
    module, name, training, ends_in_loss = request.module, request.name, request.training, request.ends_in_loss
    context = functools.partial(autocast, request.compute_dtype, request.device.type)
    segment = EagerSegment(module, name, context)
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
            for tensor, like in zip(_numbers(request), request.inputs, strict=True)
        ]
        leaves = [
            tensor.requires_grad_(wanted)
            for tensor, wanted in zip(as_they_are(parameters), segment.trainable, strict=True)
        ]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            before = as_they_are(buffers)
            written = [leaf._version for leaf in leaves]
            numbers = numbers_of(module)
            outputs, after = first_run(segment, leaves, values, before)
            segment.counted = CountedStates(_counters(segment, numbers, leaves, values, buffers))
            _refuse_sparse(outputs, name)
            _refuse_foreign_gradients(outputs, leaves, parameters, name)
            for leaf, version, names in zip(leaves, written, segment.parameters, strict=True):
                if leaf._version != version:
                    raise changed_parameter(name, names[0])
        wants = tuple(output.requires_grad and number not in request.unreached for number, output in enumerate(outputs))
        layouts = _layouts_of(values, leaves if training else (), outputs, wants, request)
        if training and not request.keeps_strides:
            _try_backward(leaves, outputs, name)
    # Data may also decide which buffers a forward changes, so in training all of them are written back.
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
        if kind != "backward":
            chosen = {0, *request.shown} if kind == "joint" else {0}
            call.shown = [number for number in range(len(outputs)) if kind == "forward" or number in chosen]
        results = [stored_port(Role.VALUE, number, outputs[number], layouts.outputs) for number in call.shown]
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


def _counters(
    segment: EagerSegment,
    numbers: Numbers,
    leaves: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    buffers: Sequence[torch.Tensor],
) -> list[Counter]:
    """The numbers of a module that every call changes and computes with; `numbers` are those of before a call."""
    now = numbers_of(segment.module)
    if not changed(numbers, now) and now.keys() <= numbers.keys():
        return []
    numbers = now  # what changes once and then stays is no counter
    with recorded_code() as ran, torch.no_grad():
        segment.run(leaves, values, as_they_are(buffers))
    return computed_with(changed(numbers, numbers_of(segment.module)), ran)


def _refuse_sparse(outputs: Sequence[torch.Tensor], name: str) -> None:
    for output in outputs:
        if output.layout is not torch.strided:
            raise CaptureError(
                f"layer {name!r} returns a tensor of layout {output.layout}. Layers may use sparse tensors inside, and "
                "hand on dense ones: return its to_dense().",
                layer=name,
            )


def _refuse_foreign_gradients(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], name: str
) -> None:
    """Raise CaptureError if a gradient flows to a parameter itself, and not to the copy that stands for it."""
    own = {id(parameter) for parameter in parameters} - {id(leaf) for leaf in leaves}
    if any(id(leaf) in own for leaf in leaves_of(outputs)):
        raise CaptureError(
            f"layer {name!r} uses a tensor that was computed before, outside of the forward, from one of its "
            "parameters, so its numbers would be old. Compute it in the forward, or detach it.",
            layer=name,
        )


def _layouts_of(
    values: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    wants: Sequence[bool],
    request: CaptureRequest,
) -> EagerLayouts:
    """The memory orders of all values. For those of gradients, a backward is run on made-up numbers.

    It goes to `leaves` too, and runs once, since some ops allow no second one. Raises CaptureError where an op has no
    derivative.
    """
    asking = [number for number, wanted in enumerate(wants) if wanted]
    taken = {number: request.seeds.get(number, outputs[number]) for number in asking}
    wanted = [number for number, value in enumerate(values) if value.requires_grad]
    if not request.keeps_strides:
        return EagerLayouts({}, {}, dict.fromkeys(asking, ()), dict.fromkeys(wanted if asking else [], ()))
    found: Sequence[torch.Tensor | None] = ()
    asked = [*(values[number] for number in wanted), *(leaf for leaf in leaves if leaf.requires_grad)]
    if asking and asked:
        ones = [torch.empty_like(taken[number]).fill_(1) for number in asking]
        try:
            found = torch.autograd.grad([outputs[number] for number in asking], asked, ones, allow_unused=True)
        except Exception as failure:
            raise explain(failure, request.name) from failure
    made = {number: order_of(gradient) for number, gradient in zip(wanted, found, strict=False) if gradient is not None}
    return EagerLayouts(
        {number: order_of(value) for number, value in enumerate(values)},
        {number: order_of(output) for number, output in enumerate(outputs)},
        {number: order_of(seed) for number, seed in taken.items()},
        {number: request.gradient_orders.get(number, made.get(number, ())) for number in wanted if asking},
    )


def _try_backward(leaves: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], name: str) -> None:
    """Raise CaptureError now, and not in the middle of a step, if an op has no derivative."""
    asking = [output for output in outputs if output.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if asking and wanted:
        try:
            torch.autograd.grad(asking, wanted, [torch.ones_like(output) for output in asking], allow_unused=True)
        except Exception as failure:
            raise explain(failure, name) from failure


def _read_in_training(module: nn.Module) -> set[int]:
    """The ids of the buffers that a forward may read: all except the statistics of BatchNorm in training."""
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
        fingerprint=f"eager {next(_count)}",
    )
