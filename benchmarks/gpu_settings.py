"""What is asked of the sections of `benchmarks/gpu.py`, and what they measure with: models, batches, plain gradients.

Not a section itself. Equality is with plain PyTorch doing the same micro-batches on the same device; a comparison takes
its gradients from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hal import registry
from relay.capture import autocast
from relay.models import GPT

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Setting:
    """What is asked for on the command line."""

    device: str
    quick: bool
    trace: Path | None

    @property
    def torch_device(self) -> torch.device:
        """PyTorch's own name of the device."""
        device = registry.open(self.device)
        torch_device = torch.device(device.info.traced_for)
        device.close()
        return torch_device

    def pick(self, full: Any, quick: Any) -> Any:
        """A size for a GPU, or for trying the script."""
        return quick if self.quick else full


def synchronize(torch_device: torch.device) -> None:
    """Wait for everything that plain PyTorch gave the device."""
    if torch_device.type != "cpu":
        torch.get_device_module(torch_device).synchronize(torch_device)


def real_peak(torch_device: torch.device) -> int:
    """The most bytes PyTorch's allocator held on the device in this process; 0 where it does not count."""
    return int(torch.cuda.max_memory_reserved(torch_device)) if torch_device.type == "cuda" else 0


def random_batches(count: int, samples: int, sequence: int) -> list[dict[str, torch.Tensor]]:
    """Random bytes; what is measured does not depend on them."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        ids = torch.randint(0, 256, (samples, sequence + 1), generator=generator)
        made.append({"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()})
    return made


def make_model(layers: int, hidden: int, sequence: int, dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    heads = max(1, hidden // 64)
    return GPT(layers=layers, hidden=hidden, heads=heads, sequence=sequence, tied=False, dropout=dropout)


def plain_gradients(
    model: GPT, batch: dict[str, torch.Tensor], pieces: int, torch_device: torch.device, dtype: torch.dtype
) -> float:
    """Plain PyTorch's loss of a batch, its gradients left in the parameters."""
    total, size = 0.0, len(batch["input_ids"])
    for inputs, labels in zip(batch["input_ids"].chunk(pieces), batch["labels"].chunk(pieces), strict=True):
        with autocast(dtype, torch_device.type):
            loss = model(input_ids=inputs.to(torch_device), labels=labels.to(torch_device)).loss
        weighted = loss * (len(inputs) / size)
        weighted.backward()
        total += weighted.item()
    return total
