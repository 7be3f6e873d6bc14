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
from torch import nn

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


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """A context in which all modules of a model are in eval mode. Each has its own mode again afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
