"""Descriptions of hardware: devices, links and hosts, each figure with its source, and the catalogue of presets.

A description is a TOML file of cells; presets lie in `hal/spec/presets`, and a file of one's own has the same form and
takes the same place. Peaks are dense, and peak and achieved are two figures. It measures nothing and models nothing.
Everything may import it.

Invariant: a loaded description has every cell that is required, each in its unit and within the bounds below, so
that a slip of the pen (GB for GB/s, MHz for GFLOPS) is an error and not a result.
"""

from __future__ import annotations

import difflib
import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from hal import schema
from hal.errors import HalError
from hal.spec.units import BYTE_RATE, BYTES, FLOP_COUNT, FLOPS, RATIO, SECONDS, WATTS, parse_quantity

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PRESETS = Path(__file__).parent / "presets"


class SpecError(HalError):
    """A description of hardware is not to be had, or not to be believed. The message names the file and the cell."""


@dataclass(frozen=True)
class Column:
    """What a cell must be: its dimension, its bounds (SI), and whether it must be there."""

    dimension: str
    low: float
    high: float
    required: bool = False
    default: float | None = None


# achieved_*: FLOP/s of large matrix products with shapes of training, in every description. The rate of a whole
# training step is another figure: it holds attention, memory traffic and launches too, which the simulator adds.
_PEAK = Column(FLOPS, 1e9, 1e16)
COLUMNS: dict[str, dict[str, Column]] = {
    "device": {
        "memory": Column(BYTES, 1e6, 1e13, required=True),
        "reserved": Column(BYTES, 0, 1e11, default=0.0),
        "bandwidth": Column(BYTE_RATE, 1e9, 1e15, required=True),
        "bandwidth_achieved": Column(BYTE_RATE, 1e9, 1e15),
        **{f"peak_{kind}": _PEAK for kind in ("fp32", "tf32", "fp16", "bf16", "fp8")},
        **{f"achieved_{kind}": Column(FLOPS, 1e7, 1e16) for kind in ("fp32", "fp16", "bf16")},
        "attention": Column(RATIO, 0.01, 1.0, default=0.5),
        "launch": Column(SECONDS, 0, 1e-2, default=4e-6),
        "call": Column(SECONDS, 0, 1e-2, default=0.0),
        "ramp": Column(FLOP_COUNT, 0, 1e12, default=0.0),
        "granularity": Column(BYTES, 1, 2**26, default=512.0),
        "power_idle": Column(WATTS, 0, 5000, required=True),
        "power_busy": Column(WATTS, 0.1, 5000, required=True),
    },
    "link": {
        "peak": Column(BYTE_RATE, 1e7, 1e13, required=True),
        "down": Column(BYTE_RATE, 1e7, 1e13, required=True),
        "up": Column(BYTE_RATE, 1e7, 1e13, required=True),
        "both": Column(BYTE_RATE, 1e7, 2e13),
        "latency": Column(SECONDS, 0, 1e-1, default=10e-6),
        "pageable": Column(RATIO, 0.01, 1.0, default=1 / 6),
    },
    "host": {
        "memory": Column(BYTES, 1e8, 1e14, required=True),
        "bandwidth": Column(BYTE_RATE, 1e9, 1e13, required=True),
        "bandwidth_achieved": Column(BYTE_RATE, 1e9, 1e13),
        "optimizer_bandwidth": Column(BYTE_RATE, 1e8, 1e13),
        "task": Column(SECONDS, 0, 1e-1, default=50e-6),
        "power_idle": Column(WATTS, 0, 5000, required=True),
        "power_busy": Column(WATTS, 0.1, 5000, required=True),
    },
}

Quantity = str | float
"""A figure as it is written: text with a unit, or a plain number."""


class CellTable(msgspec.Struct, forbid_unknown_fields=True):
    """A cell as a table: the figure, where it comes from, and whether it was read there."""

    value: Quantity
    source: Any = ""
    verified: Any = False


