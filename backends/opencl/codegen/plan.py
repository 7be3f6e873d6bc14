"""From tasks to launches: which tasks share a kernel, and where in the workspace each value lies.

A task joins the kernel that made what it reads, where both run over the same rows; a reduction over columns joins
another over the same. Kernels run in one order on an in-order queue, so memory is given to another value as soon as
the last kernel that reads the first is queued.

Invariant: nothing is read before the launch that writes it, and `size` bytes hold all values that live at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from backends.opencl.codegen.emit import Buffer, Launch
from backends.opencl.codegen.loops import (
    Columns,
    Map,
    NotFusable,
    Reduce,
    Space,
    Task,
    Traits,
    column_kernel,
    row_kernel,
    space_of,
)
from backends.opencl.codegen.lowering import Lowering
from hal.ops.index_domains import IndexDomain
from hal.program import Program

ALIGNMENT = 128
REACH = 8
"""How many launches back a task looks for company."""

MOST_TASKS = 12
MOST_BUFFERS = 24


@dataclass
class _Group:
    tasks: list[Task]
    space: Space | None
    launch: Launch
    reloaded: set[Buffer] = field(default_factory=set)


@dataclass
class Plan:
    """Launches in order; `offsets` of workspace buffers in bytes; `size` of the workspace; what the checks check."""

    launches: list[Launch]
    offsets: dict[Buffer, int]
    size: int
    checked: list[IndexDomain]


def plan(program: Program, traits: Traits) -> Plan:
    """The plan of a program that has passed `hal.ops.check`."""
    lowering = Lowering(program, traits)
    groups: list[_Group] = []
    made: dict[Buffer, int] = {}
    floor = 0
    for number, step in enumerate(lowering.steps):
        if number == lowering.barrier:
            floor = len(groups)
        if isinstance(step, Launch):
            groups.append(_Group([], None, step))
            where = len(groups) - 1
        else:
            where = _assign(step, groups, made, traits, floor)
        for buffer in groups[where].launch.writes:
            made[buffer] = max(made.get(buffer, 0), where)
    launches = [_final(group, groups, traits) for group in groups]
    offsets, size = _lay_out(launches)
    return Plan(launches, offsets, size, lowering.checked)


def _alone(task: Task, traits: Traits) -> _Group:
    if isinstance(task, Columns):
        return _Group([task], None, column_kernel([task], traits))
    space = space_of(task, traits)
    launch, reloaded = row_kernel([task], space, traits)
    return _Group([task], space, launch, reloaded)


def _assign(task: Task, groups: list[_Group], made: dict[Buffer, int], traits: Traits, floor: int) -> int:
    """Put a task into a group, an old one or a new one; returns its number."""
    own = _alone(task, traits)
    needed = {made[buffer] for buffer in own.launch.reads if buffer in made}
    last = max(needed, default=-1)
    if task.target.buffer not in made:
        for number in range(len(groups) - 1, max(last, floor, len(groups) - REACH) - 1, -1):
            joined = _joined(groups[number], task, own, number == last, traits)
            if joined is not None:
                groups[number] = joined
                return number
    groups.append(own)
    return len(groups) - 1


def _joined(group: _Group, task: Task, own: _Group, depends: bool, traits: Traits) -> _Group | None:
    if not group.tasks or len(group.tasks) >= MOST_TASKS:
        return None
    shared = {*group.launch.reads, *group.launch.writes} & set(own.launch.reads)
    if not shared or len({*group.launch.reads, *own.launch.reads}) > MOST_BUFFERS:
        return None
    tasks = [*group.tasks, task]
    first = group.tasks[0]
    if isinstance(task, Columns) or isinstance(first, Columns):
        if not (isinstance(task, Columns) and isinstance(first, Columns)):
            return None
        if depends or (task.value.shape, task.dims) != (first.value.shape, first.dims):
            return None
        columns = [member for member in tasks if isinstance(member, Columns)]
        return _Group(tasks, None, column_kernel(columns, traits))
    rows = [member for member in tasks if not isinstance(member, Columns)]
    assert group.space is not None
    assert own.space is not None
    for space in _spaces(group, task, own):
        try:
            launch, reloaded = row_kernel(rows, space, traits)
        except NotFusable:
            continue
        return _Group(tasks, space, launch, reloaded)
    return None


def _spaces(group: _Group, task: Task, own: _Group) -> list[Space]:
    """The loops under which a group and a task may meet."""
    assert group.space is not None
    assert own.space is not None
    rows, width = (math.prod(part) for part in group.space)
    count = task.value.count if isinstance(task, (Map, Reduce)) else 0
    if isinstance(task, Map):
        return [group.space] if count in (rows * width, rows) else []
    if (rows, width) == tuple(math.prod(part) for part in own.space):
        return [group.space]
    if count == rows * width and all(isinstance(member, Map) and member.value.count == count for member in group.tasks):
        return [own.space]
    return []


def _final(group: _Group, groups: list[_Group], traits: Traits) -> Launch:
    """The group's launch without stores that are never read."""
    if group.space is None or len(group.tasks) < 2:
        return group.launch
    outside = {buffer for other in groups if other is not group for buffer in other.launch.reads}
    targets = {task.target.buffer for task in group.tasks}
    skipped = frozenset(buffer for buffer in targets - outside - group.reloaded if buffer.kind == "workspace")
    if not skipped:
        return group.launch
    rows = [task for task in group.tasks if not isinstance(task, Columns)]
    launch, _ = row_kernel(rows, group.space, traits, skipped)
    return launch


def _lay_out(launches: list[Launch]) -> tuple[dict[Buffer, int], int]:
    """Offsets by first fit, in order of size where lives begin together."""
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for number, launch in enumerate(launches):
        for buffer in {*launch.reads, *launch.writes}:
            if buffer.kind == "workspace":
                first.setdefault(buffer, number)
                last[buffer] = number
    offsets: dict[Buffer, int] = {}
    size = 0
    for buffer in sorted(first, key=lambda candidate: (first[candidate], -candidate.size)):
        taken = sorted(
            (offset, offset + _rounded(other.size)) for other, offset in offsets.items() if last[other] >= first[buffer]
        )
        at = 0
        for start, end in taken:
            if at + _rounded(buffer.size) <= start:
                break
            at = max(at, end)
        offsets[buffer] = at
        size = max(size, at + _rounded(buffer.size))
    return offsets, size


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
