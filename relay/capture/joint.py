"""From a segment, a module called with tensors, to programs: its forward, and its recompute with backward.

One route gives both programs: the joint
graph of forward and backward that `aot_export_joint_with_descriptors` makes, without decompositions, so that its
ops and their order are those of eager autograd and so are its results, to the bit. From it come

  forward    the outputs and the new values of buffers;
  backward   the gradients alone: what they do not need of the recomputed forward is dropped, new values of buffers
             included, so that state changes once. Where the forward keeps what the backward reads of it
             (`relay.capture.keeping`) nothing is recomputed.

Random ops become calls of `hal.random` with a key: the same op number in both programs, hence the same mask.

It knows nothing of models as wholes (`partition`) nor of where tensors live.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from hal import ops
from hal import random as counter_random
from hal.kernel import Port, Program, Role
from relay.capture.amended import own_kernels
from relay.capture.attributes import PlainTensors, UsedTensors, constants_of
from relay.capture.core import Lowering, attention, decompositions, simplify
from relay.capture.eager import EagerSegment, eager_programs
from relay.capture.elsewhere import CPU, OnDevice, fakes_on, missing, spell_out
from relay.capture.explain import explain, reason, sparse_gradient
from relay.capture.keeping import in_order, nodes_to_keep, order_in_memory, permuted
from relay.capture.layers import layer_of
from relay.capture.measure import count_flops, count_moved, fingerprint, peak_of_temporaries, saved_bytes
from relay.capture.reads import Reads, recorded_reads
from relay.errors import CaptureError, RelayError

aten = torch.ops.aten
logger = logging.getLogger(__name__)


def autocast(compute: torch.dtype, kind: str = "cpu") -> contextlib.AbstractContextManager[Any]:
    """PyTorch's autocast to that dtype on devices of that type; nothing for float32."""
    if compute is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(kind, dtype=compute)


@dataclass(frozen=True, eq=False)
class Captured:
    """The programs of a segment.

    `backward` is None where nothing asks for a gradient. In a program's ports `index` counts the segment's own
    parameters (each once, in the order of `parameter_names`), buffers, input values and output values.

    A segment that ends in the loss also has `loss` (the loss and buffer updates alone) and `joint` (those and the
    gradients, in one run: the last segment is not run twice).

    `saved` is what plain training would keep of this segment between its forward and its backward, in bytes.
    `kept` are what `backward` is given of the forward besides its inputs: own outputs, then tensors kept for it and
    copies of buffers as the forward found them, which are further outputs (`index` counts on from the outputs).
    `eager` is the segment as it is run where it could not be captured, `reads` what the module's code looked at.
    """

    parameter_names: tuple[tuple[str, ...], ...]
    buffer_names: tuple[str, ...]
    forward: Program
    backward: Program | None
    loss: Program | None
    joint: Program | None
    output_requires_grad: tuple[bool, ...]
    saved: int
    kept: tuple[Port, ...] = ()
    eager: EagerSegment | None = None
    reads: Reads | None = None


