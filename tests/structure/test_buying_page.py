"""The page on what to rent or buy holds the questions, the commands and the answers of the script that writes it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from relay.cli import main
from tests.support.command_line import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(ROOT / "docs" / "write_buying.py")


@pytest.fixture(scope="module")
def page() -> str:
    return (ROOT / "docs" / "buying.md").read_text(encoding="utf-8")


def test_there_are_ten_questions_of_at_most_two_commands_each(script: ModuleType, page: str) -> None:
    titles = re.findall(r"^## \d+\. (.*)$", page, re.MULTILINE)
    assert titles == [question for question, _ in script.QUESTIONS]
    assert len(script.QUESTIONS) == 10
    assert {len(commands) for _, commands in script.QUESTIONS} <= {1, 2}
    assert re.findall(r"^```sh\n(.*)\n```$", page, re.MULTILINE) == [
        command for _, commands in script.QUESTIONS for command in commands
    ]


def test_every_option_of_the_commands_is_one_that_the_command_has(script: ModuleType) -> None:
    for command in (command for _, commands in script.QUESTIONS for command in commands):
        words = shlex.split(command)
        known = {flag for parameter in main.commands[words[1]].params for flag in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


def test_the_page_shows_what_a_command_prints(script: ModuleType, page: str) -> None:
    assert script.section(5) in page
