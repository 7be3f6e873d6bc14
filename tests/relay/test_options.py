"""One definition of the options of training: Python, commands, run files and documentation agree with it."""

import inspect
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import relay
from relay.cli import main
from relay.cli.shared_options import COMMAND_LINE
from relay.options import OPTIONS, STEP_OPTIONS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WRONG: dict[str, Any] = {
    "choice": "nonsense", "count": 0, "flag": 3, "number": -1.0, "size": "16Gb", "loss scale": 3.0, "recompute": -1,
    "seed": -1, "auto or flag": "sometimes",
}  # fmt: skip
"""For each kind of option a value that is not allowed."""


def command_options(command: str) -> dict[str, click.Option]:
    return {str(option.name): option for option in main.commands[command].params if isinstance(option, click.Option)}


def defaults(command: str) -> dict[str, Any]:
    """What each option of a command is where it is not given."""
    parsed = main.commands[command].make_context(command, [])
    return {name: None if value == () else value for name, value in parsed.params.items()}


def of_a_kind() -> list[str]:
    return [name for name, option in OPTIONS.items() if option.kind in WRONG]


def test_the_trainers_signature_is_the_definition() -> None:
    parameters = inspect.signature(relay.Trainer).parameters
    assert {name: parameter.default for name, parameter in list(parameters.items())[2:]} == {
        name: option.default for name, option in OPTIONS.items()
    }
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in OPTIONS)


def test_every_option_is_documented_with_its_default() -> None:
    text = relay.Trainer.__doc__ or ""
    for option in OPTIONS.values():
        assert f"        {option.name}: {option.help[:30]}" in text
        assert option.help.endswith(".")


@pytest.mark.parametrize("name", COMMAND_LINE)
def test_train_has_the_option_under_the_same_name_and_default(name: str) -> None:
    option = command_options("train")[name]
    default = defaults("train")[name]
    assert default == OPTIONS[name].default or str(option.help) != OPTIONS[name].help, "it does not say why it differs"
    assert option.opts == [f"--{name.replace('_', '-')}"]
    assert OPTIONS[name].help in str(option.help)


def test_a_flag_is_on_off_or_left_out_on_the_command_line() -> None:
    def given(*words: str) -> bool:
        return bool(main.commands["train"].make_context("train", list(words)).params["defer_updates"])

    assert [given(), given("--defer-updates"), given("--no-defer-updates")] == [True, True, False]
    assert OPTIONS["defer_updates"].default is False


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_a_command_that_has_another_default_says_why(command: str) -> None:
    known = OPTIONS | STEP_OPTIONS
    own = {"device"}  # a described machine, not one that is here
    for name, default in defaults(command).items():
        if name in known and name not in own and default != known[name].default:
            option = command_options(command)[name]
            same = name == "recompute" and default is True
            assert same or str(option.help) != known[name].help, f"{command} --{name} does not say why it differs"


@pytest.mark.parametrize("name", of_a_kind())
def test_a_wrong_value_is_refused_alike_in_python_and_on_the_command_line(name: str, tmp_path: Path) -> None:
    value = WRONG[OPTIONS[name].kind]
    with pytest.raises(ValueError, match=name):
        relay.Trainer([nn.Linear(2, 2)], nn.functional.mse_loss, **{name: value})
    flag = f"--{name.replace('_', '-')}"
    given = CliRunner().invoke(main, ["train", f"{flag}={value}", "--out", str(tmp_path / "run")])
    assert given.exit_code == 2
    assert flag in given.stderr
    run_file = tmp_path / "run.toml"
    run_file.write_text(f"{name} = {value!r}\n")
    assert tomllib.loads(run_file.read_text())
    given = CliRunner().invoke(main, ["train", str(run_file), "--out", str(tmp_path / "run")])
    assert given.exit_code == 2
    assert name in given.stderr


def test_options_go_by_keyword_after_the_loss() -> None:
    with pytest.raises(TypeError):
        relay.Trainer([nn.Linear(2, 2)], nn.functional.mse_loss, "cpu")  # type: ignore[misc]


def test_a_device_may_be_a_torch_device() -> None:
    with relay.Trainer([nn.Linear(2, 2)], nn.functional.mse_loss, device=torch.device("cpu")) as trainer:
        assert trainer.options.device == "cpu"


@pytest.mark.parametrize(
    ("option", "value", "range_of_it"),
    [
        ("warmup", 2.0, "of at least 0 and at most 1"),
        ("held_out", 1.5, "of at least 0 and below 1"),
        ("lora_dropout", 1.0, "of at least 0 and below 1"),
        ("weight_decay", -0.1, "of at least 0"),
    ],
)
def test_a_number_out_of_range_is_refused_with_its_range(option: str, value: float, range_of_it: str) -> None:
    flag = f"--{option.replace('_', '-')}"
    given = CliRunner().invoke(main, ["finetune", "nowhere", "--data", "nothing.jsonl", f"{flag}={value}"])
    assert given.exit_code == 2
    assert f"a number {range_of_it}" in given.stderr or "not in the range" in given.stderr
