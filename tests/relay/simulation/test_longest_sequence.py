"""The longest sequence that fits: measured to fit, and the next one not to."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import relay
from relay.cli import main
from relay.simulation.limits.longest_sequence import GRAIN, longest_sequence
from tests.support.command_line import load_script

TINY: dict[str, Any] = {
    "layers": 2, "hidden": 32, "heads": 2, "vocabulary": 512, "batch": 1, "capacity": "8MB", "device": "generic",
}  # fmt: skip
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "options",
    [
        {"capacity": "3MB"},
        pytest.param({}, marks=pytest.mark.exhaustive),
        pytest.param({"head_chunk_tokens": 64}, marks=pytest.mark.exhaustive),
    ],
)
def test_the_longest_sequence_fits_and_the_next_does_not(options: dict[str, Any]) -> None:
    options = TINY | options
    longest = longest_sequence(relay.simulate(**options, seq=GRAIN))
    assert longest >= GRAIN
    assert relay.simulate(**options, seq=longest).fits
    assert not relay.simulate(**options, seq=longest + GRAIN, must_fit=None).fits


@pytest.mark.exhaustive
def test_chunks_let_sequences_be_longer() -> None:
    found = relay.simulate(**TINY, seq=GRAIN)
    assert longest_sequence(found, head_chunk_tokens=64) >= 2 * longest_sequence(found)


@pytest.mark.exhaustive
def test_simulate_prints_the_longest_sequence() -> None:
    words = "simulate --layers 2 --hidden 32 --heads 2 --vocab 512 --batch 1 --seq 256 --capacity 8MB --longest --json"
    answer = json.loads(CliRunner().invoke(main, words.split(), catch_exceptions=False).stdout)
    assert answer["longest_sequence"] == longest_sequence(relay.simulate(**TINY, seq=GRAIN))


@pytest.mark.exhaustive
def test_the_table_of_the_documentation_has_a_row_for_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script(ROOT / "docs" / "longest_sequences.py")
    tiny = relay.simulate(**TINY, seq=GRAIN).shape
    monkeypatch.setattr(script, "SHAPES", {"tiny": tiny})
    whole, chunked = script.rows(["tiny"], [0.02])
    assert (whole[1], chunked[1]) == ("whole", "head in chunks")
    assert int(chunked[2].replace(",", "")) > int(whole[2].replace(",", ""))