def capture(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    name: str,
    ends_in_loss: bool = False,
    compute: torch.dtype = torch.float32,
    lowering: Lowering = Lowering.NATIVE,
    training: bool = True,
    keep: bool = False,
    place: torch.device = CPU,
) -> Captured:
    """Capture `module(*inputs)`, which returns a tuple of tensors, the loss first where it `ends_in_loss`.

    `requires_grad` of the inputs is respected. `inputs` are examples: shapes, dtypes and `requires_grad` count,
    values do not. With `compute` bfloat16 or float16 the module runs as under PyTorch's autocast; a parameter that is
    only ever used rounded to that dtype then comes in rounded. `lowering` is what the device wants (`NATIVE` among its
    tags, or core), and `place` where native graphs are run. With `keep` the backward does not recompute the forward:
    what it reads of it is kept (a segment that runs eagerly, or ends in the loss, keeps nothing). Without `training` no
    gradient will be asked for. Raises CaptureError.
    """
    if lowering is Lowering.NATIVE and any(isinstance(one, (nn.RNNBase, nn.RNNCellBase)) for one in module.modules()):
        logger.info("layer %r holds recurrent layers, and runs as PyTorch's own kernels have it", name)
        return _run_eagerly(module, inputs, name, ends_in_loss, compute, training, place)
    wants_gradients = any(tensor.requires_grad for tensor in [*module.parameters(), *inputs])
    # The joint export wants something to differentiate; a zero-sized input is as good as any.
    spare = [] if wants_gradients else [torch.zeros(0, requires_grad=True)]
    given = (*inputs, *spare)
    try:
        if lowering is Lowering.NATIVE and place.type != "cpu":
            traced, reads, plain = _trace_elsewhere(module, given, name, compute, not wants_gradients, place)
        else:
            traced, reads, plain = _trace(module, given, compute, not wants_gradients, lowering)
    except Exception as failure:
        why = reason(failure, name)
        if why is None:
            raise
        try:
            captured = _run_eagerly(module, inputs, name, ends_in_loss, compute, training, place)
        except RelayError:
            raise
        except Exception:
            raise explain(failure, name) from failure
        warnings.warn(
            f"layer {name!r} runs eagerly, op by op, since {why}: right, but slower, and only on devices that execute "
            "PyTorch.",
            stacklevel=2,
        )
        return captured
    plain.refuse_states(name, constants_of(traced))
    extraction = _Extraction(module, traced, name, wants_gradients, compute, lowering)
    captured = extraction.captured(ends_in_loss, keep and not ends_in_loss)
    return replace(captured, reads=reads)


def _trace(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    compute: torch.dtype,
    has_spare: bool,
    lowering: Lowering,
    place: torch.device = CPU,
) -> tuple[fx.GraphModule, Reads, PlainTensors]:
    """The joint graph of a module, what its code read, and what it did to plain tensors. Raises what tracing raises."""
    traced = _Traced(module, compute, has_spare, place)
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore")
        # A module's tensors that are neither parameters nor buffers meet fake ones in the trace.
        mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
        stack.enter_context(tracing(TracingContext(mode)))
        stack.enter_context(own_kernels())
        table = None
        if lowering is not Lowering.NATIVE:
            stack.enter_context(attention())
        if lowering is Lowering.CORE:
            table = decompositions()
        if place != CPU:
            inputs = stack.enter_context(fakes_on(place, mode, module, inputs))
        # In this order: to look at attributes would count as the module's code reading them all.
        plain = stack.enter_context(PlainTensors(module))
        reads = stack.enter_context(recorded_reads(module))
        joint = aot_export_joint_with_descriptors(stack, traced, tuple(inputs), {}, decompositions=table)
        if place != CPU:
            spell_out(joint.graph_module.graph)
        return joint.graph_module, reads, plain


def _trace_elsewhere(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    name: str,
    compute: torch.dtype,
    has_spare: bool,
    place: torch.device,
) -> tuple[fx.GraphModule, Reads, PlainTensors]:
    """The joint graph as PyTorch would run it on `place`, or the portable one where it cannot be traced for that."""
    why = missing(place)
    if not why:
        try:
            traced = _trace(module, inputs, compute, has_spare, Lowering.NATIVE, place)
            if any(_draws_by_itself(node) and "attention" in str(node.target) for node in traced[0].graph.nodes):
                traced = _trace(module, inputs, compute, has_spare, Lowering.PORTABLE, place)
            return traced
        except Exception as failure:
            why = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure) else ''}"
    logger.warning("%s is traced for any device, attention as matrix products, and not for %s: %s", name, place, why)
    return _trace(module, inputs, compute, has_spare, Lowering.PORTABLE)


