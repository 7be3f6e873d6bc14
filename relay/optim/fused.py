"""The fused optimizers: the whole update of a tensor in one pass over flat memory, at the speed of that memory.

`update` widens a low-precision gradient, multiplies it by `factor` (unscaling times clipping), updates the moments and
the float32 master weights, and writes the low-precision weights. It reads and writes each byte once (LAMB twice: its
step needs the norms of the whole tensor first). A `Rule` says what the arithmetic is.

Parameter groups, allocation, and when an update happens are not here (`relay.eps`). Invariants: results depend neither
on the number of threads nor on what else runs; the interpreter lock is released while a kernel computes; and with
float32 states `ADAM`, `ADAMW` and `SGD` are `torch.equal` to torch's fused kernels for one tensor a call, wherever
`matches_torch()` is True.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from relay.optim.int8_state import Int8State
from relay.optim.split_master import SplitMaster
from relay.optim.thread_pool import work_through

State = torch.Tensor | Int8State

VECTOR = 8  # torch treats the last `numel % VECTOR` elements in its own way; see fused_kernels
SMALLEST_SHARE = 2**16  # elements below which a second thread costs more than it gains

_probe_lock = threading.Lock()


@dataclass(frozen=True)
class Rule:
    """The arithmetic of an optimizer.

    Attributes:
        kernels: the kernels of one update, in order.
        moments: the states that may be narrower than float32, by torch.optim's names, and whether each is signed.
        constants: the kernels' constants, from a parameter group, the step, and the factor on the gradient.
    """

    kernels: tuple[str, ...]
    moments: Mapping[str, bool]
    constants: Callable[[Mapping[str, Any], int, float], list[float]]


@functools.cache
def _compile() -> tuple[Any, str]:
    """The kernels, or None and the reason."""
    try:
        from relay.optim import fused_kernels
    except Exception as problem:
        why = f"{type(problem).__name__}: {problem}"
        warnings.warn(
            f"The fused optimizers cannot be compiled here, so torch's own are used: updates take longer. ({why})",
            RuntimeWarning,
            stacklevel=3,
        )
        return None, why
    return fused_kernels, ""


def _kernels() -> Any:
    with _probe_lock:
        kernels, why = _compile()
    if kernels is None:
        raise RuntimeError(
            f"The fused optimizers are not available here: {why}. Expected numba to compile them. Ask available() "
            "first and use torch's optimizers where it is False."
        )
    return kernels


def available() -> bool:
    """Whether the fused optimizers can be compiled here. Where they cannot, the first call warns."""
    with _probe_lock:
        return _compile()[0] is not None


def reason() -> str:
    """Why the fused optimizers are not available; empty if they are."""
    with _probe_lock:
        return _compile()[1]


@functools.cache
def matches_torch() -> bool:
    """Whether float32 Adam and SGD give the same bits as torch on this machine.

    It is found by trying, since it depends on how torch was compiled: torch's kernels contract multiplications and
    additions where the processor can.
    """
    if not available():
        return False
    generator = torch.Generator().manual_seed(0)
    size = 1021
    mine = [torch.randn(size, generator=generator), torch.zeros(size), torch.zeros(size), torch.zeros(size)]
    theirs = [tensor.clone() for tensor in mine]
    count = torch.zeros(())
    for step in range(1, 5):
        gradient = torch.randn(size, generator=generator)
        count += 1
        options = {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.1}
        states = {"exp_avg": mine[1], "exp_avg_sq": mine[2]}
        update(ADAM, mine[0], gradient, states, None, options | {"betas": (0.9, 0.999)}, step=step, threads=1)
        torch._fused_adam_(
            [theirs[0]], [gradient], [theirs[1]], [theirs[2]], [], [count], lr=0.01, beta1=0.9, beta2=0.999,
            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        options = {"lr": 0.01, "momentum": 0.9, "dampening": 0.1, "nesterov": True, "weight_decay": 0.1}
        update(SGD, mine[0], gradient, {"momentum_buffer": mine[3]}, None, options, step=step, threads=1)
        torch._fused_sgd_(
            [theirs[0]], [gradient], [theirs[3]], weight_decay=0.1, momentum=0.9, lr=0.01, dampening=0.1,
            nesterov=True, maximize=False, is_first_step=step == 1,
        )  # fmt: skip
    return all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))


def update(
    rule: Rule,
    master: torch.Tensor | SplitMaster,
    gradient: torch.Tensor,
    state: Mapping[str, Any],
    weight_out: torch.Tensor | None,
    group: Mapping[str, Any],
    *,
    step: int,
    factor: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
) -> float:
    """Update one tensor. All tensors are on the CPU, flat, contiguous, and of the same number of elements.

    Args:
        rule: ADAM, ADAMW, SGD, LAMB or LION.
        master: float32 weights, or a `SplitMaster`, which has its rounded weights in it; changed in place.
        gradient: float32, bfloat16 or float16.
        state: the optimizer's states by torch.optim's names, changed in place. A moment is float32, bfloat16 (rounded
            at random, without bias) or an `Int8State`. `max_exp_avg_sq` (float32) asks for AMSGrad. SGD needs
            `momentum_buffer` exactly where its momentum is not 0.
        weight_out: bfloat16 or float16 memory for the rounded weights, or None.
        group: the hyperparameters, named as in torch.optim's parameter groups.
        step: the number of the update, from 1.
        factor: multiplies the gradient first.
        seed: of the random rounding, which is a function of seed, step and index; give each tensor its own.
        threads: how many threads share the work; torch.get_num_threads() if None.

    Returns:
        LAMB's trust ratio |master| / |direction| (1 where either is 0); 1 for the other rules.

    Raises:
        ValueError: an operand does not fit the others, or `step` is below 1.
        RuntimeError: the kernels cannot be compiled here (see `available`).

    Example:
        >>> weights, gradient, average = torch.ones(8), torch.ones(8), torch.zeros(8)
        >>> group = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}
        >>> update(LION, weights, gradient, {"exp_avg": average}, None, group, step=1)
        1.0
    """
    kernels = _kernels()
    if step < 1:
        raise ValueError(f"step is out of range: expected 1 for the first step, received {step}. Count it first.")
    momentum = group.get("momentum", 0.0)
    if rule is SGD and (state.get("momentum_buffer") is None) != (momentum == 0):
        received = "none" if state.get("momentum_buffer") is None else "one"
        raise ValueError(
            f"momentum_buffer does not go with momentum={momentum}: expected one exactly where momentum is not 0, "
            f"received {received}. Allocate it, or leave it out."
        )
    size, short = master.numel(), (torch.bfloat16, torch.float16)
    first, second = ([state.get(label) for label in rule.moments] + [None])[:2]
    largest = state.get("max_exp_avg_sq")
    weights = _weights(kernels, master, weight_out, size)
    if largest is not None:
        _kind(kernels, "max_exp_avg_sq", largest, size, (torch.float32,))
    operands = (
        *(weights[0], gradient.data_ptr()),
        _kind(kernels, "gradient", gradient, size, (torch.float32, *short)),
        *_state(kernels, "the first state", first, size, signed=True),
        *_state(kernels, "the second state", second, size, signed=False),
        0 if largest is None else largest.data_ptr(),
        *weights[1:],
    )
    constants = rule.constants(group, step, -factor if group.get("maximize") else factor)
    flags = (momentum != 0) | (step == 1) << 1 | bool(group.get("nesterov")) << 2
    keys = _keys(seed, step)
    vector_end = size - size % VECTOR
    scalars = np.zeros(16, np.float32)
    scalars[: len(constants)] = constants
    ratio = 1.0
    for name in rule.kernels:
        number = getattr(kernels, name)
        sums = np.zeros(2 * -(-size // kernels.BLOCK) if name == "LAMB_MOMENTS" else 0)
        addresses = scalars.ctypes.data, sums.ctypes.data

        def work(begin: int, end: int, number: int = number, addresses: tuple[int, int] = addresses) -> None:
            kernels.update(number, begin, end, vector_end, flags, *operands, *addresses, *keys)

        work_through(work, size, alignment=kernels.BLOCK, threads=threads, smallest=SMALLEST_SHARE)
        if name == "LAMB_MOMENTS":
            parameter_norm, direction_norm = (math.sqrt(math.fsum(column)) for column in sums.reshape(-1, 2).T)
            if parameter_norm > 0 and direction_norm > 0:
                ratio = parameter_norm / direction_norm
            scalars[8] = float(group["lr"]) * ratio
    return ratio


def _adam_constants(group: Mapping[str, Any], step: int, factor: float) -> list[float]:
    """As torch computes them in float64 before they are rounded; decoupled decay and L2 are neutral."""
    beta1, beta2 = group["betas"]
    root_correction = math.sqrt(1 - beta2**step)
    step_size = float(group["lr"]) / (1 - beta1**step)
    return [factor, 1.0, 0.0, 1 - beta1, beta2, 1 - beta2, root_correction, group["eps"], step_size]


def _adam(group: Mapping[str, Any], step: int, factor: float) -> list[float]:
    constants = _adam_constants(group, step, factor)
    constants[2] = group["weight_decay"]
    return constants


def _adamw(group: Mapping[str, Any], step: int, factor: float) -> list[float]:
    constants = _adam_constants(group, step, factor)
    constants[1] = 1 - float(group["lr"]) * group["weight_decay"]
    return constants


def _sgd(group: Mapping[str, Any], step: int, factor: float) -> list[float]:
    return [factor, group["weight_decay"], group["momentum"], 1 - group["dampening"], float(group["lr"])]


def _lion(group: Mapping[str, Any], step: int, factor: float) -> list[float]:
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    return [factor, 1 - lr * group["weight_decay"], beta1, 1 - beta1, beta2, 1 - beta2, lr]


def _lamb(group: Mapping[str, Any], step: int, factor: float) -> list[float]:
    return [*_adam_constants(group, step, factor), group["weight_decay"], 1 - group["betas"][0] ** step]


_TWO_MOMENTS = {"exp_avg": True, "exp_avg_sq": False}

ADAM = Rule(("ADAM",), _TWO_MOMENTS, _adam)
"""Adam (Kingma and Ba 2015); weight decay is added to the gradient."""

ADAMW = Rule(("ADAM",), _TWO_MOMENTS, _adamw)
"""AdamW (Loshchilov and Hutter 2019)."""

SGD = Rule(("SGD",), {"momentum_buffer": True}, _sgd)
"""Stochastic gradient descent as torch has it: the first step sets the momentum buffer to the gradient."""

LION = Rule(("LION",), {"exp_avg": True}, _lion)
"""Lion (Chen et al. 2023): the sign of an average, with decoupled weight decay."""

LAMB = Rule(("LAMB_MOMENTS", "LAMB_APPLY"), _TWO_MOMENTS, _lamb)
"""LAMB (You et al. 2020): a step of AdamW's direction, as long as lr times the tensor's own norm. The direction is
that of the moments as they are stored."""


def _keys(seed: int, step: int) -> tuple[int, int]:
    """A 32-bit key for each state, from splitmix64 (Steele et al. 2014) of seed and step."""
    word = (seed * 0x9E3779B97F4A7C15 + step * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019) & (2**64 - 1)
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & (2**64 - 1)
    word ^= word >> 31
    return word & 0xFFFFFFFF, word >> 32


def _kind(kernels: Any, name: str, tensor: torch.Tensor, size: int, allowed: tuple[torch.dtype, ...]) -> int:
    """The kernels' number for a tensor's dtype; ValueError for a tensor they cannot take."""
    if tensor.dtype not in allowed or tensor.numel() != size or not tensor.is_contiguous() or not tensor.is_cpu:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        raise ValueError(
            f"{name} cannot be taken: expected a contiguous {expected} tensor of {size} elements on the CPU, received "
            f"a {layout} {str(tensor.dtype).removeprefix('torch.')} tensor of {tensor.numel()} on {tensor.device}. "
            "Convert it first."
        )
    numbers: dict[torch.dtype, int] = {
        torch.float32: kernels.FLOAT32,
        torch.bfloat16: kernels.BFLOAT16,
        torch.float16: kernels.FLOAT16,
        torch.uint8: kernels.INT8,
    }
    return numbers[tensor.dtype]


def _weights(
    kernels: Any, master: torch.Tensor | SplitMaster, weight_out: torch.Tensor | None, size: int
) -> tuple[int, int, int, int, int]:
    """Addresses and kind: the master (or its lower halves), the rounded weights, their kind, flags and bits of ties."""
    if isinstance(master, SplitMaster):
        if weight_out is not None:
            raise ValueError("weight_out goes with a float32 master: a split master has its rounded weights in it.")
        high, low, flags, ties = master.addresses()
        return low, high, kernels.SPLIT, flags, ties
    _kind(kernels, "master", master, size, (torch.float32,))
    if weight_out is None:
        return master.data_ptr(), 0, kernels.ABSENT, 0, 0
    kind = _kind(kernels, "weight_out", weight_out, size, (torch.bfloat16, torch.float16))
    return master.data_ptr(), weight_out.data_ptr(), kind, 0, 0


def _state(kernels: Any, name: str, state: State | None, size: int, *, signed: bool) -> tuple[int, int, int]:
    """Address, kind and address of the scales."""
    if state is None:
        return 0, kernels.ABSENT, 0
    if not isinstance(state, Int8State):
        return state.data_ptr(), _kind(kernels, name, state, size, (torch.float32, torch.bfloat16)), 0
    if state.signed != signed:
        raise ValueError(
            f"{name} has the wrong 8-bit format: expected signed={signed}, received signed={state.signed}. First "
            "moments are signed, second moments are not."
        )
    kind = _kind(kernels, name, state.codes, size, (torch.uint8,))
    return state.codes.data_ptr(), kind, state.scales.data_ptr()
