"""Values from outside (parsed files, saved states) as the types that a schema declares.

A schema is a `msgspec.Struct`, or a type of lists, dicts and numbers, with bounds by `msgspec.Meta`. msgspec converts
and checks; this module finds the field that is wrong and describes it. It opens and parses no file. `hal` and `relay`
use it for what they read. Invariant: what `read` returns satisfies its schema, and no code from the value has run.

In errors, `Meta(description=...)` stands for what was expected, and `Meta(extra={"advice": ...})` for what to do.
"""

from __future__ import annotations

import difflib
import reprlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, overload

import msgspec

T = TypeVar("T")

_MISMATCH = (msgspec.ValidationError, UnicodeError)
"""What `msgspec.convert` raises; UnicodeError for a key that is not valid Unicode."""

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    bytes: "bytes in base 64",
    list: "a list",
    tuple: "a list",
    type(None): "null",
}

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120
_SHORT.maxlevel = 3


@overload
def read(raw: Any, schema: type[T], refuse: Callable[[str, str], Exception]) -> T: ...


@overload
def read(raw: Any, schema: Any, refuse: Callable[[str, str], Exception]) -> Any: ...


def read(raw: Any, schema: Any, refuse: Callable[[str, str], Exception]) -> Any:
    """Check a value and convert it to its schema.

    Types are strict: 4.0 and "4" are not whole numbers, and true is no number.

    Args:
        raw: the value, of dicts (or other mappings), lists, strings, numbers, booleans and None.
        schema: the type to convert to.
        refuse: makes the error to raise from the path of the field, such as `shards[0].file` (empty for the whole
            value), and from what was expected and received there.

    Example: `read({"file": 7}, ShardEntry, refuse)` raises `refuse("file", "expected a string, received 7")`.
    """
    try:
        return msgspec.convert(raw, schema)
    except _MISMATCH as wrong:
        path, message = _explain(raw, schema, wrong)
        raise refuse(path.removeprefix("."), message) from wrong


def located(path: str, message: str) -> str:
    """The message of an error, after the path of its field if it has one."""
    return f"{path}: {message}" if path else message


def _explain(raw: Any, schema: Any, wrong: Exception) -> tuple[str, str]:
    """The path of the first field that is wrong, and what is wrong with it."""
    for step, part, its_schema in _parts(raw, schema):
        try:
            msgspec.convert(part, its_schema)
        except _MISMATCH as cause:
            path, message = _explain(part, its_schema, cause)
            return step + path, message
    if wrong.__cause__ is not None:  # raised by a Struct's __post_init__
        return "", str(wrong.__cause__)
    struct = _struct(raw, schema)
    if struct is not None and isinstance(raw, Mapping):
        return _wrong_keys(raw, struct)
    tags = [str(info.tag) for info in map(_config, _structs(schema)) if info.tag is not None]
    if tags and isinstance(raw, Mapping):
        field = str(_config(_structs(schema)[0]).tag_field)
        found = f"received {_received(raw[field])}" if field in raw else "but it is missing"
        return f".{field}", f"expected one of {', '.join(tags)}, {found}"
    advice = "".join(f". {(meta.extra or {})['advice']}" for meta in _metas(schema) if "advice" in (meta.extra or {}))
    return "", f"expected {_expected(schema)}, received {_received(raw)}{advice}"


