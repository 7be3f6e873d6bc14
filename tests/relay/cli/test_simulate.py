"""`relay simulate`: one object, a trace, and a ledger where it does not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from relay.cli import main
from relay.models import GPT


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_the_command_answers_with_one_object_and_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    result = invoke("--model", "gpt2", "--device", "rtx-4090", "--tokens", "1G", "--trace", str(trace), "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["fits"]
    assert sum(answer["waterfall_seconds"].values()) == pytest.approx(answer["step_seconds"]["middle"])
    assert answer["days"]["low"] == pytest.approx(1e9 / answer["tokens_per_second"]["high"] / 86400)
    for figure in ("step_seconds", "tokens_per_second", "mfu", "joules_per_token", "days", "kilowatt_hours"):
        assert answer[figure]["low"] < answer[figure]["middle"] < answer[figure]["high"]
    assert answer["tokens_per_second"]["high"] <= 2 * answer["tokens_per_second"]["low"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} >= {"compute", "link down", "link up"}
    assert {event["name"] for event in events if event["ph"] == "C"} == {"bytes in flight", "watts"}
    crossed = sum(event["args"]["bytes"] for event in events if event["ph"] == "X" and event["tid"] == 0)
    assert crossed == answer["link_bytes"]["down"]


def test_the_command_exits_with_one_and_both_ledgers_where_it_does_not_fit() -> None:
    result = invoke("--layers", "62", "--hidden", "8192", "--device", "v100-sxm2-16gb", "--host-memory", "512GB")
    assert result.exit_code == 1
    would_fit = "would fit: loss_scale=fixed with state_dtype=int8"
    for text in ("it does not fit", would_fit, "host memory", "device memory", "GiB"):
        assert text in result.output


def test_small_models_are_told_in_units_of_their_size() -> None:
    small = ["--layers", "2", "--hidden", "64", "--heads", "2", "--vocab", "256", "--seq", "32", "--batch", "1"]
    text = invoke(*small, "--device", "t4").output
    parameters = sum(parameter.numel() for parameter in GPT(256, 2, 64, 2, 32).parameters())
    assert text.startswith(f"{parameters / 1e3:.2f} k parameters: ")
    weights = next(line for line in text.splitlines() if line.startswith("  weights"))
    assert weights.endswith(" KiB")
    assert 0 < float(weights.split()[-2]) < 1024
    assert " 0.0 " not in text.partition("host memory")[2].partition("of which")[0]


def test_the_command_asked_wrongly_exits_with_two() -> None:
    assert invoke("--layers", "4").exit_code == 2
    assert invoke("--model", "gpt2", "--device", "v100").exit_code == 2


def test_a_count_that_is_not_finite_is_refused() -> None:
    assert invoke("--model", "gpt2", "--tokens", "1e400").exit_code == 2
