"""Errors of `hal.schema` name the first wrong field by its path; msgspec decides what is right."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from hal import schema

Name = Annotated[str, Meta(pattern=r"\A[a-z]+\Z", description="a name of small letters")]


class Pair(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: Literal["a", "b"]
    size: Annotated[int, Meta(ge=0, lt=10)]


class Part(msgspec.Struct, forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=0, le=4)] = msgspec.field(name="bytes")
    pairs: list[Pair] = []
    named: dict[Name, Annotated[tuple[int, ...], Meta(max_length=2)]] = {}
    limit: float | str | None = None

    def __post_init__(self) -> None:
        if self.size == 3:
            raise ValueError("three bytes are not allowed")


class Cat(msgspec.Struct, tag_field="kind", tag="cat"):
    part: Part


class Dog(msgspec.Struct, tag_field="kind", tag="dog"):
    parts: list[Part]


class Refused(Exception):
    pass


def refuse(path: str, message: str) -> Refused:
    return Refused(path, message)


def part(**fields: Any) -> dict[str, Any]:
    return {"kind": "cat", "part": {"bytes": 1, **fields}}


@pytest.mark.parametrize(
    ("raw", "path", "message"),
    [
        (part(bytes=5), "part.bytes", "expected a whole number that is at least 0 and at most 4, received 5"),
        (part(bytes=True), "part.bytes", "received True"),
        ({"kind": "cat", "part": {}}, "part.bytes", "but it is missing"),
        (part(bytes=3), "part", "three bytes are not allowed"),
        (part(pair=[]), "part", "the key 'pair' is unknown. Did you mean 'pairs'?"),
        (part(pairs=[["a", 1], ["c", 1]]), "part.pairs[1][0]", "expected one of 'a', 'b', received 'c'"),
        (part(pairs=[["a"]]), "part.pairs[0]", "expected a list of kind, size"),
        (part(named={"x": [1], "y": [1, 2, 3]}), "part.named['y']", "with at most 2 items"),
        (part(named={"X": []}), "part.named['X']", "expected a name of small letters, received 'X'"),
        (part(limit=[]), "part.limit", "expected a number or a string or null, received []"),
        ({"kind": "dog", "parts": [{"bytes": 1}, 7]}, "parts[1]", "expected a mapping with bytes, pairs, named, limit"),
        ({"kind": "cow"}, "kind", "expected one of cat, dog, received 'cow'"),
        ({"part": {}}, "kind", "expected one of cat, dog, but it is missing"),
        (4, "", "received 4"),
    ],
)
def test_an_error_has_the_path_what_was_expected_and_what_was_received(raw: Any, path: str, message: str) -> None:
    with pytest.raises(Refused) as caught:
        schema.read(raw, Cat | Dog, refuse)
    assert caught.value.args[0] == path
    assert message in caught.value.args[1]


words = st.sampled_from(["kind", "cat", "dog", "part", "parts", "bytes", "pairs", "named", "limit", "a", "\ud800", "X"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 12) | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)
parts = st.fixed_dictionaries({"bytes": st.integers(0, 3) | values}, optional={"pairs": values, "named": values})


@given(raw=values | st.fixed_dictionaries({"kind": st.just("dog"), "parts": st.lists(parts, max_size=3) | values}))
@settings(deadline=None, max_examples=300)
def test_what_msgspec_accepts_is_returned_and_anything_else_is_refused(raw: Any) -> None:
    try:
        expected = msgspec.convert(raw, Cat | Dog)
    except (msgspec.ValidationError, UnicodeError):
        with pytest.raises(Refused):
            schema.read(raw, Cat | Dog, refuse)
    else:
        assert schema.read(raw, Cat | Dog, refuse) == expected
