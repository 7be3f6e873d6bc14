"""The families of PyTorch's accelerators: whether PyTorch finds one here, and opening its devices.

How the families differ once a device is open is in `backends.torch_device.accelerator` and, for CUDA, in
`backends.torch_device.cuda`. Invariant: asking for a family that is not here raises nothing.
"""

from __future__ import annotations

import torch

from backends.torch_device.accelerator import Accelerator, MpsAccelerator
from backends.torch_device.cuda import CudaAccelerator


class Family:
    """A family of accelerators, before any of its devices is opened."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def missing(self) -> str:
        """Why there is none here; empty where there is."""
        module = getattr(torch, self.kind)
        built = getattr(torch.backends, self.kind, None)
        if self.kind in ("cuda", "mps") and built is not None and not built.is_built():
            return f"this PyTorch ({torch.__version__}) was built without {self.kind}"
        try:
            return "" if module.is_available() and self.count() > 0 else f"PyTorch finds no {self.kind} device"
        except Exception as failure:  # a driver that is installed but dead
            return f"{type(failure).__name__}: {failure}"

    def count(self) -> int:
        """How many devices there are."""
        return int(getattr(torch, self.kind).device_count())

    def open(self, number: int) -> Accelerator:
        """One of them."""
        if self.kind == "mps":
            return MpsAccelerator()
        if self.kind == "cuda":
            return CudaAccelerator(torch.cuda, self.kind, number)
        return Accelerator(getattr(torch, self.kind), self.kind, number)


FAMILIES = {kind: Family(kind) for kind in ("cuda", "xpu", "mps")}
