"""Descriptions of hardware from users: whatever is in the file, it is taken or refused by name, nothing else."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal.spec import PRESETS, SpecError, load, parse_spec

PRESET_TEXTS = [path.read_text(encoding="utf-8") for path in sorted(PRESETS.glob("*.toml"))]

many = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@many
@given(text=st.sampled_from(PRESET_TEXTS), data=st.data())
def test_a_preset_with_bytes_changed_is_taken_or_refused_by_name(text: str, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, len(text)))
    cut = data.draw(st.integers(0, 40))
    changed = text[:offset] + data.draw(st.text(max_size=12)) + text[offset + cut :]
    with suppress(SpecError):
        parse_spec(changed, "some.toml")


@many
@given(content=st.binary(max_size=200))
def test_any_bytes_in_a_description_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    for ending in ("toml", "json"):
        file = tmp_path / f"some.{ending}"
        file.write_bytes(content)
        with pytest.raises(SpecError, match="some"):
            load("device", str(file))


@many
@given(tables=st.dictionaries(st.sampled_from(["device", "link", "host", "other"]), values, max_size=4))
def test_a_calibration_of_any_shape_is_taken_or_refused_by_name(tmp_path: Path, tables: dict[str, Any]) -> None:
    file = tmp_path / "some.json"
    file.write_text(json.dumps(tables), encoding="utf-8")
    for kind in ("device", "link", "host"):
        with suppress(SpecError):
            load(kind, str(file))


def test_a_nest_without_end_is_refused(tmp_path: Path) -> None:
    for ending, text in (("json", "[" * 100_000), ("toml", "a = " + "[" * 100_000)):
        file = tmp_path / f"some.{ending}"
        file.write_text(text, encoding="utf-8")
        with pytest.raises(SpecError):
            load("device", str(file))
