"""What commands print where torchrun has started several processes: one message, from the first."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from relay.cli import main
from relay.cli.console import Commands, RunStopped


@pytest.mark.parametrize(("rank", "messages"), [("0", 1), ("1", 0)])
def test_finetune_on_several_processes_is_refused_once(rank: str, messages: int) -> None:
    words = ["finetune", "no-such-folder", "--data", "rows.jsonl"]
    done = CliRunner(env={"RANK": rank, "WORLD_SIZE": "2"}).invoke(main, words)
    assert done.exit_code == 2
    assert done.output.count("torchrun has started 2") == messages
    assert bool(done.output) == bool(messages)


@pytest.mark.parametrize(("rank", "message"), [("0", "relay: saved: step 3\n"), ("1", "")])
def test_an_interrupted_run_is_reported_once(rank: str, message: str) -> None:
    @click.group(cls=Commands)
    def commands() -> None:
        pass

    @commands.command()
    def run() -> None:
        raise RunStopped("saved: step 3", 143)

    done = CliRunner(env={"RANK": rank, "WORLD_SIZE": "2"}).invoke(commands, ["run"])
    assert (done.exit_code, done.output) == (143, message)
