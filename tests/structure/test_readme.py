"""The README does what it says: every block in it is run, every link in it leads somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from relay.cli import main
from tests.support.processes import ready_processes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
SHELLS = {"sh", "bash", "console"}


def blocks(*languages: str) -> list[str]:
    return [content for language, content in BLOCKS if language in languages]


def commands() -> list[list[str]]:
    """Each line of the shell blocks as words, prompts and comments taken off."""
    lines = [line.removeprefix("$ ") for block in blocks(*SHELLS) for line in block.replace("\\\n", " ").splitlines()]
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    environment["PYTHONPATH"] = str(ROOT)
    result = ready_processes.run(command, folder, environment, timeout=120)
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stdout}\n{result.stderr}"
    return result


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0])
def test_python_blocks_run_as_they_stand(code: str, tmp_path: Path) -> None:
    assert run([sys.executable, "-c", code], tmp_path).stdout


@pytest.mark.slow
def test_relay_commands_run_in_the_order_they_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported PyTorch. Examples, and the conformance suite, which is a run of pytest, have
    their own."""
    monkeypatch.chdir(tmp_path)
    relays = [words for words in commands() if words[0] in ("relay", "python")]
    assert {words[1] for words in relays if words[0] == "relay"} == set(main.commands)
    for words in relays:
        if words[0] == "python":  # an example of the checkout
            words = [sys.executable, str(ROOT / words[1]), *words[2:]]
        if words[0] != "relay" or words[1] == "conformance":
            assert run(words, tmp_path).stdout
            continue
        result = CliRunner().invoke(main, words[1:])
        assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}"
        assert result.stdout


def test_make_lines_name_targets_that_exist() -> None:
    targets = [target for words in commands() if words[0] == "make" for target in words[1:]]
    assert targets[:2] == ["train", "test"]
    for target in targets:
        run(["make", "-n", target], ROOT)


def test_there_are_no_other_commands_than_these() -> None:
    assert {words[0] for words in commands()} == {"make", "pip", "python", "relay"}
    assert {language for language, _ in BLOCKS} <= {"python", "toml", "text", *SHELLS}


@pytest.mark.parametrize("content", blocks("toml"))
def test_run_files_are_accepted(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(content)
    given: dict[str, Any] = tomllib.loads(content)
    assert given.keys() <= {option.name for option in main.commands["train"].params}
    (tmp_path / "README.md").write_text(README)  # the run file names it as its data
    run(["relay", "train", "run.toml", "--steps", "2", "--no-sample"], tmp_path)


def test_figures_quoted_for_the_defaults_are_the_defaults() -> None:
    train = main.commands["train"]
    with click.Context(train):
        default = {parameter.name: parameter.default for parameter in train.params}
    quoted = f"{default['layers']} layers of width {default['hidden']} for {default['steps']} steps"
    assert quoted in README
    assert f"`{default['out']}/model.safetensors`" in README


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_into_the_project_lead_somewhere(link: str) -> None:
    assert link.startswith("https://") or (ROOT / link).exists()