def _run_eagerly(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    name: str,
    ends_in_loss: bool,
    compute: torch.dtype,
    training: bool,
    place: torch.device,
) -> Captured:
    """A segment that is not captured: Python runs it at every visit. Raises what the module raises."""
    for path, one in module.named_modules():
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse and one.weight.requires_grad:
            raise sparse_gradient(name, f"{path}.weight")
    with PlainTensors(module) as plain, UsedTensors() as used:
        segment, programs, wants, saved, kept = eager_programs(
            module, inputs, name, ends_in_loss, functools.partial(autocast, compute, place.type), training
        )
    plain.refuse_states(name, used.addresses)
    assert programs["forward"] is not None
    return Captured(
        parameter_names=tuple(segment.parameters),
        buffer_names=tuple(segment.buffers),
        forward=programs["forward"],
        backward=programs["backward"],
        loss=programs["loss"],
        joint=programs["joint"],
        output_requires_grad=wants,
        saved=saved,
        kept=kept,
        eager=segment,
    )


class _Traced(nn.Module):
    """The module as it is traced: under autocast if asked, with a spare output to differentiate if it has none."""

    def __init__(self, module: nn.Module, compute: torch.dtype, has_spare: bool, place: torch.device) -> None:
        super().__init__()
        self.module = module
        self.compute = compute
        self.has_spare = has_spare
        self.place = place

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # The backward is traced outside of autocast, as eager backward runs outside of it.
        buffers = dict(self.module.named_buffers())
        somewhere = OnDevice(self.place) if self.place != CPU else contextlib.nullcontext()
        with autocast(self.compute, self.place.type), somewhere:
            outputs: tuple[torch.Tensor, ...] = self.module(*(inputs[:-1] if self.has_spare else inputs))
        self._take_in_assigned(buffers)
        # Tracing gives an output that shares memory with an input or another output no gradient of its own.
        taken = {id(tensor) for tensor in inputs}
        separate = []
        for output in outputs:
            shares = id(output) in taken or output._is_view()
            # A seed has the layout of its output, and seeds come in contiguous.
            separate.append(output.clone(memory_format=torch.contiguous_format) if shares else output.contiguous())
            taken.add(id(output))
        return (*separate, inputs[-1] * 2) if self.has_spare else tuple(separate)


    def _take_in_assigned(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """A buffer that the forward replaced (`self.average = ...`) is changed in place, as the trace can see it."""
        for name, buffer in buffers.items():
            owner, _, own_name = name.rpartition(".")
            module = self.module.get_submodule(owner)
            assigned = getattr(module, own_name)
            if assigned is not buffer:
                buffer.copy_(assigned.detach())
                setattr(module, own_name, buffer)


class _Extraction:
    """Reads a joint graph by its descriptors and cuts the programs out of it."""

    def __init__(
        self,
        module: nn.Module,
        traced: fx.GraphModule,
        name: str,
        wants_gradients: bool,
        compute: torch.dtype,
        lowering: Lowering,
    ) -> None:
        self.traced = traced
        self.lowering = lowering
        self.name = name
        self.wants_gradients = wants_gradients
        self.parameters: list[list[tuple[str, fx.Node]]] = []
        self.buffers: list[tuple[str, fx.Node]] = []
        self.values: list[fx.Node] = []
        self.seeds: dict[int, fx.Node] = {}
        self.rounded: dict[fx.Node, list[fx.Node]] = {}
        prefix = "module."
        kinds: dict[str, list[fx.Node]] = {}
        for node in traced.graph.nodes:
            if node.op == "placeholder":
                kinds.setdefault(type(node.meta["desc"]).__name__, []).append(node)
        by_tensor: dict[int, int] = {}
        for node in kinds.pop("ParamAOTInput", []):
            target = node.meta["desc"].target
            # A tensor tied within the segment comes under several names: one parameter to us.
            identity = id(module.get_parameter(target.removeprefix(prefix)))
            if identity not in by_tensor:
                by_tensor[identity] = len(self.parameters)
                self.parameters.append([])
            self.parameters[by_tensor[identity]].append((target.removeprefix(prefix), node))
        for node in kinds.pop("BufferAOTInput", []):
            self.buffers.append((node.meta["desc"].target.removeprefix(prefix), node))
        plain = sorted(kinds.pop("PlainAOTInput", []), key=lambda node: node.meta["desc"].idx)
        self.values = plain if wants_gradients else plain[:-1]
        for node in kinds.pop("TangentAOTInput", []):
            source = node.meta["desc"].output
            if type(source).__name__ != "PlainAOTOutput":
                raise CaptureError(
                    f"layer {name!r} updates a buffer with something that requires a gradient. Detach it first: a "
                    "buffer is state, and no gradient flows through it.",
                    layer=name,
                )
            self.seeds[source.idx] = node
        if kinds:
            raise CaptureError(
                f"layer {name!r} has inputs of a kind that is not known here: {sorted(kinds)}", layer=name
            )
        if compute is not torch.float32:
            for names in self.parameters:
                self._find_rounding([node for _, node in names], compute)
        self.outputs: dict[int, Any] = {}
        self.updates: dict[fx.Node, Any] = {}
        self.gradients: dict[fx.Node, Any] = {}
        self._read_outputs()

    def _find_rounding(self, nodes: Sequence[fx.Node], compute: torch.dtype) -> None:
        """Note the casts of a parameter that is used in no other way than rounded to the compute dtype."""
        users = [user for node in nodes for user in node.users]
        if users and all(
            user.target is aten._to_copy.default and user.kwargs.get("dtype") is compute for user in users
        ):
            self.rounded[nodes[0]] = users

    def _read_outputs(self) -> None:
        output = next(iter(reversed(self.traced.graph.nodes)))
        placeholder_of = {node.meta["desc"]: node for node in self.traced.graph.nodes if node.op == "placeholder"}
        for value, description in zip(output.args[0], output.meta["desc"], strict=True):
            if description is None:
                continue  # the gradient of an input that has none
            kind = type(description).__name__
            if kind == "PlainAOTOutput":
                self.outputs[description.idx] = value
            elif kind == "InputMutationAOTOutput":
                self.updates[placeholder_of[description.mutated_input]] = value
            elif kind == "GradAOTOutput":
                self.gradients[placeholder_of[description.grad_of]] = value
            else:
                raise CaptureError(f"layer {self.name!r} has an output of an unknown kind, {kind}", layer=self.name)
        for node in self.updates:
            if node not in [buffer for _, buffer in self.buffers]:
                raise CaptureError(
                    f"layer {self.name!r} changes one of its inputs in place. The relay keeps inputs for the "
                    "recompute: clone the input before changing it.",
                    layer=self.name,
                )
        self._refuse_sparse()
        if not self.wants_gradients:
            self.outputs.pop(max(self.outputs))
            self.seeds.clear()

    def _refuse_sparse(self) -> None:
        for names in self.parameters:
            for parameter, node in names:
                gradient = self.gradients.get(node)
                if gradient is not None and gradient.meta["val"].layout is not torch.strided:
                    raise sparse_gradient(self.name, parameter)

    def captured(self, ends_in_loss: bool, keep: bool) -> Captured:
        """Cut out the programs."""
        outputs = [(value, self._port(Role.VALUE, index, value)) for index, value in sorted(self.outputs.items())]
        updates = self._buffer_updates()
        gradients = self._gradient_results() if self.wants_gradients else []
        seeds = sorted(self.seeds.items())
        states = {node for names in self.parameters for _, node in names} | {node for _, node in self.buffers}
        forward = _ancestors([[value for value, _ in outputs + updates]])
        wanted = [value for value, _ in gradients]
        saved: list[fx.Node] = []
        if keep:
            results = [node for nodes in wanted for node in nodes]
            saved = nodes_to_keep(self.traced.graph, forward, results, set(self.seeds.values()), states)
            saved = self._read_of(saved, seeds, gradients)
        own = [(node, port) for node, port in outputs if node in saved]
        held = [node for node in saved if not any(node is output for output, _ in own)]
        copies = [] if ends_in_loss else self._buffers_to_keep(wanted, set(saved))
        kept = [(node, self._kept_port(len(outputs) + number, node)) for number, node in enumerate([*held, *copies])]
        given = [node for node, _ in [*own, *kept]]
        return Captured(
            parameter_names=tuple(tuple(name for name, _ in names) for names in self.parameters),
            buffer_names=tuple(name for name, _ in self.buffers),
            forward=self._program("forward", [], outputs + kept + updates),
            backward=self._program("backward", seeds, gradients, given, keep)
            if gradients and not ends_in_loss
            else None,
            loss=self._program("loss", [], outputs[:1] + updates) if ends_in_loss else None,
            joint=self._program("joint", seeds, outputs[:1] + updates + gradients) if ends_in_loss else None,
            output_requires_grad=tuple(index in self.seeds for index in sorted(self.outputs)),
            kept=tuple(port for _, port in [*own, *kept]),
            saved=saved_bytes(self.traced.graph, forward, _ancestors(wanted), states),
        )

    def _buffers_to_keep(self, gradients: Sequence[tuple[Any, ...]], saved: set[fx.Node]) -> list[fx.Node]:
        """Buffers that the forward changes and the backward reads: it must find what the forward found."""
        needed = _ancestors(gradients, saved) - saved
        return [
            node
            for _, node in self.buffers
            if node in self.updates and any(user in needed and not _ignores_statistics(user) for user in node.users)
        ]

    def _port(self, role: Role, index: int, node: fx.Node, accumulates: bool = False) -> Port:
        value = node.meta["val"]
        return Port(role, index, tuple(value.shape), value.dtype, accumulates)

    def _read_of(
        self, saved: Sequence[fx.Node], seeds: Sequence[tuple[int, fx.Node]], gradients: Sequence[tuple[Any, Port]]
    ) -> list[fx.Node]:
        """Those that the backward reads in the end: what random ops are given for its shape alone is not read."""
        program = self._program("backward", seeds, gradients, saved, True)
        read = {port.index - len(self.values) for port in program.inputs if port.role is Role.VALUE}
        return [node for number, node in enumerate(saved) if number in read]

    def _order(self, node: fx.Node) -> list[int]:
        """The order of a kept tensor's dimensions in memory; core graphs have no strides."""
        order = None if self.lowering is Lowering.CORE else order_in_memory(node)
        return list(range(node.meta["val"].dim())) if order is None else order

    def _kept_port(self, index: int, node: fx.Node) -> Port:
        port = self._port(Role.VALUE, index, node)
        return replace(port, shape=tuple(port.shape[dim] for dim in self._order(node)))

    def _buffer_updates(self) -> list[tuple[Any, Port]]:
        return [
            (self.updates[node], self._port(Role.BUFFER_UPDATE, index, node))
            for index, (_, node) in enumerate(self.buffers)
            if node in self.updates
        ]

    def _gradient_results(self) -> list[tuple[Any, Port]]:
        results = []
        for index, names in enumerate(self.parameters):
            uses = [self.gradients[node] for _, node in names if self.gradients.get(node) is not None]
            if uses:
                results.append((tuple(uses), self._port(Role.PARAMETER_GRADIENT, index, names[0][1], True)))
        for index, node in enumerate(self.values):
            gradient = self.gradients.get(node)
            if gradient is not None:
                results.append(((gradient,), self._port(Role.VALUE_GRADIENT, index, node, True)))
        return results

    def _program(
        self,
        kind: str,
        seeds: Sequence[tuple[int, fx.Node]],
        results: Sequence[tuple[Any, Port]],
        kept: Sequence[fx.Node] = (),
        keep: bool = False,
    ) -> Program:
        graph = fx.Graph()
        environment: dict[fx.Node, Any] = {}
        ports: list[Port] = []
        placeholders: list[fx.Node] = []

        def add_input(role: Role, index: int, nodes: Sequence[fx.Node]) -> None:
            placeholder = graph.placeholder(f"{role.name.lower()}_{index}")
            casts = self.rounded.get(nodes[0], [])
            like = casts[0] if casts else nodes[0]
            placeholder.meta = {"val": like.meta["val"]}
            for node in [*nodes, *casts]:
                environment[node] = placeholder
            placeholders.append(placeholder)
            ports.append(self._port(role, index, like))

        for index, names in enumerate(self.parameters):
            add_input(Role.PARAMETER, index, [node for _, node in names])
        for index, (_, node) in enumerate(self.buffers):
            add_input(Role.BUFFER, index, [node])
        for index, node in enumerate(self.values):
            add_input(Role.VALUE, index, [node])
        for index, node in enumerate(kept, len(self.values)):
            add_input(Role.VALUE, index, [node])
            ports[-1] = self._kept_port(index, node)
            placeholders[-1].meta = {"val": in_order(node.meta["val"], self._order(node))}
        for index, node in seeds:
            add_input(Role.SEED, index, [node])
        key = graph.placeholder("key")
        for node in kept:
            order = self._order(node)
            environment[node] = permuted(graph, environment[node], sorted(range(len(order)), key=order.__getitem__))
        wanted = [value if isinstance(value, tuple) else (value,) for value, _ in results]
        needed = _ancestors(wanted, set(environment))
        _copy_nodes(self.traced.graph, needed, graph, environment, key, self.name)
        outputs = []
        early: list[int] = []
        for values, (_, port) in zip(wanted, results, strict=True):
            uses = [environment[use] for use in values]
            total = uses[0]
            for use in uses[1:]:
                total = graph.call_function(aten.add.Tensor, (total, use))
                total.meta = {"val": uses[0].meta["val"]}
            if port.role is Role.VALUE and port.index >= len(self.outputs):  # kept for the backward
                early.append(len(outputs))
                total = permuted(graph, total, self._order(values[0]))
            outputs.append(total)
        graph.output(tuple(outputs))
        graph.eliminate_dead_code()
        if keep:
            # What a backward that recomputes nothing does not read need not be brought.
            unread = [
                place
                for place, (node, port) in enumerate(zip(placeholders, ports, strict=True))
                if port.role is Role.VALUE and not node.users
            ]
            for place in reversed(unread):
                graph.erase_node(placeholders[place])
                del ports[place]
        core = self.lowering is Lowering.CORE
        if core:
            graph = simplify(graph, self.name)
            key = next(node for node in graph.nodes if node.op == "placeholder" and node.target == "key")
        draws = bool(key.users)
        if not draws:
            graph.erase_node(key)
        constants = {
            node.target: getattr(self.traced, node.target) for node in graph.nodes if node.op == "get_attr"
        }
        out_ports = tuple(port for _, port in results)
        return Program(
            name=f"{self.name} {kind}",
            graph=graph,
            inputs=tuple(ports),
            outputs=out_ports,
            constants=constants,
            draws=draws,
            flops=ops.count_flops(graph) if core else count_flops(graph),
            moved=ops.count_moved(graph) if core else count_moved(graph),
            workspace=peak_of_temporaries(graph, early),
            fingerprint=fingerprint(graph, ports, out_ports, constants),
        )


_RANDOM = {
    aten.rand.default: counter_random.uniform,
    aten.rand_like.default: counter_random.uniform,
    aten.randn.default: counter_random.normal,
    aten.randn_like.default: counter_random.normal,
}


_TRAINING_FLAG = {aten._native_batch_norm_legit_functional.default: 5, aten.native_batch_norm_backward.default: 7}


def _ignores_statistics(node: fx.Node) -> bool:
    """Whether an op takes running statistics and does not look at them: BatchNorm in training."""
    flag = _TRAINING_FLAG.get(node.target)  # type: ignore[call-overload]
    return flag is not None and node.args[flag] is True


def _ancestors(wanted: Sequence[Sequence[fx.Node]], given: set[fx.Node] | None = None) -> set[fx.Node]:
    """The nodes that these are made from, themselves included, and none beyond those that are `given`."""
    seen: set[fx.Node] = set()
    stack = [node for nodes in wanted for node in nodes]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if given is None or node not in given:
                stack.extend(node.all_input_nodes)
    return seen


def _copy_nodes(
    source: fx.Graph, needed: set[fx.Node], graph: fx.Graph, environment: dict[fx.Node, Any], key: fx.Node, layer: str
) -> None:
    """Copy the needed ops, with random ops keyed. These are numbered layer by layer, whether needed or not, so that an
    op has the same number in every program of its segment, and in whichever segment its layer is."""
    counts: dict[int, int] = {}
    for node in source.nodes:
        target = node.target
        if node.op in ("placeholder", "output"):
            continue
        draws = _draws_by_itself(node)
        of_layer = layer_of(node)
        counts[of_layer] = counts.get(of_layer, -1) + draws
        if node not in needed or node in environment:
            continue
        number = of_layer * counter_random.OP_LIMIT + counts[of_layer]
        if draws and counts[of_layer] >= counter_random.OP_LIMIT:
            raise CaptureError(
                f"layer {layer!r} draws random numbers more than {counter_random.OP_LIMIT} times; give it as several "
                "layers.",
                layer=layer,
                op=str(target),
            )
        if target is operator.getitem and isinstance(environment[node.args[0]], tuple):
            environment[node] = environment[node.args[0]][node.args[1]]
        elif draws and target is aten.native_dropout.default:
            environment[node] = _keyed_dropout(graph, environment[node.args[0]], node, key, number)
        elif draws and target is aten.bernoulli.p:
            environment[node] = _keyed_bernoulli(graph, node, key, number)
        elif draws and target in _RANDOM and node.meta["val"].dtype is torch.float32:
            drawn = graph.call_function(_RANDOM[target], (key, number, tuple(node.meta["val"].shape)))
            drawn.meta = {"val": node.meta["val"]}
            environment[node] = drawn
        elif draws:
            raise CaptureError(
                f"layer {layer!r} draws random numbers by {target}, which has no counter-based form here. "
                "Dropout, torch.rand, rand_like, randn and randn_like in float32 have one.",
                layer=layer,
                op=str(target),
            )
        else:
            environment[node] = graph.node_copy(node, environment.__getitem__)


def _draws_by_itself(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    if node.target is aten.native_dropout.default:
        return node.args[2] is not False
    schema = node.target._schema  # type: ignore[union-attr]
    for position, argument in enumerate(schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout"):
            given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, 0.0)
            return bool(given)
    return True


def _keyed_bernoulli(graph: fx.Graph, node: fx.Node, key: fx.Node, number: int) -> fx.Node:
    """Ones with probability p, else zeros: what dropout of whole channels draws."""
    value = node.meta["val"]
    probability = float(node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5))  # type: ignore[arg-type]
    mask = graph.call_function(counter_random.keep_mask, (key, number, tuple(value.shape), 1.0 - probability))
    mask.meta = {"val": torch.empty(value.shape, dtype=torch.bool, device="meta")}
    ones = graph.call_function(aten._to_copy.default, (mask,), {"dtype": value.dtype})
    ones.meta = {"val": value}
    return ones


def _keyed_dropout(graph: fx.Graph, source: fx.Node, node: fx.Node, key: fx.Node, number: int) -> tuple[Any, Any]:
    """native_dropout as PyTorch computes it, with the mask drawn by us: (source * mask) * (1 / (1 - p))."""
    probability = float(node.args[1])  # type: ignore[arg-type]
    value = source.meta["val"]
    mask = graph.call_function(counter_random.keep_mask, (key, number, tuple(value.shape), probability))
    mask.meta = {"val": torch.empty(value.shape, dtype=torch.bool, device="meta")}
    kept = graph.call_function(aten.mul.Tensor, (source, mask))
    kept.meta = {"val": value}
    scaled = graph.call_function(aten.mul.Scalar, (kept, 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)))
    scaled.meta = {"val": value}
    return scaled, mask
