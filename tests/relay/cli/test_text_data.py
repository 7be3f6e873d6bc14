"""Text as bytes: batches depend on seed and step alone, and training never reads what is held out."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.cli.text_data import DataError, TextData, load_text

unhurried = settings(deadline=None, max_examples=60)


def numbered(length: int) -> np.ndarray:
    return (np.arange(length) % 251).astype(np.uint8)


class Positions(TextData):
    """Also gives the positions in the text that a batch was read from."""

    def starts(self, step: int) -> np.ndarray:
        seen: list[np.ndarray] = []
        self._windows = seen.append  # type: ignore[method-assign, assignment]
        try:
            self.batch(step)
        finally:
            del self._windows
        return seen[0]


@unhurried
@given(
    length=st.integers(10, 300_000),
    sequence=st.integers(1, 600),
    batch=st.integers(1, 8),
    seed=st.integers(0, 2**63 - 1),
    step=st.integers(0, 2**40),
)
def test_no_training_window_contains_a_held_out_byte(
    length: int, sequence: int, batch: int, seed: int, step: int
) -> None:
    if length < 2 * (sequence + 1):
        return
    data = Positions(numbered(length), sequence, batch, seed)
    held_out = np.zeros(length, dtype=bool)
    for start in data.held_out_windows:
        assert start + data.window <= length
        held_out[start : start + data.window] = True
    assert held_out.any()
    for start in data.starts(step):
        assert 0 <= start <= length - data.window
        assert not held_out[start : start + data.window].any()


@unhurried
@given(length=st.integers(200, 100_000), seed=st.integers(0, 2**32), step=st.integers(0, 2**32))
def test_a_batch_is_a_pure_function_of_seed_and_step(length: int, seed: int, step: int) -> None:
    first, second = (TextData(numbered(length), 16, 4, seed) for _ in range(2))
    second.batch(step + 1)  # what was asked before must not matter
    for name in ("input_ids", "labels"):
        assert torch.equal(first.batch(step)[name], second.batch(step)[name])


def test_steps_and_seeds_give_different_batches() -> None:
    data = TextData(numbered(50_000), 32, 8, seed=0)
    other = TextData(numbered(50_000), 32, 8, seed=1)
    assert not torch.equal(data.batch(0)["input_ids"], data.batch(1)["input_ids"])
    assert not torch.equal(data.batch(0)["input_ids"], other.batch(0)["input_ids"])


def test_batches_are_int64_and_labels_are_the_next_bytes() -> None:
    batch = TextData(numbered(50_000), 32, 8).batch(3)
    for tensor in batch.values():
        assert tensor.dtype == torch.int64
        assert tensor.shape == (8, 32)
        assert tensor.is_contiguous()
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])


def test_every_run_of_training_bytes_is_drawn_from() -> None:
    data = Positions(numbered(400_000), 64, 64)
    starts = np.concatenate([data.starts(step) for step in range(20)])
    runs = set(np.searchsorted(data.run_starts, starts, side="right"))
    assert len(runs) >= len(data.run_starts) - 1  # the last run may be a few bytes long


def test_held_out_batches_are_fixed_and_full_and_spread_over_the_text() -> None:
    data = TextData(numbered(1_000_000), 128, 4, seed=5)
    again = TextData(numbered(1_000_000), 128, 4, seed=6)
    batches = data.held_out(6)
    assert [batch["labels"].shape for batch in batches] == [(4, 128)] * 6
    for ours, theirs in zip(batches, again.held_out(6), strict=True):
        assert torch.equal(ours["input_ids"], theirs["input_ids"])
    assert data.held_out_windows.min() < 100_000
    assert data.held_out_windows.max() > 900_000


def test_held_out_windows_repeat_when_the_text_is_short() -> None:
    batches = TextData(numbered(40), 16, 4).held_out(3)
    assert [batch["input_ids"].shape for batch in batches] == [(4, 16)] * 3


def test_about_a_twentieth_is_held_out_of_a_long_text() -> None:
    data = TextData(numbered(2_000_000), 128, 4)
    assert 0.04 < len(data.held_out_windows) * data.window / 2_000_000 < 0.051


def test_the_default_is_python_and_comes_in_the_same_order_each_time() -> None:
    text = load_text()
    assert len(text) > 1_000_000
    assert b"def " in text[:100_000].tobytes()
    assert np.array_equal(text, load_text())


def test_a_file_is_mapped_and_not_read(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"hello " * 100)
    text = load_text(file)
    assert isinstance(text, np.memmap)
    assert text.tobytes() == b"hello " * 100


def test_a_folder_gives_its_text_files_by_path_and_skips_the_rest(tmp_path: Path) -> None:
    for name, content in {
        "b.txt": b"second",
        "a/z.txt": b"first",
        "image.png": b"\x89PNG\0\0",
        ".hidden": b"no",
        ".git/config": b"no",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert load_text(tmp_path).tobytes() == b"firstsecond"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "nothing", "There is no file or folder"),
        (lambda folder: (folder / "empty").touch() or folder / "empty", "is empty"),
        (lambda folder: (folder / "folder").mkdir() or folder / "folder", "There is no text in the folder"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, make: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_text(make(tmp_path))


def test_a_text_shorter_than_two_sequences_says_how_much_is_needed() -> None:
    with pytest.raises(DataError, match=r"holds 33 bytes.* take 34 at a sequence length of 16"):
        TextData(numbered(33), 16, 1)
    TextData(numbered(34), 16, 1).batch(0)


@pytest.mark.parametrize(("sequence", "batch", "seed"), [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_sizes_below_one_are_refused_with_the_values(sequence: int, batch: int, seed: int) -> None:
    with pytest.raises(ValueError, match=rf"sequence={sequence}, batch_size={batch}, seed={seed}"):
        TextData(numbered(100), sequence, batch, seed)
