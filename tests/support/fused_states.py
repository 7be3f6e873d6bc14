"""Tensors and optimizer states for tests of `relay.optim.fused`, and the settings that these are tried with."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

from relay.optim import fused
from relay.optim.int8_state import Int8State, group_count

ADAM = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
"""A parameter group for Adam, AdamW and LAMB."""

SGD = {"lr": 0.01, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}
"""A parameter group for SGD."""
SHORT = [torch.bfloat16, torch.float16]
few = settings(max_examples=25, deadline=None)
sizes = st.one_of(st.integers(1, 70), st.integers(1, 9000))


def normal(size: int, seed: int = 0, spread: float = 0.0) -> torch.Tensor:
    """Normal numbers; with `spread`, over so many decades either way."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator)
    return values * 10 ** torch.empty(size).uniform_(-spread, spread, generator=generator) if spread else values


def new_state(kind: str, size: int, *, signed: bool) -> fused.State:
    if kind == "int8":
        codes = torch.zeros(size, dtype=torch.uint8)
        return Int8State(codes, torch.zeros(group_count(size)), signed)
    return torch.zeros(size, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[kind])


def stored(state: fused.State) -> list[torch.Tensor]:
    return [state.codes, state.scales] if isinstance(state, Int8State) else [state]


def value(state: fused.State) -> torch.Tensor:
    return state.to_float() if isinstance(state, Int8State) else state.float()


def moments(first: fused.State, second: fused.State) -> dict[str, fused.State]:
    """The states of Adam, AdamW and LAMB."""
    return {"exp_avg": first, "exp_avg_sq": second}


def for_torch(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group as torch's fused kernels take it."""
    options = {name: value for name, value in group.items() if name != "betas"}
    return options | dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(left, right, strict=True))
