"""What one option is: its kind, its range and its help, read from the annotation of the field that defines it.

`Option` checks a value of an option and reads one from a word of a command line. Which options there are, and what is
checked of several together, is in `relay.options`. Invariant: a value that `Option.check` returns has the option's
type and is in its range.
"""

from __future__ import annotations

import math
import types
import typing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hal.spec.units import parse_size

FIXED_SCALE = 65536.0
"""The loss scale that "fixed" stands for: where a dynamic one begins."""

Count = Annotated[int, Meta(ge=1)]
Positive = Annotated[float, Meta(gt=0)]
Size = Annotated[int | str, Meta(extra={"kind": "size"})]
Scale = Annotated[float | str, Meta(extra={"kind": "loss scale"})]
Chunk = Annotated[Annotated[int, Meta(ge=1)] | Literal["auto"] | None, Meta(extra={"kind": "chunk"})]
Segments = Annotated[bool | Annotated[int, Meta(ge=0)], Meta(extra={"kind": "recompute"})]
Residents = Annotated[Annotated[int, Meta(ge=0)] | Literal["auto"], Meta(extra={"kind": "resident layers"})]
AutoFlag = Annotated[bool | Literal["auto"], Meta(extra={"kind": "auto or flag"})]
Devices = Annotated[str | tuple[str, ...], Meta(extra={"kind": "devices"})]
Visits = Annotated[
    Annotated[int, Meta(ge=1)] | Literal["auto"] | tuple[Annotated[int, Meta(ge=1)], ...],
    Meta(extra={"kind": "visits"}),
]
Speeds = Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(extra={"kind": "speeds"})]
PythonObject = Annotated[Any, Meta(extra={"kind": "object"})]


class Option(typing.NamedTuple):
    """One option as commands, files and documents use it.

    `kind` is "choice", "count" (whole numbers), "number", "flag" (True or False), "auto or flag" ("auto" too), "size",
    "loss scale", "recompute", "chunk", "resident layers", "seed", "devices", "visits", "speeds", "text", "names" or
    "object" (Python only). `allowed` describes the values.
    """

    name: str
    annotation: Any
    kind: str
    default: Any
    help: str
    allowed: str
    choices: tuple[str, ...] = ()
    least: int | None = None
    most: int | None = None
    above: float | None = None

    def check(self, value: Any) -> Any:
        """The value, converted to the option's type. Raises ValueError for one that is not allowed.

        Example: `OPTIONS["slots"].check(2)` returns 2, and `check(0)` raises "slots=0 must be a whole number of at
        least 1".
        """
        if self.kind == "object":
            return value
        try:
            converted = msgspec.convert(value, self.annotation)
        except msgspec.ValidationError:
            converted = math.nan
        if isinstance(converted, float) and math.isnan(converted):
            former = {("on_device_lost", "repeat"): "retry"}.get((self.name, value if isinstance(value, str) else ""))
            hint = f" {value!r} is called {former!r} now." if former else ""
            raise ValueError(f"{self.name}={value!r} must be {self.allowed}.{hint}")
        if converted is not None and self.kind == "size":
            try:
                return parse_size(converted)
            except ValueError as wrong:
                raise ValueError(f"{self.name}={value!r}: {wrong}") from None
        if self.kind == "loss scale":
            fixed_scale(converted)
        if self.kind == "visits" and isinstance(converted, tuple) and len(converted) != 2:
            raise ValueError(f"{self.name}={value!r} must be {self.allowed}.")
        if self.kind == "devices":
            from hal.registry import names_in  # which imports torch: `--help` does without

            names = names_in(converted) if isinstance(converted, str) else converted
            if not names:
                raise ValueError(f"{self.name}={value!r} names no device. Give one, or several that work together.")
            return names[0] if len(names) == 1 else tuple(names)
        if self.kind == "seed" and converted >= 2**64:
            raise ValueError(f"{self.name}={value!r} must be {self.allowed}.")
        return converted

    def read(self, text: str) -> Any:
        """The value that a word of a command line stands for. Raises ValueError for one that is not allowed."""
        words: dict[str, Any] = {
            "recompute": {"all": True, "true": True, "none": False, "false": False},
            "auto or flag": {"true": True, "false": False},
        }.get(self.kind, {})
        if text.strip().lower() in words:
            return words[text.strip().lower()]
        value: Any = text
        try:
            if self.kind == "visits" and text != "auto":
                numbers = tuple(int(word) for word in text.split(","))
                value = numbers[0] if len(numbers) == 1 else numbers
            if self.kind == "speeds":
                value = tuple(float(word) for word in text.split(","))
            words_or_number = self.kind in ("chunk", "resident layers") and text != "auto"
            if self.kind in ("count", "recompute", "seed") or words_or_number:
                value = int(text)
            elif self.kind == "number" or (self.kind == "loss scale" and text not in ("dynamic", "fixed")):
                value = float(text)
        except ValueError:
            raise ValueError(f"{text!r} must be {self.allowed}.") from None
        return self.check(value)


