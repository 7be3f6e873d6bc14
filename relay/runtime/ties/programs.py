"""Backward programs that hand the gradients of tied weights from segment to segment, for one micro-batch.

`handing_on` makes a program return such gradients like those of a value, added to what later segments left there.
`taking_up` makes a program take in what has arrived, add its own uses, and return the sum as the parameters' gradient:
added to those of earlier micro-batches, it is the gradient in PyTorch's order. The other functions do the same with
some rows of one gradient, whose numbers are one more input. Nothing else in a program changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from hal.program import Port, Program, Role
from relay.capture import fingerprint
from relay.capture.cost import peak_of_temporaries

aten = torch.ops.aten


def results_of(program: Program) -> list[fx.Node]:
    """The nodes that a program returns, in the order of its outputs."""
    return _results(program.graph)


def uses_of(gradient: fx.Node) -> list[fx.Node]:
    """The gradients of a segment's uses of a parameter, in the order in which autograd adds them."""
    uses = [gradient]
    while uses[0].target is aten.add.Tensor and uses[0].meta.get("is_gradient_acc") and len(uses[0].users) == 1:
        uses[:1] = uses[0].args  # type: ignore[assignment]
    return uses


def handing_on(program: Program, positions: Sequence[int]) -> Program:
    """The program with the outputs at `positions` behind all others, as gradients of values."""
    graph, _ = _copied(program)
    results = _results(graph)
    stay = [position for position in range(len(results)) if position not in positions]
    _set_results(graph, [results[position] for position in [*stay, *positions]])
    ports = [program.outputs[position] for position in stay]
    for number, position in enumerate(positions):
        ports.append(replace(program.outputs[position], role=Role.VALUE_GRADIENT, index=_beyond(program) + number))
    return _program(program, graph, program.inputs, ports, 0)


def taking_up(program: Program, positions: Sequence[int]) -> Program:
    """The program with one more seed for each of `positions`, and its uses added to that seed, one after another."""
    graph, placeholders = _copied(program)
    results = _results(graph)
    inputs = list(program.inputs)
    last = placeholders[len(inputs) - 1]  # the key, if there is one, stays behind all inputs
    arrived: list[fx.Node] = []
    for number, position in enumerate(positions):
        port = program.outputs[position]
        with graph.inserting_after(last):
            last = graph.placeholder(f"tied_{len(inputs)}")  # unlike those that were taken up before
        last.meta = {"val": results[position].meta["val"]}
        arrived.append(last)
        inputs.append(Port(Role.SEED, _beyond(program) + number, port.shape, port.dtype))
    moved = 0
    for total, position in zip(arrived, positions, strict=True):
        latest = last if len(placeholders) == len(program.inputs) else placeholders[-1]
        for use in uses_of(results[position]):
            order = {node: place for place, node in enumerate(graph.nodes)}
            latest = max(latest, use, key=order.__getitem__)
            with graph.inserting_after(latest):
                total = latest = graph.call_function(aten.add.Tensor, (total, use))
            total.meta = {"val": use.meta["val"]}
            moved += 3 * program.outputs[position].size
        results[position] = total
    _set_results(graph, results)
    graph.eliminate_dead_code()
    return _program(program, graph, inputs, program.outputs, moved)


def handing_on_rows(program: Program, position: int, index: int, rows: int, keeps: bool) -> Program:
    """The program that returns the given rows of an output, behind all others, as the gradient of a value.

    The numbers of the `rows` are value `index`. If it `keeps` the output itself that is returned too.
    """
    graph, placeholders = _copied(program)
    results = _results(graph)
    port, gradient = program.outputs[position], results[position]
    inputs, chosen = _with_numbers(program, graph, placeholders, gradient, index, rows)
    selected = _called(graph, aten.index_select.default, (gradient, 0, chosen))
    selected.meta = {"val": gradient.meta["val"].new_empty((rows, *port.shape[1:]))}
    handed = replace(port, role=Role.VALUE_GRADIENT, index=_beyond(program), shape=(rows, *port.shape[1:]))
    stay = [number for number in range(len(results)) if keeps or number != position]
    _set_results(graph, [*(results[number] for number in stay), selected])
    outputs = [*(program.outputs[number] for number in stay), handed]
    return _program(program, graph, inputs, outputs, 2 * handed.size)


