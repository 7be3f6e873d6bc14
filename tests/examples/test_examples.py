"""The examples run to their end, in their quick size, and what they compute is what they say."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import reference  # noqa: F401  (sets torch to one thread)
from tests.support.command_line import load_script

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = (Path(__file__).parents[2] / "docs" / "examples.md").read_text(encoding="utf-8")


def example(name: str) -> ModuleType:
    """An example as a module."""
    return load_script(EXAMPLES / f"{name}.py")


def test_growing_ends_at_the_full_depth_in_the_same_device_memory(capsys: pytest.CaptureFixture[str]) -> None:
    growing, full = example("progressive_growth").main(["--quick"])
    assert len(growing.model.blocks) == len(full.model.blocks) == 4
    assert growing.peaks == full.peaks
    assert len(growing.peaks) == 1
    for run in (growing, full):
        first, last = run.held_out[0], run.held_out[-1]
        assert last[2] < first[2] < 1.05 * math.log(256)
        assert last[1] > first[1]
    # Whichever had had less time went on until it had as much.
    behind, ahead = sorted((growing, full), key=lambda run: -run.steps)
    assert ahead.steps == 12 <= behind.steps
    assert behind.seconds >= ahead.seconds or behind.steps == 48
    printed = capsys.readouterr().out
    assert "held-out loss" in printed
    assert "time of growing / full depth" in printed


def test_a_depth_that_cannot_be_halved_so_often_is_asked_wrongly() -> None:
    with pytest.raises(SystemExit):
        example("progressive_growth").main(["--layers", "6", "--doublings", "2"])


def test_sampling_gives_a_held_out_loss_for_every_candidate_and_for_some_that_of_training_alone() -> None:
    module = example("sample_depth")
    candidates, seconds = module.main(["--quick"])
    assert seconds > 0
    sizes = [(candidate.depth, candidate.width) for candidate in candidates]
    assert sizes == [(depth, width) for depth in (1, 2) for width in (8, 4)]
    assert all(0 < candidate.sampled < 2 for candidate in candidates)
    assert all(candidate.alone is not None and candidate.alone != candidate.sampled for candidate in candidates)
    alone = module.Network(candidates[0].depth, candidates[0].width).layers.parameters()
    assert candidates[0].parameters == sum(parameter.numel() for parameter in alone)


def test_agreement_is_the_share_of_pairs_in_one_order() -> None:
    module = example("sample_depth")
    losses = [(0.1, 1.0), (0.2, 2.0), (0.3, 1.5)]
    assert module.agreement([module.Candidate(1, 1, *pair) for pair in losses]) == pytest.approx(2 / 3)


def test_the_page_speaks_of_every_example_and_of_no_other() -> None:
    named = set(re.findall(r"examples/(\w+)(?:\.py)?\b", PAGE))
    assert named == {path.stem for path in EXAMPLES.iterdir() if path.suffix == ".py" or (path / "README.md").exists()}
