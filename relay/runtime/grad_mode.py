"""PyTorch's modes in the thread that calls the trainer, and which of them a step must not inherit.

A step trains, and its memory outlives the call, in whatever mode it is called. Under `torch.no_grad` there would be
nothing to capture, and memory allocated in `torch.inference_mode` can never be written outside of it. Autocast would
choose dtypes instead of the trainer's precision, and its choices would stay in cached programs. Worker threads have
modes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_AUTOCAST = ("cpu", "cuda", "xpu", "mps")


@contextmanager
def as_if_alone() -> Iterator[None]:
    """A context (or decorator) in which gradients are recorded and new tensors are ordinary ones.

    Raises ValueError under autocast.
    """
    for kind in _AUTOCAST:
        if torch.is_autocast_enabled(kind):
            name = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
            raise ValueError(
                f"The trainer was called under torch.autocast({kind!r}, {name}), but its precision decides the dtypes. "
                "Call it outside of autocast, and build the trainer with precision='bf16' or 'fp16' for the same "
                "effect."
            )
    with torch.inference_mode(False), torch.enable_grad():
        yield
