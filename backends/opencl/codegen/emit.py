"""Writing one kernel: its arguments, and C statements in nested scopes with equal expressions written once.

A `Writer` belongs to one kernel and collects what it must be given; a `Scope` is a block of C. Neither decides what
is computed. Kernels are named by a hash of their text, so that equal kernels of different programs are one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from backends.opencl.codegen.indices import Index, Ranges

STORED = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "ushort",
    torch.bfloat16: "ushort",
    torch.int64: "long",
    torch.int32: "int",
    torch.int16: "short",
    torch.int8: "char",
    torch.uint8: "uchar",
    torch.bool: "uchar",
}
"""C types of dtypes in memory."""


def c_type(dtype: torch.dtype) -> str:
    """The C type of a value in registers."""
    if dtype in (torch.float16, torch.bfloat16):
        return "float"
    return "int" if dtype is torch.bool else STORED[dtype]


@dataclass(eq=False)
class Buffer:
    """Memory that kernels share: a port of the program, a constant, or a piece of the workspace."""

    kind: str
    """input, output, constant or workspace."""
    index: int
    """Of a port: its position."""
    dtype: torch.dtype
    count: int
    """Elements."""
    name: str = ""
    """Of a constant."""

    @property
    def size(self) -> int:
        """Bytes."""
        return self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Check:
    """A check of an index in the kernel: its number in the program, and from where to where the index may lie."""

    number: int
    low: int
    high: int


@dataclass(frozen=True)
class Argument:
    """What a kernel is given: a buffer, whether output `index` accumulates, the words of draw `index`, a number, or the
    memory for a failed check (`fault`)."""

    kind: str
    buffer: Buffer | None = None
    index: int = 0


@dataclass
class Launch:
    """A kernel's text and how it is started: sizes that are arguments leave one text for many launches."""

    name: str
    source: str
    arguments: list[Argument]
    size: tuple[int, ...]
    group: tuple[int, ...]
    reads: list[Buffer] = field(default_factory=list)
    writes: list[Buffer] = field(default_factory=list)


class Writer:
    """The arguments of one kernel, and its names."""

    def __init__(self) -> None:
        self.ranges = Ranges()
        self._buffers: dict[Buffer, str] = {}
        self._others: dict[tuple[str, int], str] = {}
        self._numbers: list[int] = []
        self._written: list[Buffer] = []
        self._names = 0

    def name(self, prefix: str = "t") -> str:
        """A new name."""
        self._names += 1
        return f"{prefix}{self._names}"

    def pointer(self, buffer: Buffer, writes: bool = False) -> str:
        """The name of a buffer's first element."""
        if writes and buffer not in self._written:
            self._written.append(buffer)
        return self._buffers.setdefault(buffer, f"p{len(self._buffers)}")

    def flag(self, output: int) -> str:
        """The name of an int: whether that output adds to its destination."""
        return self._others.setdefault(("flag", output), f"adds{len(self._others)}")

    def words(self, op: int) -> str:
        """The prefix of five uints, `_0` to `_4`: the words of a draw."""
        return self._others.setdefault(("words", op), f"w{len(self._others)}")

    def fault(self) -> str:
        """The name of two longs: the number of a failed check, counted from 1, and the index that failed it."""
        return self._others.setdefault(("fault", 0), "fault")

    def number(self, value: int) -> str:
        """The name of an INDEX given at each launch: kernels that differ in it alone are one."""
        self._numbers.append(value)
        return f"n{len(self._numbers)}"

    def counter(self, extent: int, prefix: str = "i") -> str:
        """A new variable that runs from 0 to an extent, in a loop that stays as it is."""
        name = self.name(prefix)
        self.ranges.extents[name] = extent
        return name

    def loop(self, extent: int, prefix: str = "i") -> str:
        """A new variable of a loop that may be cut in two (`Split`)."""
        name = self.counter(extent, prefix)
        self.ranges.loops.add(name)
        return name

    def launch(self, body: str, size: Sequence[int], group: Sequence[int], label: str) -> Launch:
        """The finished kernel."""
        parameters, starts, arguments = [], [], []
        for buffer, name in self._buffers.items():
            const = "" if buffer in self._written else "const "
            kind = f"__global {const}{STORED[buffer.dtype]}* restrict"
            parameters.append(f"{kind} {name}_, ulong {name}_at")
            starts.append(f"  {kind} {name} = {name}_ + {name}_at;")
            arguments.append(Argument("buffer", buffer))
        for (kind, index), name in self._others.items():
            if kind == "flag":
                parameters.append(f"int {name}")
            elif kind == "fault":
                parameters.append(f"__global long* restrict {name}")
            else:
                parameters.append(", ".join(f"uint {name}_{word}" for word in range(5)))
            arguments.append(Argument(kind, None, index))
        for count, value in enumerate(self._numbers, 1):
            parameters.append(f"long n{count}_")
            starts.append(f"  const INDEX n{count} = n{count}_;")
            arguments.append(Argument("number", None, value))
        signature = ", ".join(parameters)
        wide = any(buffer.count >= 2**31 for buffer in self._buffers)
        text = f"({signature}) {{\n" + "\n".join(starts) + f"\n{body}}}\n"
        text = text.replace("INDEX", "long" if wide else "int")
        name = f"{label}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        source = f"__kernel void {name}{text}"
        reads = list(self._buffers)
        return Launch(name, source, arguments, tuple(size), tuple(group), reads, list(self._written))