def taking_up_rows(program: Program, position: int, index: int, rows: int) -> Program:
    """The program that adds its uses to a seed in the given rows of an output. Its own gradient is zero elsewhere."""
    graph, placeholders = _copied(program)
    results = _results(graph)
    port, gradient = program.outputs[position], results[position]
    inputs, chosen = _with_numbers(program, graph, placeholders, gradient, index, rows)
    seed = Port(Role.SEED, _beyond(program), (rows, *port.shape[1:]), port.dtype)
    before = [node for node in graph.nodes if node.op == "placeholder"][len(inputs) - 1]
    with graph.inserting_after(before):
        total = graph.placeholder(f"tied_rows_{len(inputs)}")  # unlike those that were taken up before
    total.meta = {"val": gradient.meta["val"].new_empty(seed.shape)}
    for use in uses_of(gradient):
        own = _called(graph, aten.index_select.default, (use, 0, chosen))
        own.meta = dict(total.meta)
        total = _called(graph, aten.add.Tensor, (total, own))
        total.meta = dict(own.meta)
    whole = _called(graph, aten.index_copy.default, (gradient, 0, chosen, total))
    whole.meta = {"val": gradient.meta["val"]}
    results[position] = whole
    _set_results(graph, results)
    moved = 5 * len(uses_of(gradient)) * seed.size + 2 * port.size
    return _program(program, graph, [*inputs, seed], program.outputs, moved)


def _with_numbers(
    program: Program, graph: fx.Graph, placeholders: Sequence[fx.Node], like: fx.Node, index: int, rows: int
) -> tuple[list[Port], fx.Node]:
    """The ports with one more value, the numbers of rows, and its placeholder."""
    last = max(number for number, port in enumerate(program.inputs) if port.role is not Role.SEED)
    with graph.inserting_after(placeholders[last]):
        chosen = graph.placeholder("touched_rows")
    chosen.meta = {"val": like.meta["val"].new_empty((rows,), dtype=torch.int64)}
    inputs = list(program.inputs)
    inputs.insert(last + 1, Port(Role.VALUE, index, (rows,), torch.int64))
    return inputs, chosen


def _called(graph: fx.Graph, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    """A call at the end of the graph."""
    with graph.inserting_before(next(iter(reversed(graph.nodes)))):
        return graph.call_function(target, arguments)


def _beyond(program: Program) -> int:
    """A number that no value of the program has."""
    return 1 + max((port.index for port in (*program.inputs, *program.outputs)), default=-1)


def _copied(program: Program) -> tuple[fx.Graph, list[fx.Node]]:
    """A copy of a program's graph, and its placeholders."""
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        environment[node] = graph.node_copy(node, environment.__getitem__)
    return graph, [node for node in graph.nodes if node.op == "placeholder"]


def _results(graph: fx.Graph) -> list[fx.Node]:
    output: Any = next(iter(reversed(graph.nodes)))
    return list(output.args[0])


def _set_results(graph: fx.Graph, results: Sequence[fx.Node]) -> None:
    next(iter(reversed(graph.nodes))).args = (tuple(results),)


def _program(program: Program, graph: fx.Graph, inputs: Sequence[Port], outputs: Sequence[Port], moved: int) -> Program:
    graph.lint()
    return replace(
        program,
        graph=graph,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        moved=program.moved + moved,
        workspace=peak_of_temporaries(graph),
        fingerprint=fingerprint(graph, inputs, outputs, program.constants),
    )