class Description(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What the descriptions of all kinds may have besides their cells."""

    name: str | UnsetType = UNSET
    title: str | UnsetType = UNSET
    link: str | UnsetType = UNSET
    host: str | UnsetType = UNSET
    unified: bool | UnsetType = UNSET
    host_cores: bool | UnsetType = UNSET
    notes: str | UnsetType = UNSET


_CELL = Annotated[
    Quantity | CellTable, Meta(description="a value such as '900GB/s', or a table of value, source and verified")
]
DESCRIPTIONS: dict[str, type[Description]] = {
    kind: cast(
        "type[Description]",
        msgspec.defstruct(
            kind,
            [(name, _CELL) if each.required else (name, _CELL | UnsetType, UNSET) for name, each in columns.items()],
            bases=(Description,),
            tag_field="kind",
            tag=kind,
            kw_only=True,
            forbid_unknown_fields=True,
        ),
    )
    for kind, columns in COLUMNS.items()
}
"""The schema of a file by the kind of part: a cell for each column."""

ACHIEVED_SHARE = 0.75
"""Of a dense peak, where there is no measurement: the middle of the 38 % (T4) to 97 % (Gaudi 2) that were."""

BANDWIDTH_SHARE = 0.8
"""Of a memory's theoretical bandwidth, without a measurement (STREAM reaches 78 to 83 % on the hosts listed)."""

OPTIMIZER_SHARE = 0.6
"""Of a host's achieved bandwidth that an Adam pass draws: 118 of 199 GB/s on two Xeon 8168 (ZeRO-Offload, table 4)."""


@dataclass(frozen=True)
class Cell:
    """One figure, in SI units: where it comes from and whether it was read there. Assumptions have `source` empty."""

    value: float
    source: str = ""
    verified: bool = False


@dataclass(frozen=True)
class Spec:
    """A device, link or host. Figures are read as `spec["bandwidth"]`."""

    kind: str
    name: str
    title: str
    cells: Mapping[str, Cell]
    link: str = ""
    host: str = ""
    unified: bool = False
    host_cores: bool = False
    notes: str = ""

    def __getitem__(self, name: str) -> float:
        cell = self.cells.get(name)
        if cell is not None:
            return cell.value
        default = COLUMNS[self.kind][name].default
        if default is not None:
            return default
        return self._derived(name)

    def has(self, name: str) -> bool:
        """Whether the description itself says it."""
        return name in self.cells

    def scaled(self, **factors: float) -> Spec:
        """The same with some figures multiplied."""
        return self.with_values(**{name: self[name] * factor for name, factor in factors.items()})

    def with_values(self, **values: float) -> Spec:
        """The same with some figures replaced."""
        unknown = set(values) - set(COLUMNS[self.kind])
        if unknown:
            here = ", ".join(COLUMNS[self.kind])
            raise SpecError(f"A {self.kind} has no {', '.join(sorted(unknown))}. It has {here}.")
        return replace(self, cells={**self.cells, **{name: Cell(value, "given") for name, value in values.items()}})

    def computes(self, kind: str) -> bool:
        """Whether it does matrix products in `fp32`, `fp16` or `bf16`."""
        return self.has(f"peak_{kind}") or self.has(f"achieved_{kind}")

    def sustained(self, kind: str) -> float:
        """FLOP/s of large matrix products in that kind of number. SpecError where it has none."""
        if not self.computes(kind):
            here = [other for other in ("fp32", "fp16", "bf16") if self.computes(other)]
            raise SpecError(f"{self.title} does no arithmetic in {kind}. It has {', '.join(here)}.")
        return self[f"achieved_{kind}"]

    def _derived(self, name: str) -> float:
        if name.startswith("achieved_"):
            return ACHIEVED_SHARE * self[name.replace("achieved", "peak")]
        if name == "bandwidth_achieved":
            return BANDWIDTH_SHARE * self["bandwidth"]
        if name == "optimizer_bandwidth":
            return OPTIMIZER_SHARE * self["bandwidth_achieved"]
        if name == "both":
            return self["down"] + self["up"]
        raise SpecError(f"{self.kind} {self.name!r} does not say its {name}.")


@dataclass(frozen=True)
class Machine:
    """A device, the link it hangs on, and the host at the other end.

    `pointwise` is the share of the traffic of ops other than matrix products and attention that reaches memory: 1
    where each op is a kernel of its own, less where they are fused. `others` are further devices on this host, each
    with a link of its own, or with `one_link` behind the link of the first; their hosts do not count.
    """

    device: Spec
    link: Spec
    host: Spec
    pointwise: float = 1.0
    others: tuple[Machine, ...] = ()
    one_link: bool = False

    @property
    def each(self) -> tuple[Machine, ...]:
        """A machine for each of the devices, the first one first."""
        return (replace(self, others=(), one_link=False), *self.others)

    def scaled(self, part: str, **factors: float) -> Machine:
        """The same machine with figures of its `device`, `link` or `host` multiplied, for all devices."""
        others = tuple(other.scaled(part, **factors) for other in self.others)
        return replace(self, others=others, **{part: getattr(self, part).scaled(**factors)})

    def with_values(self, part: str, **values: float) -> Machine:
        """The same machine with figures of its `device`, `link` or `host` replaced, for all devices."""
        others = tuple(other.with_values(part, **values) for other in self.others)
        return replace(self, others=others, **{part: getattr(self, part).with_values(**values)})


SOFTWARE = {"eager": 1.0, "compiled": 0.5, "fused": 0.3}
"""Shares of pointwise traffic: one kernel an op; chains fused by a compiler; whole layers fused by hand. Assumed."""


def parse_spec(text: str, origin: str) -> Spec:
    """A description from TOML. `origin` is the file's name, for errors. Raises SpecError."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as wrong:
        raise SpecError(f"{origin} is not valid TOML: {wrong}") from wrong
    return spec_of(table, origin)


def spec_of(table: Mapping[str, Any], origin: str) -> Spec:
    """A description from its table. Raises SpecError."""
    kinds = DESCRIPTIONS["device"] | DESCRIPTIONS["link"] | DESCRIPTIONS["host"]
    return _spec(schema.read(table, kinds, _refusal(origin)), origin)


def _refusal(origin: str) -> Callable[[str, str], SpecError]:
    """The error for a field of a file."""
    return lambda field, message: SpecError(f"{origin}: {schema.located(field, message)}.")


def _spec(description: Description, origin: str) -> Spec:
    kind = type(description).__name__
    cells = {
        name: _cell(entry, column, f"{origin}: {name}")
        for name, column in COLUMNS[kind].items()
        if (entry := getattr(description, name)) is not UNSET
    }
    plain = {field: getattr(description, field) for field in Description.__struct_fields__}
    stem = Path(origin).stem
    spec = Spec(kind, cells=cells, **{"name": stem, "title": stem} | {k: v for k, v in plain.items() if v is not UNSET})
    _check_together(spec, origin)
    return spec


def _cell(entry: CellTable | Quantity, column: Column, where: str) -> Cell:
    table = entry if isinstance(entry, CellTable) else CellTable(entry)
    try:
        value = parse_quantity(table.value, column.dimension)
    except ValueError as wrong:
        raise SpecError(f"{where}: {wrong}") from wrong
    if not column.low <= value <= column.high:
        raise SpecError(
            f"{where} = {table.value} is out of bounds: expected {column.low:g} to {column.high:g} "
            f"{column.dimension}. Is the unit right?"
        )
    return Cell(value, str(table.source), bool(table.verified))


def _check_together(spec: Spec, origin: str) -> None:
    pairs = [("bandwidth_achieved", "bandwidth"), ("down", "peak"), ("up", "peak"), ("power_idle", "power_busy")]
    pairs.append(("reserved", "memory"))
    pairs += [(f"achieved_{kind}", f"peak_{kind}") for kind in ("fp32", "fp16", "bf16")]
    for lesser, greater in pairs:
        if spec.has(lesser) and spec.has(greater) and spec[lesser] > spec[greater]:
            raise SpecError(f"{origin}: {lesser} ({spec[lesser]:g}) is above {greater} ({spec[greater]:g}).")
    kinds = [kind for kind in ("fp32", "fp16", "bf16") if spec.computes(kind)]
    if spec.kind == "device" and not kinds:
        raise SpecError(f"{origin}: a device must say at least one of peak_fp32, peak_fp16, peak_bf16.")


@functools.cache
def presets(kind: str) -> dict[str, Spec]:
    """The catalogue's devices, links or hosts by name."""
    found: dict[str, Spec] = {}
    for path in sorted(PRESETS.glob(f"{kind}-*.toml")):
        spec = parse_spec(path.read_text(encoding="utf-8"), path.name)
        found[spec.name] = spec
    return found


def load(kind: str, name: str) -> Spec:
    """A preset by its name, or a description from a file: one part in a `.toml`, a whole machine in the `.json` that
    `relay calibrate` writes. Raises SpecError."""
    if name.endswith(".json"):
        try:
            tables = json.loads(Path(name).read_text(encoding="utf-8"))
        except OSError as failure:
            raise SpecError(f"The calibration {name!r} cannot be read: {failure.strerror}.") from failure
        except (ValueError, RecursionError) as wrong:
            raise SpecError(f"{name} is not JSON: {wrong}") from wrong
        calibration = msgspec.defstruct("calibration", [(kind, DESCRIPTIONS[kind])])
        return _spec(getattr(schema.read(tables, calibration, _refusal(name)), kind), name)
    if name.endswith(".toml"):
        try:
            spec = parse_spec(Path(name).read_text(encoding="utf-8"), name)
        except OSError as failure:
            raise SpecError(f"The description {name!r} cannot be read: {failure.strerror}.") from failure
        except UnicodeDecodeError as wrong:
            raise SpecError(f"{name} is not text in UTF-8: {wrong}") from wrong
        if spec.kind != kind:
            raise SpecError(f"{name} describes a {spec.kind}; a {kind} was asked for.")
        return spec
    catalogue = presets(kind)
    if name not in catalogue:
        near = difflib.get_close_matches(name, catalogue, 3, 0.4)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise SpecError(
            f"There is no {kind} preset {name!r}.{hint} Presets: {', '.join(catalogue)}; or give a .toml file."
        )
    return catalogue[name]


def machine(device: str, link: str | None = None, host: str | None = None, software: str = "eager") -> Machine:
    """A machine from the names of its parts; link and host default to what the device's description names."""
    if software not in SOFTWARE:
        raise SpecError(f"There is no software profile {software!r}. Profiles: {', '.join(SOFTWARE)}.")
    spec = load("device", device)
    beside = device if device.endswith(".json") else ""
    link, host = link or spec.link or beside, host or spec.host or beside
    for kind, name in (("link", link), ("host", host)):
        if not name:
            raise SpecError(
                f'{device} does not say which {kind} it has. Add {kind} = "NAME" to it, of a preset '
                f"({', '.join(presets(kind))}) or a .toml file; or give one with --{kind}, {kind}= in Python."
            )
    return Machine(spec, load("link", link), load("host", host), SOFTWARE[software])