class Scope:
    """A block of C. An expression already written in it, or around it, is not written again."""

    def __init__(self, writer: Writer, outer: Scope | None = None) -> None:
        self.writer = writer
        self.lines: list[str] = []
        self._outer = outer
        self._known: dict[tuple[str, str], str] = {}
        self.notes: dict[object, object] = {}
        """What the generator of a kernel remembers of this block."""

    @property
    def ranges(self) -> Ranges:
        """Of all variables of the kernel."""
        return self.writer.ranges

    def _find(self, key: tuple[str, str]) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if key in scope._known:
                return scope._known[key]
            scope = scope._outer
        return None

    def value(self, kind: str, expression: str) -> str:
        """The name of a value of that C type."""
        known = self._find((kind, expression))
        if known is None:
            known = self.writer.name()
            self._known[(kind, expression)] = known
            self.lines.append(f"const {kind} {known} = {expression};")
        return known

    def index(self, expression: str, extent: int) -> Index:
        """An index computed at run time: any expression below extent and not below zero."""
        name = self.value("INDEX", expression)
        self.ranges.extents[name] = max(extent, 1)
        return Index(((name, 1),))

    def pick(self, name: str, extent: int, check: Check | None) -> Index:
        """The index that a value names: below zero it counts from the end, and it never leaves the memory.

        With a check the first work-item whose index is outside of its domain writes it to the memory for failed checks.
        """
        if check is not None and (name, check) not in self.notes:
            self.notes[name, check] = True
            fault, position = self.writer.fault(), self.writer.number(check.number + 1)
            self.lines.append(
                f"if ({name} < {check.low} || {name} > {check.high}) report_fault({fault}, {position}, {name});"
            )
        from_start = f"{name} < {extent} ? {name} : {extent - 1}"
        from_end = f"{name} < {-extent} ? 0 : {name} + {extent}"
        return self.index(f"(INDEX)({name} < 0 ? ({from_end}) : ({from_start}))", extent)

    def load(self, buffer: Buffer, index: Index) -> str:
        """The value of an element, in a register."""
        pointer = self.writer.pointer(buffer)
        return self.value(c_type(buffer.dtype), loaded(pointer, index.text, buffer.dtype))

    def store(self, buffer: Buffer, index: Index, value: str, output: int | None = None) -> None:
        """Write an element; with `output`, add it where that output accumulates."""
        pointer = self.writer.pointer(buffer, writes=True)
        if output is not None:
            before = loaded(pointer, index.text, buffer.dtype)
            value = f"({self.writer.flag(output)} ? {before} + {value} : {value})"
        self.lines.append(stored(pointer, index.text, value, buffer.dtype))


def loaded(pointer: str, index: str, dtype: torch.dtype) -> str:
    """C that reads an element into a register."""
    if dtype is torch.bfloat16:
        return f"load_bf16({pointer}[{index}])"
    if dtype is torch.float16:
        return f"load_half({pointer}[{index}])"
    if dtype is torch.bool:
        return f"({pointer}[{index}] != 0)"
    return f"{pointer}[{index}]"


def stored(pointer: str, index: str, value: str, dtype: torch.dtype) -> str:
    """C that writes an element."""
    if dtype is torch.bfloat16:
        value = f"store_bf16({value})"
    elif dtype is torch.float16:
        value = f"store_half({value})"
    elif dtype is torch.bool:
        value = f"(({value}) != 0)"
    else:
        value = f"({STORED[dtype]})({value})"
    return f"{pointer}[{index}] = {value};"


def rounded(value: str, dtype: torch.dtype) -> str:
    """C for a value as its dtype can hold it."""
    if dtype is torch.bfloat16:
        return f"round_bf16({value})"
    if dtype is torch.float16:
        return f"round_half({value})"
    return value


def number(value: float | int | bool, dtype: torch.dtype) -> str:
    """A Python number as C."""
    kind = c_type(dtype)
    if not dtype.is_floating_point:
        whole = int(value)
        if dtype is torch.int64 and whole == -(2**63):
            return "(-9223372036854775807L-1)"
        return f"(({kind}){whole}{'L' if kind == 'long' else ''})"
    real = float(value)
    if real != real:
        return f"(({kind})NAN)"
    if real in (float("inf"), float("-inf")):
        return f"(({kind}){'-' if real < 0 else ''}INFINITY)"
    if kind == "float":
        rounded_value = float(torch.tensor(real, dtype=torch.float32))
        if rounded_value in (float("inf"), float("-inf")):
            return number(rounded_value, dtype)
        return f"({rounded_value.hex()}f)"
    return f"({float(real).hex()})"
