"""PyTorch's modes of the thread that calls the trainer: what of them may reach a step, and what not.

A step trains, and its memory outlives the call, whatever mode it is called in: without gradients (`torch.no_grad`)
there would be nothing to capture, and what is allocated in `torch.inference_mode` could never be written again outside
of it. Autocast would decide on dtypes instead of the trainer's precision, and stay in programs that are kept. Workers
have threads, and modes, of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_AUTOCAST = ("cpu", "cuda", "xpu", "mps")


@contextmanager
def as_if_alone() -> Iterator[None]:
    """While open (or around a function that it decorates) gradients are recorded and tensors are plain ones.

    Raises ValueError under autocast.
    """
    for kind in _AUTOCAST:
        if torch.is_autocast_enabled(kind):
            name = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
            raise ValueError(
                f"This was called under torch.autocast({kind!r}, {name}), and what is computed in which dtype is the "
                "trainer's precision. Call it outside of autocast, and build the trainer with precision='bf16' or "
                "'fp16' for what autocast does."
            )
    with torch.inference_mode(False), torch.enable_grad():
        yield
