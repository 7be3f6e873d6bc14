"""Native programs that look rows up in a table: which parameters are such tables, and the program over few rows.

A parameter is a table if a program reads it by `aten.embedding` alone and differentiates it by
`aten.embedding_dense_backward` alone, with indices that follow from the batch: they can be computed on the host before
the step. `over_rows` gives the same program over a table of fewer rows, with the indices as further inputs. No rows are
chosen here (`relay.runtime.sparse_rows`). Invariant: the numbers of a row are the same, to the bit, whichever other
rows the table has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hal.program import Port, Program, Role
from relay.capture.cost import count_moved, fingerprint, peak_of_temporaries

aten = torch.ops.aten
LOOKUP = aten.embedding.default
_BACKWARD = aten.embedding_dense_backward.default


class NotATable(Exception):
    """A parameter is not read by lookups of the batch's indices alone. The message is the reason."""


@dataclass(frozen=True, eq=False)
class IndexExpression:
    """Indices as the program computes them from the segment's inputs.

    Two expressions with one `key` have equal values. `values` are the numbers of the inputs that it takes, and
    `constants` the tensors that the program holds.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: tuple[int, ...]
    nodes: tuple[fx.Node, ...]
    numbers: Mapping[fx.Node, int]
    constants: Mapping[str, torch.Tensor]

    def compute(self, inputs: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The indices, on the host, from the inputs by number as they are stored."""
        known: dict[fx.Node, Any] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                known[node] = inputs[self.numbers[node]]
                continue
            if node.op == "get_attr":
                known[node] = self.constants[str(node.target)].cpu()
                continue
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
            if "device" in kwargs:  # the program's own
                kwargs = {**kwargs, "device": inputs[self.values[0]].device if self.values else torch.device("cpu")}
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        result: torch.Tensor = known[self.nodes[-1]]
        return result


@dataclass(frozen=True)
class Lookups:
    """How a program uses a table: the indices by key, and the row that gets no gradient (-1 for none)."""

    expressions: Mapping[str, IndexExpression]
    padding: int = -1


def find_lookups(program: Program, parameter: int, of_batch: Collection[int]) -> Lookups:
    """How a program uses a parameter (its number in the segment) as a table. Raises NotATable.

    `of_batch` are the numbers of the segment's inputs that are tensors of the batch.
    """
    ports = dict(zip(_placeholders(program), program.inputs, strict=False))
    tables = [node for node, port in ports.items() if port.role is Role.PARAMETER and port.index == parameter]
    found: dict[str, IndexExpression] = {}

    def add(node: Any) -> None:
        expression = _expression(node, ports, of_batch, program.constants)
        found.setdefault(expression.key, expression)

    for table in tables:
        for user in table.users:
            if user.target is not LOOKUP or user.args[0] is not table or user.args[1] is table:
                raise NotATable(f"it is used by {user.target}, too")
            add(user.args[1])
    paddings = set()
    for node in _backwards_of(program, parameter):
        add(node.args[1])
        paddings.add(node.args[3])
    if len(paddings) > 1:
        raise NotATable("its lookups have different padding_idx")
    padding = paddings.pop() if paddings else -1
    assert isinstance(padding, int)
    return Lookups(found, padding)


