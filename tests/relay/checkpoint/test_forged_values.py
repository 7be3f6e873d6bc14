"""Values out of files that others may have written: plain values, positions in the data, run files."""

import contextlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relay.checkpoint import plain_values
from relay.cli.train import _from_file, train
from relay.data.resumable import PositionError, ResumableBatches

EXAMPLES = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def examples(thorough: int) -> settings:
    """So many in `make test-full`, a fifth of them in `make test`."""
    return settings(EXAMPLES, max_examples=thorough if os.environ.get("RELAY_FULL_SWEEP") == "1" else thorough // 5)


scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
names = st.sampled_from(
    ["!tensor", "!dict", "!tuple", "!array", "!float", "!bytes", "!counter", "shape", "a", "0.weight"]
)
values = st.recursive(
    scalars | st.sampled_from(["F32", "U8", "float32", "AAAA", "nan", 0, 1, 2**40]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names | st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)

plain = st.recursive(
    scalars
    | st.binary(max_size=5)
    | st.lists(st.floats(width=32), max_size=3).map(torch.tensor)
    | st.lists(st.integers(0, 255), max_size=3).map(lambda numbers: np.array(numbers, np.uint8))
    | st.dictionaries(st.integers(), st.integers(), max_size=2).map(Counter),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(value=plain)
@examples(300)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    text = json.dumps(plain_values.encode(value), allow_nan=False)
    back = plain_values.decode(json.loads(text))
    assert type(back) is type(value)
    assert json.dumps(plain_values.encode(back)) == text


@given(value=values)
@examples(300)
def test_a_forged_plain_value_is_read_or_refused(value: Any) -> None:
    with contextlib.suppress(ValueError):
        plain_values.decode(value)


def test_what_is_not_plain_is_refused_by_its_place() -> None:
    with pytest.raises(ValueError, match=r"state\['a'\]\[1\] is a object"):
        plain_values.encode({"a": [1, object()]}, "state")
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ValueError, match="nested"):
        plain_values.encode(deep)


@given(state=values)
@examples(100)
def test_a_forged_position_is_taken_or_refused(state: Any) -> None:
    with contextlib.suppress(PositionError):
        ResumableBatches([1, 2]).load_state_dict(state)


option_names = st.sampled_from([option.name for option in train.params] + ["nonsense", "run_file"])


@given(lines=st.dictionaries(option_names, st.none() | values, max_size=3), junk=st.text(max_size=10))
@examples(200)
def test_a_forged_run_file_is_read_or_refused(tmp_path: Path, lines: dict[str, Any], junk: str) -> None:
    file = tmp_path / "run.toml"
    body = "".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items())
    file.write_text(body + junk, encoding="utf-8", errors="replace")
    with click.Context(train, info_name="train") as context, contextlib.suppress(click.UsageError):
        _from_file(context, file, [])