def options_of(struct: type[msgspec.Struct]) -> dict[str, Option]:
    """The options that a Struct defines, by name, in order."""
    hints = typing.get_type_hints(struct, include_extras=True)
    fields = msgspec.structs.fields(struct)
    return {field.name: _option(field.name, hints[field.name], field.default) for field in fields}


def _option(name: str, annotation: Any, default: Any) -> Option:
    found: dict[str, Any] = {"help": "", "kind": "", "least": None, "above": None, "choices": (), "none": False}
    found |= {"most": None, "below": None}
    _look(annotation, found)
    kind, choices = found["kind"], found["choices"]
    if kind in ("chunk", "resident layers"):
        choices, allowed = (), f"a whole number of at least {found['least']}, or 'auto'"
    elif kind == "auto or flag":
        choices, allowed = (), "'auto', True or False"
    elif kind == "visits":
        choices, allowed = (), "a whole number of at least 1, two of them (forward, backward), or 'auto'"
    elif choices:
        kind, allowed = "choice", "one of " + ", ".join(map(repr, choices))
    elif kind == "speeds":
        allowed = "a number above 0 for each device"
    elif kind == "devices":
        allowed = "a device string, or several"
    elif kind == "size":
        allowed = "a size in bytes or such as '256MB'"
    elif kind == "loss scale":
        allowed = "'dynamic', 'fixed' or a power of two"
    elif kind == "recompute":
        allowed = "True, False, or the number of segments that recompute"
    elif kind == "seed":
        allowed = "a whole number from 0 to 2**64 - 1"
    elif kind == "count":
        allowed = f"a whole number of at least {found['least']}"
        if found["most"] is not None:
            allowed = f"a whole number from {found['least']} to {found['most']}"
    elif kind == "number":
        allowed = _number(found)
    else:
        allowed = {"flag": "True or False", "text": "a string", "names": "a list of names", "object": "an object"}[kind]
    allowed += ", or None" if found["none"] else ""
    bounds = {"least": found["least"], "most": found["most"], "above": found["above"]}
    return Option(name, annotation, kind, default, found["help"], allowed, choices, **bounds)


def _number(found: dict[str, Any]) -> str:
    """The numbers that an option takes, in words."""
    words = {"least": "of at least", "above": "above", "most": "at most", "below": "below"}
    bounds = [f"{words[bound]} {found[bound]:g}" for bound in words if found[bound] is not None]
    return " ".join(["a number", " and ".join(bounds)]).rstrip()


def _look(annotation: Any, found: dict[str, Any]) -> None:
    """Collect what an annotation says: its kind, bounds, choices and help."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        inner, *metas = typing.get_args(annotation)
        _look(inner, found)
        for meta in metas:
            found["help"] = meta.description or found["help"]
            found["kind"] = (meta.extra or {}).get("kind", found["kind"])
            found["least"] = found["least"] if meta.ge is None else meta.ge
            found["above"] = found["above"] if meta.gt is None else meta.gt
            found["most"] = found["most"] if meta.le is None else meta.le
            found["below"] = found["below"] if meta.lt is None else meta.lt
    elif origin is Literal:
        found["choices"] = typing.get_args(annotation)
    elif origin in (typing.Union, types.UnionType):
        for part in typing.get_args(annotation):
            _look(part, found)
    elif annotation is type(None):
        found["none"] = True
    elif origin in (list, tuple):
        found["kind"] = "names"
    else:
        kinds = {int: "count", float: "number", str: "text", bool: "flag"}
        found["kind"] = found["kind"] or kinds.get(annotation, "object")


def fixed_scale(scale: str | float) -> float:
    """The number that a loss scale stays at; 1 for a dynamic one. Raises ValueError for one that is not allowed."""
    if scale == "dynamic":
        return 1.0
    if scale == "fixed":
        return FIXED_SCALE
    if isinstance(scale, (str, bool)) or not scale > 0 or math.frexp(scale)[0] != 0.5:
        raise ValueError(
            f"loss_scale={scale!r} must be 'dynamic', 'fixed' (which is {FIXED_SCALE:g}), or a power of two: so "
            "unscaling is exact."
        )
    return float(scale)