def over_rows(
    program: Program,
    rows: Mapping[int, int],
    indices: Sequence[tuple[int, str]],
    of_batch: Collection[int],
    values: int,
) -> Program:
    """The program over tables of fewer rows.

    Args:
        program: what `find_lookups` has found tables in.
        rows: the rows of each table, by the number of its parameter. Where lookups have a padding row, it is row 0.
        indices: the further inputs, after the last value: for which table, and the key of the expression.
        of_batch: as `find_lookups` takes it.
        values: how many values the program computes besides those that it saves.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(program.graph, copies))
    ports = dict(zip(_placeholders(program), program.inputs, strict=False))
    last = [node for node, port in ports.items() if port.role is not Role.SEED]
    first = next(iter(graph.nodes))
    place = copies[last[-1]] if last else None
    new: dict[tuple[int, str], fx.Node] = {}
    new_ports = [port for port in program.inputs if port.role is not Role.SEED]
    most = max([port.index for port in program.inputs if port.role is Role.VALUE], default=-1)
    for number, (parameter, key) in enumerate(indices):
        context = graph.inserting_before(first) if place is None else graph.inserting_after(place)
        with context:
            place = new[(parameter, key)] = graph.placeholder(f"rows_{number}")
        expression = find_lookups(program, parameter, of_batch).expressions[key]
        place.meta = {"val": expression.nodes[-1].meta["val"].new_empty(expression.shape, dtype=torch.int64)}
        new_ports.append(Port(Role.VALUE, most + 1 + number, expression.shape, torch.int64))
    new_ports += [port for port in program.inputs if port.role is Role.SEED]

    def renumber(node: fx.Node, parameter: int) -> None:
        key = _expression(node.args[1], ports, of_batch, program.constants).key
        copies[node].update_arg(1, new[(parameter, key)])

    for table, port in ports.items():
        if port.role is Role.PARAMETER and port.index in rows:
            copies[table].meta = {"val": _cut(table.meta["val"], rows[port.index])}
            for user in table.users:
                renumber(user, port.index)
    for parameter, count in rows.items():
        for node in _backwards_of(program, parameter):
            renumber(node, parameter)
            copies[node].update_arg(2, count)
            copies[node].update_arg(3, 0 if node.args[3] != -1 else -1)
        for node in _sum_of(program, parameter):
            copies[node].meta = {**node.meta, "val": _cut(node.meta["val"], count)}
    graph.eliminate_dead_code()

    def cut(port: Port) -> Port:
        if port.role not in (Role.PARAMETER, Role.PARAMETER_GRADIENT) or port.index not in rows:
            return port
        shape = (rows[port.index], *port.shape[1:])
        return Port(port.role, port.index, shape, port.dtype, port.accumulates)

    inputs, outputs = tuple(map(cut, new_ports)), tuple(map(cut, program.outputs))
    early = [number for number, port in enumerate(outputs) if port.role is Role.VALUE and port.index >= values]
    return Program(
        name=program.name,
        graph=graph,
        inputs=inputs,
        outputs=outputs,
        constants=program.constants,
        draws=program.draws,
        flops=program.flops,
        moved=count_moved(graph),
        workspace=peak_of_temporaries(graph, early),
        fingerprint=fingerprint(graph, inputs, outputs, program.constants),
    )


def _placeholders(program: Program) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "placeholder"]


def _cut(value: torch.Tensor, rows: int) -> torch.Tensor:
    return value.new_empty((rows, *value.shape[1:]))


def _sum_of(program: Program, parameter: int) -> list[fx.Node]:
    """The nodes that make up a parameter's gradient: lookups' gradients, their sums, and changes of dtype."""
    output = next(node for node in program.graph.nodes if node.op == "output")
    results: Any = output.args[0]
    waiting = [
        result
        for result, port in zip(results, program.outputs, strict=True)
        if port.role is Role.PARAMETER_GRADIENT and port.index == parameter
    ]
    found: dict[fx.Node, None] = {}
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found[node] = None
        if node.target is aten.add.Tensor and not node.kwargs:
            waiting += [argument for argument in node.args if isinstance(argument, fx.Node)]
        elif node.target is aten._to_copy.default and set(node.kwargs) <= {"dtype"}:
            waiting.append(node.args[0])  # type: ignore[arg-type]
        elif node.target is not _BACKWARD:
            raise NotATable(f"its gradient is made by {node.target}, too")
    for node in found:
        if any(user not in found and user is not output for user in node.users):
            raise NotATable("its gradient is used inside the layer")
    return list(found)


def _backwards_of(program: Program, parameter: int) -> list[fx.Node]:
    return [node for node in _sum_of(program, parameter) if node.target is _BACKWARD]


def _expression(
    node: Any, ports: Mapping[fx.Node, Port], of_batch: Collection[int], constants: Mapping[str, torch.Tensor]
) -> IndexExpression:
    """The indices that a node computes, if they follow from the batch. Raises NotATable."""
    order: dict[fx.Node, str] = {}
    numbers: dict[fx.Node, int] = {}

    def visit(one: fx.Node) -> str:
        if one in order:
            return order[one]
        if one.op == "placeholder":
            port = ports.get(one)
            if port is None or port.role is not Role.VALUE or port.index not in of_batch:
                raise NotATable("its indices do not follow from the batch alone")
            numbers[one] = port.index
            text = f"value {port.index}"
        elif one.op == "get_attr":
            text = f"constant {constants[str(one.target)].tolist()}"
        elif one.op == "call_function" and isinstance(one.target, torch._ops.OpOverload):
            if torch.Tag.nondeterministic_seeded in one.target.tags:
                raise NotATable("its indices are drawn at random")
            names = {argument: visit(argument) for argument in one.all_input_nodes}
            text = f"{one.target}{fx.node.map_arg((one.args, dict(one.kwargs)), names.__getitem__)}"
        else:
            raise NotATable("its indices do not follow from the batch alone")
        order[one] = text
        return text

    if not isinstance(node, fx.Node):
        raise NotATable("its indices are no tensor")
    key = visit(node)
    value = node.meta["val"]
    return IndexExpression(
        key, tuple(value.shape), value.dtype, tuple(sorted(set(numbers.values()))), tuple(order), numbers, constants
    )
