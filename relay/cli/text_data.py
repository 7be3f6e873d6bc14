"""The batches of `relay train`: windows of bytes from text files.

There are no workers, no tokenizer and no epochs: a batch is a few thousand bytes from an array, which takes
microseconds. Invariants: a batch is a function of the seed and the step alone, so that a resumed run sees the batches
of an uninterrupted one; and no training window contains a held-out byte, not even as a label.

Shapes: B sequences a batch, T bytes a sequence. A window is T + 1 bytes: the inputs and, shifted by one, the
labels.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from relay.errors import RelayError

BLOCK_BYTES = 4096  # large enough that few windows are lost at its edges, small enough to sample every file
HELD_OUT_EVERY = 20  # one block in this many is held out
NOT_PRODUCT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}

Batch = dict[str, torch.Tensor]


class DataError(RelayError):
    """The given path holds no usable text."""


def load_text(path: str | Path | None = None) -> np.ndarray:
    """The bytes of a file (memory-mapped), of the text files in a folder, or of Python's standard library (None)."""
    if path is None:
        return _join(_standard_library(), "the Python standard library's sources")
    path = Path(path)
    if path.is_dir():
        return _join(_text_files(path), f"the folder '{path}'")
    if not path.exists():
        raise DataError(f"There is no file or folder '{path}'. Give an existing text file or a folder of them.")
    if not path.is_file():
        raise DataError(f"'{path}' is neither a file nor a folder. Give a text file or a folder of them.")
    if path.stat().st_size == 0:
        raise DataError(f"'{path}' is empty. Give a file with some text in it.")
    return np.memmap(path, dtype=np.uint8, mode="r")


class TextData:
    """Batches of training windows, and a fixed set of held-out windows, from an array of bytes.

    Every twentieth block is held out whole. The blocks are spread over the text, so that they resemble the training
    data, and are far longer than a window, so that few windows are lost at their edges. `share` is the number of this
    process and how many there are: each gets a part of every batch, in order, which may be empty.
    """

    def __init__(
        self, text: np.ndarray, sequence: int, batch_size: int, seed: int = 0, share: tuple[int, int] = (0, 1)
    ) -> None:
        if text.dtype != np.uint8 or text.ndim != 1:
            raise ValueError(f"text must be a flat array of uint8; received {text.ndim}-d {text.dtype}")
        if sequence < 1 or batch_size < 1 or seed < 0:
            raise ValueError(
                "sequence and batch_size must be at least 1 and seed at least 0; "
                f"received sequence={sequence}, batch_size={batch_size}, seed={seed}"
            )
        self.text = text
        self.window = sequence + 1
        self.batch_size = batch_size
        self.seed = seed
        self.share = share
        if len(text) < 2 * self.window:
            raise DataError(
                f"The data holds {len(text)} bytes, but one sequence to train on and one to hold out take "
                f"{2 * self.window} at a sequence length of {sequence}. Give more text or shorter sequences."
            )
        # Short texts have smaller blocks, at least one window long, and at least one block is held out.
        block = max(self.window, min(BLOCK_BYTES, len(text) // HELD_OUT_EVERY))
        every = min(HELD_OUT_EVERY, len(text) // block)
        held_out_starts = np.arange(every - 1, len(text) // block, every) * block
        self.held_out_windows = (held_out_starts[:, None] + np.arange(0, block - sequence, self.window)).ravel()
        run_starts = np.append(0, held_out_starts + block)
        run_ends = np.append(held_out_starts, len(text))
        self.run_starts = run_starts
        # A run of n bytes has n - T window positions; their running totals map a random number to a run and a position.
        self.positions_until = np.cumsum(np.maximum(run_ends - run_starts - sequence, 0))

    def batch(self, step: int) -> Batch:
        """The training batch of a step: `input_ids` and `labels`, int64 (B, T) each."""
        # The step is the highest word of the counter, so that no two steps share random numbers.
        random = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, 0, step]))
        positions = random.integers(0, self.positions_until[-1], size=self.batch_size)
        runs = np.searchsorted(self.positions_until, positions, side="right")
        before = np.append(0, self.positions_until)[runs]
        return self._windows(self.run_starts[runs] + positions - before)

    def held_out(self, batches: int) -> list[Batch]:
        """The same batches on every call, spread evenly over the held-out text.

        Every batch has the shape of a training batch; windows repeat where there are fewer than needed.
        """
        picks = np.linspace(0, len(self.held_out_windows) - 1, batches * self.batch_size).round().astype(int)
        starts = self.held_out_windows[picks].reshape(batches, self.batch_size)
        return [self._windows(row) for row in starts]

    def _windows(self, starts: np.ndarray) -> Batch:
        rank, count = self.share
        starts = np.array_split(starts, count)[rank]
        rows = self.text[starts[:, None] + np.arange(self.window)]  # (B, T + 1) bytes
        windows = torch.from_numpy(rows.astype(np.int64))
        return {"input_ids": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}


def _join(files: Iterator[Path], where: str) -> np.ndarray:
    joined = bytearray()
    for file in files:
        joined += file.read_bytes()
    if not joined:
        raise DataError(f"There is no text in {where}. Give a text file, or a folder that holds some.")
    return np.frombuffer(joined, dtype=np.uint8)


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return (file for file in _walk(root, skip=NOT_PRODUCT_SOURCES) if file.suffix == ".py")


def _text_files(root: Path) -> Iterator[Path]:
    return (file for file in _walk(root, skip={"__pycache__"}) if _looks_like_text(file))


def _walk(root: Path, skip: set[str]) -> Iterator[Path]:
    """The regular files below a folder in the order of their paths, without hidden ones and those in `skip`."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    found.sort(key=lambda file: file.relative_to(root).as_posix())
    return (file for file in found if file.is_file())


def _looks_like_text(file: Path) -> bool:
    """Whether the file has no zero byte near its start: nearly all binary formats have one, text has none."""
    with file.open("rb") as stream:
        return b"\0" not in stream.read(8192)
