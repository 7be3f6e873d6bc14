"""What is asked wrongly of `relay simulate` and `relay plan` ends in a sentence, at once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import relay
from hal import spec
from relay.cli import main
from relay.simulation.described.transformer_shape import ModelShape, ShapeError

SMALL = ("--layers", "2", "--hidden", "64", "--seq", "16", "--batch", "2", "--device", "t4")


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(main, [*arguments])
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("hidden", [1600, 1601, 100, 5120])
def test_a_hidden_size_alone_gives_a_model(hidden: int) -> None:
    found = relay.simulate(layers=1, hidden=hidden, vocabulary=64, seq=16, batch=1, device="h200-sxm")
    assert isinstance(found.shape, ModelShape)
    assert hidden % found.shape.heads == 0


def test_heads_that_do_not_divide_the_hidden_size_are_answered_with_heads_that_do() -> None:
    assert "10 would divide it, into heads of 160" in refusal(
        "simulate", "--layers", "1", "--hidden", "1600", "--heads", "12"
    )


@pytest.mark.parametrize("command", ["simulate", "plan"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--slots", "100000000"], "1<=x<=1024"),
        (["--layers", "1000000000"], "layers must be at most 10,000"),
        (["--hidden", "4194304"], "hidden must be at most 1,048,576"),
        (["--vocab", "1000000000"], "vocabulary must be at most"),
        (["--count", "100000"], "at most 256"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_numbers_beyond_every_model_and_machine_are_refused_at_once(
    command: str, options: list[str], message: str
) -> None:
    assert message in refusal(command, *SMALL, *options)


def test_a_step_that_would_take_minutes_to_simulate_is_refused() -> None:
    with pytest.raises(ShapeError, match="fewer micro-batches"):
        relay.simulate(layers=100, hidden=64, batch=100_000, seq=16, device="t4")


def test_the_trainer_has_the_bound_on_slots_too() -> None:
    with pytest.raises(ValueError, match=r"slots=1025 must be a whole number from 1 to 1024"):
        relay.Trainer(relay.models.GPT(layers=1, hidden=32), slots=1025)


def test_a_device_that_reserves_more_than_its_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    lines = ['kind = "device"', 'memory = "8GB"', 'reserved = "9GB"', 'bandwidth = "100GB/s"', 'peak_fp32 = "5TFLOPS"']
    lines += ['power_idle = "10W"', 'power_busy = "100W"', 'link = "pcie-4-x16"', 'host = "generic"']
    path.write_text("\n".join(lines))
    message = refusal("simulate", *SMALL[:-1], str(path))
    assert "reserved (9e+09) is above memory (8e+09)" in message
    whole = spec.machine("t4")
    full = replace(whole, device=whole.device.with_values(reserved=whole.device["memory"]))
    with pytest.raises(spec.SpecError, match="nothing is left"):
        relay.simulate(layers=1, hidden=64, seq=16, batch=1, device=full)


@pytest.mark.parametrize("command", ["simulate", "plan"])
@pytest.mark.parametrize(
    "sizes",
    [["--vocab", "50257"], ["--heads", "12"], ["--ffn", "3072"], ["--tied"], ["--untied"], ["--hidden", "768"]],
    ids=lambda sizes: sizes[0],
)
def test_a_name_refuses_sizes_beside_it_also_those_that_it_has(command: str, sizes: list[str]) -> None:
    assert "names a model with sizes of its own" in refusal(command, "--model", "gpt2", *sizes)


@pytest.mark.parametrize("given", [{"model": "gpt2"}, {"layers": 1, "hidden": 64}], ids=["model", "layers"])
def test_seconds_are_for_models_that_take_audio(given: dict[str, Any]) -> None:
    with pytest.raises(ShapeError, match="seconds=2 is the length of audio"):
        relay.simulate(**given, seconds=2)
