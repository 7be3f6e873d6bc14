"""The tables of a compiled model, and the compiled model over some rows of each.

A table is a parameter that one segment alone uses, by lookups of indices that follow from the batch. How many rows
there is room for follows from the shapes of the batch: as many as it has indices. Which rows a pass uses is
`relay.runtime.sparse_rows.passes`. Invariant: a compiled model is not changed; the one over rows is another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from hal.program import Role
from relay.capture.native.embedding_rows import LOOKUP, Lookups, NotATable, find_lookups, over_rows
from relay.partition.segments import Value
from relay.runtime.sparse_rows.table import Table
from relay.runtime.stages import CompiledModel, Stage, StageProgram

FEWEST = 64
"""The least number of rows. Above it the number is a power of two, so that few programs serve all batches."""


def find_tables(compiled: CompiledModel, shared: Collection[str]) -> tuple[dict[str, Table], dict[str, str]]:
    """The tables by name; and of other parameters that something is looked up in, why they are none.

    `shared` are parameters whose memory other tensors share.
    """
    users = Counter(name for stage in compiled.stages for name in stage.parameters)
    found: dict[str, Table] = {}
    refused: dict[str, str] = {}
    for number, stage in enumerate(compiled.stages):
        if stage.captured.eager is not None:
            continue
        of_batch = _of_batch(compiled, stage)
        for index in _looked_up(stage):
            name = stage.parameters[index]
            try:
                if users[name] > 1:
                    raise NotATable("another segment uses it too (it is tied), and needs all rows")
                if any(one.rest is not None or one.chunks is not None for one in stage.programs):
                    raise NotATable("its layer runs over chunks of positions")
                if name in shared:
                    raise NotATable("another tensor of the model shares its memory")
                lookups = [find_lookups(one.program, index, of_batch) for one in stage.programs]
                found[name] = _table(compiled, number, index, name, lookups)
            except NotATable as reason:
                refused[name] = str(reason)
    return found, refused


def choose_counts(
    models: Sequence[Mapping[str, Table]], least_saving: int, before: Mapping[str, int]
) -> dict[str, int]:
    """The rows of each table, for a step of micro-batches with these tables. What is not named stays whole.

    A table must have at least `least_saving` times as many rows as are sent; 0 for none. `before` are earlier answers,
    which are kept where they are large enough.
    """
    counts = {}
    for name, table in models[0].items() if least_saving else ():
        if not all(name in tables for tables in models):
            continue
        needed = _most_rows([tables[name] for tables in models])
        count = max(FEWEST, 1 << max(0, needed - 1).bit_length())
        for candidate in (max(count, before.get(name, 0)), count):
            if candidate < table.length and candidate * least_saving <= table.length:
                counts[name] = candidate
                break
    return counts


def _most_rows(tables: Sequence[Table]) -> int:
    """How many different rows the micro-batches can look up, each with one of these tables."""
    of_batch = [one for table in tables for one in table.expressions if one.values]
    constant = {one.key: one for table in tables for one in table.expressions if not one.values}
    indices = sum(math.prod(one.shape) for one in [*of_batch, *constant.values()])
    return indices + any(table.padding >= 0 for table in tables)


def with_rows(compiled: CompiledModel, tables: Mapping[str, Table], counts: Mapping[str, int]) -> CompiledModel:
    """The compiled model over so many rows of some tables. It has further inputs: the indices, table by table."""
    chosen = [replace(tables[name], count=count) for name, count in sorted(counts.items())]
    chosen.sort(key=lambda table: table.stage)
    partition = compiled.partition
    values, inputs = list(partition.values), list(partition.inputs)
    stages = list(compiled.stages)
    for number in dict.fromkeys(table.stage for table in chosen):
        stage, own = stages[number], [table for table in chosen if table.stage == number]
        added: list[tuple[int, str]] = []
        new: list[int] = []
        for table in own:
            for expression in table.expressions:
                values.append(Value(len(values), expression.shape, torch.int64, None, [number]))
                inputs.append(values[-1].index)
                new.append(values[-1].index)
                added.append((table.parameter, expression.key))
        stages[number] = _stage_over_rows(compiled, stage, own, added, new)
    return replace(
        compiled,
        partition=replace(partition, values=values, inputs=tuple(inputs)),
        stages=stages,
        tables=tuple(chosen),
        whole=compiled.whole or compiled,
    )


def _stage_over_rows(
    compiled: CompiledModel, stage: Stage, tables: Sequence[Table], added: Sequence[tuple[int, str]], new: Sequence[int]
) -> Stage:
    of_batch = _of_batch(compiled, stage)
    counts = {table.parameter: table.count for table in tables}
    results = sum(not compiled.partition.values[value].parts for value in stage.segment.outputs)

    def program_over_rows(one: StageProgram | None) -> StageProgram | None:
        if one is None:
            return None
        used = {index: find_lookups(one.program, index, of_batch).expressions for index in counts}
        here = [position for position, (index, key) in enumerate(added) if key in used[index]]
        program = over_rows(one.program, counts, [added[position] for position in here], of_batch, results)
        return replace(one, program=program, reads=(*one.reads, *(new[position] for position in here)), kernel=None)

    names = {table.parameter: table.key for table in tables}
    return replace(
        stage,
        parameters=tuple(names.get(index, name) for index, name in enumerate(stage.parameters)),
        forward=program_over_rows(stage.forward),
        backward=program_over_rows(stage.backward),
    )


def _of_batch(compiled: CompiledModel, stage: Stage) -> set[int]:
    """The segment's inputs that are tensors of the batch, by number, except those that require a gradient."""
    values = compiled.partition.values
    given = {value for value in compiled.partition.inputs if not values[value].requires_grad}
    return {index for index, value in enumerate(stage.segment.inputs) if value in given}


def _looked_up(stage: Stage) -> list[int]:
    """The numbers of the stage's parameters that any of its programs looks something up in."""
    found: set[int] = set()
    for one in stage.programs:
        for node, port in zip(one.program.graph.nodes, one.program.inputs, strict=False):  # placeholders come first
            is_table = any(user.target is LOOKUP and user.args[0] is node for user in node.users)
            if port.role is Role.PARAMETER and is_table:
                found.add(port.index)
    return sorted(found)


def _table(compiled: CompiledModel, number: int, index: int, name: str, lookups: Sequence[Lookups]) -> Table:
    stage = compiled.stages[number]
    paddings = {one.padding for one in lookups if one.padding >= 0}
    if len(paddings) > 1:
        raise NotATable("its lookups have different padding_idx")
    expressions = {key: expression for one in lookups for key, expression in one.expressions.items()}
    program = stage.programs[0].program
    port = next(port for port in program.inputs if port.role is Role.PARAMETER and port.index == index)
    outputs = stage.backward.program.outputs if stage.backward is not None else ()
    gradient = next((one.dtype for one in outputs if one.role is Role.PARAMETER_GRADIENT and one.index == index), None)
    padding = paddings.pop() if paddings else -1
    return Table(name, number, index, port.dtype, gradient, port.shape[0], tuple(expressions.values()), padding)