def _wrong_keys(raw: Mapping[Any, Any], struct: type[msgspec.Struct]) -> tuple[str, str]:
    """What is wrong with the keys of a Struct whose values are right."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    missing = [name for name, field in fields.items() if field.required and name not in raw]
    unknown = [key for key in raw if key not in fields and key != _config(struct).tag_field]
    if unknown and _config(struct).forbid_unknown_fields:
        near = difflib.get_close_matches(str(unknown[0]), fields, 1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        return "", f"the key {_received(unknown[0])} is unknown. {hint}Known keys: {', '.join(fields)}"
    if missing:
        others = f", and so are {', '.join(missing[1:])}" if missing[1:] else ""
        return f".{missing[0]}", f"expected {_expected(fields[missing[0]].type)}, but it is missing{others}"
    return "", f"the key {_received(unknown[0] if unknown else list(raw))} is not valid text"


def _parts(raw: Any, schema: Any) -> Iterator[tuple[str, Any, Any]]:
    """The parts of a value: the step of the path to each, the part, its schema."""
    struct = _struct(raw, schema)
    if struct is not None:
        fields = msgspec.structs.fields(struct)
        if isinstance(raw, Mapping):
            yield from (
                (f".{each.encode_name}", raw[each.encode_name], each.type) for each in fields if each.encode_name in raw
            )
        elif isinstance(raw, (list, tuple)) and _config(struct).array_like:
            yield from (
                (f"[{number}]", part, each.type) for number, (part, each) in enumerate(zip(raw, fields, strict=False))
            )
    for arm in _arms(schema):
        origin, inner = typing.get_origin(arm), typing.get_args(arm)
        if origin is dict and isinstance(raw, Mapping):
            for key, part in raw.items():
                yield f"[{_received(key)}]", key, inner[0]
                yield f"[{_received(key)}]", part, inner[1]
        elif origin in (list, tuple) and isinstance(raw, (list, tuple)):
            same = origin is list or inner[-1] is Ellipsis
            for number, part in enumerate(raw if same else raw[: len(inner)]):
                yield f"[{number}]", part, inner[0 if same else number]


def _arms(schema: Any) -> list[Any]:
    """The members of a union; of any other type the type itself, without its bounds."""
    if typing.get_origin(schema) is Annotated:
        return _arms(typing.get_args(schema)[0])
    if typing.get_origin(schema) in (typing.Union, types.UnionType):
        return [arm for each in typing.get_args(schema) for arm in _arms(each)]
    return [schema]


def _structs(schema: Any) -> list[type[msgspec.Struct]]:
    return [arm for arm in _arms(schema) if isinstance(arm, type) and issubclass(arm, msgspec.Struct)]


def _struct(raw: Any, schema: Any) -> type[msgspec.Struct] | None:
    """The Struct that a value should become: the only one, or the one that its tag names."""
    structs = _structs(schema)
    if len(structs) > 1 and isinstance(raw, Mapping):
        structs = [each for each in structs if raw.get(_config(each).tag_field) == _config(each).tag]
    return structs[0] if len(structs) == 1 and isinstance(raw, (Mapping, list, tuple)) else None


def _config(struct: type[msgspec.Struct]) -> msgspec.structs.StructConfig:
    return struct.__struct_config__


def _metas(schema: Any) -> list[msgspec.Meta]:
    return [each for each in getattr(schema, "__metadata__", ()) if isinstance(each, msgspec.Meta)]


def _expected(schema: Any) -> str:
    """What a schema allows, in words."""
    described = [meta.description for meta in _metas(schema) if meta.description]
    if described:
        return described[-1]
    if typing.get_origin(schema) is Annotated:
        text = _expected(typing.get_args(schema)[0])
        for meta in _metas(schema):
            bounds = {"above": meta.gt, "at least": meta.ge, "below": meta.lt, "at most": meta.le}
            given = [f"{words} {bound:,}" for words, bound in bounds.items() if bound is not None]
            text += f" that is {' and '.join(given)}" if given else ""
            if meta.max_length is not None:
                text += f" with at most {meta.max_length:,} items"
        return text
    arms = _arms(schema)
    if len(arms) > 1:
        words = [_expected(each) for each in typing.get_args(schema) if each is not msgspec.UnsetType]
        return " or ".join(dict.fromkeys(words))
    if typing.get_origin(schema) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(schema)))}"
    if structs := _structs(schema):
        fields = ", ".join(each.encode_name for each in msgspec.structs.fields(structs[0]))
        return f"{'a list of' if _config(structs[0]).array_like else 'a mapping with'} {fields}"
    kind, inner = typing.get_origin(schema) or schema, typing.get_args(schema)
    if kind is tuple and Ellipsis not in inner:
        return f"a list of {len(inner)} items"
    return _WORDS.get(kind, "a mapping of names to values")


def _received(raw: Any) -> str:
    try:
        return _SHORT.repr(raw)
    except (ValueError, RecursionError):  # a number with more digits than Python prints
        return f"a value of type {type(raw).__name__}"
