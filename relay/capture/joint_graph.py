"""Reading a joint graph by its descriptors, and cutting the programs out of it.

The descriptors that tracing attaches to inputs and outputs of the graph tell what each is: a parameter, a buffer, a
value, a seed, or the gradient of one of these. Invariant: a program holds the nodes that its results need, and no
others.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from hal import ops
from hal.program import Port, Program, Role
from relay.capture.captured import Captured
from relay.capture.core.lowering import Lowering, simplify
from relay.capture.cost import count_flops, count_moved, fingerprint, peak_of_temporaries, saved_bytes
from relay.capture.guards.messages import changed_input, changed_parameter, name_of_program, sparse_gradient
from relay.capture.memory_order import Order, in_order, inverse, order_of, permuted, stored_shape
from relay.capture.random_ops import ancestors, copy_nodes
from relay.capture.request import CaptureRequest
from relay.capture.saved_tensors import nodes_to_save
from relay.errors import CaptureError
from relay.graph.late_order import late_order

aten = torch.ops.aten


class Extraction:
    """The joint graph of a segment with its inputs and outputs sorted by kind, from which programs are cut."""

    def __init__(self, request: CaptureRequest, traced: fx.GraphModule) -> None:
        self.traced = traced
        self.name = request.name
        self.lowering = request.lowering
        self.strides = request.keeps_strides
        self.wants_gradients = request.wants_gradients
        self.given_seed_orders = request.seed_orders
        self.adds_loss = request.adds_loss
        self.late = request.late
        name, given_seeds = request.name, request.seed_orders
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
            # A tensor that is tied within the segment has several names, and is one parameter of the programs.
            identity = id(request.module.get_parameter(target.removeprefix(prefix)))
            if identity not in by_tensor:
                by_tensor[identity] = len(self.parameters)
                self.parameters.append([])
            self.parameters[by_tensor[identity]].append((target.removeprefix(prefix), node))
        for node in kinds.pop("BufferAOTInput", []):
            self.buffers.append((node.meta["desc"].target.removeprefix(prefix), node))
        plain = sorted(kinds.pop("PlainAOTInput", []), key=lambda node: node.meta["desc"].idx)
        count = len(plain) - len(given_seeds) - (not self.wants_gradients)
        self.values = plain[:count]
        for node in kinds.pop("TangentAOTInput", []):
            source = node.meta["desc"].output
            mutated: Any = getattr(source, "mutated_input", None)
            if type(mutated).__name__ == "ParamAOTInput":
                raise changed_parameter(name, mutated.target.removeprefix(prefix))
            if type(mutated).__name__ == "PlainAOTInput":
                raise changed_input(name)
            if type(source).__name__ != "PlainAOTOutput":
                raise CaptureError(
                    f"layer {name!r} assigns a tensor that requires a gradient to a buffer. Detach the tensor "
                    "first: no gradient flows through a buffer.",
                    layer=name,
                )
            self.seeds[source.idx] = node
        # A seed with an example is an input of the module; the one that the export makes for it is not used.
        self.seeds.update(zip(given_seeds, plain[count : count + len(given_seeds)], strict=True))
        if kinds:
            raise CaptureError(
                f"layer {name!r} has inputs of kinds that Relay does not support: {sorted(kinds)}", layer=name
            )
        if request.compute_dtype is not torch.float32:
            for names in self.parameters:
                self._find_rounding([node for _, node in names], request.compute_dtype)
        self.outputs: dict[int, Any] = {}
        self.updates: dict[fx.Node, Any] = {}
        self.gradients: dict[fx.Node, Any] = {}
        self._read_outputs()

    def _find_rounding(self, nodes: Sequence[fx.Node], dtype: torch.dtype) -> None:
        """Store the casts of a parameter that is used only after a cast to `dtype`."""
        users = [user for node in nodes for user in node.users]
        if users and all(user.target is aten._to_copy.default and user.kwargs.get("dtype") is dtype for user in users):
            self.rounded[nodes[0]] = users

    def _read_outputs(self) -> None:
        output = next(iter(reversed(self.traced.graph.nodes)))
        placeholder_of = {node.meta["desc"]: node for node in self.traced.graph.nodes if node.op == "placeholder"}
        for value, description in zip(output.args[0], output.meta["desc"], strict=True):
            if description is None:
                continue  # an input without gradient
            kind = type(description).__name__
            if kind == "PlainAOTOutput":
                self.outputs[description.idx] = value
            elif kind == "InputMutationAOTOutput":
                self.updates[placeholder_of[description.mutated_input]] = value
            elif kind == "GradAOTOutput":
                self.gradients[placeholder_of[description.grad_of]] = value
            else:
                raise CaptureError(
                    f"layer {self.name!r} has an output of a kind that Relay does not support: {kind}", layer=self.name
                )
        for node in self.updates:
            description = node.meta["desc"]
            if type(description).__name__ == "ParamAOTInput":
                raise changed_parameter(self.name, description.target.removeprefix("module."))
            if node not in [buffer for _, buffer in self.buffers]:
                raise changed_input(self.name)
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

    def named(self, name: str) -> Extraction:
        """The same graph under the name of another segment, which is built alike."""
        other = copy.copy(self)
        other.name = name
        return other

    def captured(
        self, asked: Mapping[int, Order], ends_in_loss: bool, save: bool, shown: frozenset[int] = frozenset()
    ) -> Captured:
        """Cut out the programs. `asked` maps inputs to the memory orders in which their gradients are wanted.

        `shown` are outputs that the joint program returns besides the loss.
        """
        self.asked_orders = asked
        outputs = [(node, self._stored_port(Role.VALUE, index, node)) for index, node in sorted(self.outputs.items())]
        if self.adds_loss:
            loss, port = outputs[0]
            outputs[0] = loss, replace(port, accumulates=True)
        updates = self._buffer_updates()
        gradients = self._gradient_results() if self.wants_gradients else []
        seeds = sorted(self.seeds.items())
        states = {node for names in self.parameters for _, node in names} | {node for _, node in self.buffers}
        forward = ancestors([[value for value, _ in outputs + updates]])
        wanted = [value for value, _ in gradients]
        saved: list[fx.Node] = []
        if save:
            results = [node for nodes in wanted for node in nodes]
            saved = nodes_to_save(self.traced.graph, forward, results, set(self.seeds.values()), states)
            saved = self._read_of(saved, seeds, gradients)
        others = [output for number, output in enumerate(outputs) if number in shown]
        own = [(node, port) for node, port in outputs if node in saved]
        inner = [node for node in saved if not any(node is output for output, _ in own)]
        copies = [] if ends_in_loss else self._buffers_to_save(wanted, set(saved))
        extra = [
            (node, self._stored_port(Role.VALUE, number, node))
            for number, node in enumerate([*inner, *copies], len(outputs))
        ]
        given = [node for node, _ in [*own, *extra]]
        return Captured(
            parameter_names=tuple(tuple(name for name, _ in names) for names in self.parameters),
            buffer_names=tuple(name for name, _ in self.buffers),
            forward=self._program("forward", [], outputs + extra + updates),
            backward=self._program("backward", seeds, gradients, given, save)
            if gradients and not ends_in_loss
            else None,
            loss=self._program("loss", [], outputs[:1] + updates) if ends_in_loss else None,
            joint=self._program("joint", seeds, [*outputs[:1], *others, *updates, *gradients])
            if ends_in_loss
            else None,
            output_requires_grad=tuple(index in self.seeds for index in sorted(self.outputs)),
            saved=tuple(port for _, port in [*own, *extra]),
            saved_bytes=saved_bytes(self.traced.graph, forward, ancestors(wanted), states),
            output_orders={index: self._order(node) for index, node in self.outputs.items()},
            seed_orders={index: self.given_seed_orders.get(index, self._order(node)) for index, node in seeds},
            gradient_orders={
                index: self._gradient_order(index, self.gradients[node])
                for index, node in enumerate(self.values)
                if self.gradients.get(node) is not None
            },
        )

    def _buffers_to_save(self, gradients: Sequence[tuple[Any, ...]], saved: set[fx.Node]) -> list[fx.Node]:
        """Buffers that the forward changes and the backward reads, which needs the values from before the change."""
        needed = ancestors(gradients, saved) - saved
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
        """The saved nodes that the backward program reads. A tensor of which only the shape is used is not read."""
        program = self._program("backward", seeds, gradients, saved, True)
        read = {port.index - len(self.values) for port in program.inputs if port.role is Role.VALUE}
        return [node for number, node in enumerate(saved) if number in read]

    def _order(self, node: fx.Node) -> Order:
        """The memory order of a tensor; in core graphs, which have no strides, the order of its dimensions."""
        passed_on = node.op == "placeholder" or any(node is output for output in self.outputs.values())
        if self.lowering is Lowering.CORE or (passed_on and not self.strides):
            return ()
        return order_of(node.meta["val"])

    def _gradient_order(self, index: int, node: fx.Node) -> Order:
        return self.asked_orders.get(index, self._order(node)) if self.strides else ()

    def _stored_port(self, role: Role, index: int, node: fx.Node, order: Order | None = None) -> Port:
        """The port of a value, with the shape of its memory."""
        port = self._port(role, index, node)
        return replace(port, shape=stored_shape(port.shape, self._order(node) if order is None else order))

    def _buffer_updates(self) -> list[tuple[Any, Port]]:
        return [
            (self.updates[node], self._port(Role.BUFFER_UPDATE, index, node))
            for index, (_, node) in enumerate(self.buffers)
            if node in self.updates
        ]

    def _gradient_results(self) -> list[tuple[Any, Port]]:
        results = []
        position = {node: number for number, node in enumerate(self.traced.graph.nodes)}
        for index, names in enumerate(self.parameters):
            # Autograd sums the gradients of a tied parameter in the order of the backward, so the last use is first.
            uses = [self.gradients[node] for _, node in names if self.gradients.get(node) is not None]
            uses.sort(key=position.__getitem__)
            if uses:
                results.append((tuple(uses), self._port(Role.PARAMETER_GRADIENT, index, names[0][1], True)))
        for index, node in enumerate(self.values):
            gradient = self.gradients.get(node)
            if gradient is not None:
                order = self._gradient_order(index, gradient)
                port = self._stored_port(Role.VALUE_GRADIENT, index, node, order)
                results.append(((gradient,), replace(port, accumulates=True)))
        return results

    def _program(
        self,
        kind: str,
        seeds: Sequence[tuple[int, fx.Node]],
        results: Sequence[tuple[Any, Port]],
        saved: Sequence[fx.Node] = (),
        drops_unread: bool = False,
    ) -> Program:
        graph = fx.Graph()
        environment: dict[fx.Node, Any] = {}
        ports: list[Port] = []
        placeholders: list[fx.Node] = []
        permuted_inputs: list[tuple[fx.Node, Order]] = []

        def add_input(role: Role, index: int, nodes: Sequence[fx.Node]) -> None:
            placeholder = graph.placeholder(f"{role.name.lower()}_{index}")
            casts = self.rounded.get(nodes[0], [])
            like = casts[0] if casts else nodes[0]
            placeholder.meta = {"val": like.meta["val"]}
            for node in [*nodes, *casts]:
                environment[node] = placeholder
            placeholders.append(placeholder)
            if role in (Role.VALUE, Role.SEED):
                order = self._order(like)
                ports.append(self._stored_port(role, index, like))
                if order:
                    placeholder.meta = {"val": in_order(like.meta["val"], order)}
                    permuted_inputs.append((like, order))
            else:
                ports.append(self._port(role, index, like))

        for index, names in enumerate(self.parameters):
            add_input(Role.PARAMETER, index, [node for _, node in names])
        for index, (_, node) in enumerate(self.buffers):
            add_input(Role.BUFFER, index, [node])
        for index, node in enumerate(self.values):
            add_input(Role.VALUE, index, [node])
        for index, node in enumerate(saved, len(self.values)):
            add_input(Role.VALUE, index, [node])
        for index, node in seeds:
            add_input(Role.SEED, index, [node])
        key = graph.placeholder("key")
        for node, order in permuted_inputs:
            environment[node] = permuted(graph, environment[node], inverse(order))
        wanted = [value if isinstance(value, tuple) else (value,) for value, _ in results]
        needed = ancestors(wanted, set(environment))
        copy_nodes(self.traced.graph, needed, graph, environment, key, self.name)
        outputs: list[fx.Node] = []
        early: list[int] = []
        for values, (_, port) in zip(wanted, results, strict=True):
            uses = [environment[use] for use in values]
            total = uses[0]
            for use in uses[1:]:
                total = graph.call_function(aten.add.Tensor, (total, use))
                total.meta = {"val": uses[0].meta["val"], "is_gradient_acc": True}
            order = ()
            if port.role is Role.VALUE:
                order = self._order(values[0])
                if port.index >= len(self.outputs):  # saved for the backward
                    early.append(len(outputs))
            elif port.role is Role.VALUE_GRADIENT:
                order = self._gradient_order(port.index, values[0])
            if order:
                total = permuted(graph, total, order)
            outputs.append(total)
        graph.output(tuple(outputs))
        graph.eliminate_dead_code()
        if drops_unread:
            # A backward that recomputes nothing does not read all values, and those need not be loaded.
            unread = [
                position
                for position, (node, port) in enumerate(zip(placeholders, ports, strict=True))
                if port.role is Role.VALUE and not node.users
            ]
            for position in reversed(unread):
                graph.erase_node(placeholders[position])
                del ports[position]
        core = self.lowering is Lowering.CORE
        if core:
            graph = simplify(graph, self.name)
            key = next(node for node in graph.nodes if node.op == "placeholder" and node.target == "key")
        if self.late and kind == "backward":
            placed = zip(graph.find_nodes(op="placeholder"), ports, strict=False)
            graph = late_order(graph, [node for node, port in placed if port.role is Role.SEED])
            key = next(node for node in graph.nodes if node.op == "placeholder" and node.target == "key")
        draws = bool(key.users)
        if not draws:
            graph.erase_node(key)
        constants = {node.target: getattr(self.traced, node.target) for node in graph.nodes if node.op == "get_attr"}
        out_ports = tuple(port for _, port in results)
        return Program(
            name=name_of_program(self.name, kind),
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


_TRAINING_FLAG = {aten._native_batch_norm_legit_functional.default: 5, aten.native_batch_norm_backward.default: 7}


def _ignores_statistics(node: fx.Node) -> bool:
    """Whether an op takes running statistics without reading them: BatchNorm in training."""
    flag = _TRAINING_FLAG.get(node.target)  # type: ignore[call-overload]
    return flag is not None and node.args[flag] is True
