"""The fused optimizers of the EPS: a layer's whole update in one pass over flat tensors, at the speed of memory.

Each function widens a low-precision gradient, multiplies it by `factor` (unscaling times clipping), updates the
moments and the float32 master weights, and writes the low-precision weights, reading and writing each byte once
(LAMB twice: its step needs the norms of the whole tensor first).

What is not here: parameter groups, allocation, and when an update happens (`relay.optim.optimizers`). Invariants:
results depend on neither the number of threads nor on what else runs; nothing waits for the interpreter lock while
it computes; and with float32 states `adam`, `adamw` and `sgd` are `torch.equal` to torch's fused kernels for one
tensor a call, wherever `matches_torch()` says so.

Tensors are on the CPU, flat and contiguous, and all of one call have the same number of elements: `master` float32;
`gradient` float32, bfloat16 or float16; a state float32, bfloat16 (rounded at random, without bias) or an
`Int8State`; `weight_out` bfloat16, float16 or None. The random rounding is a function of (`seed`, `step`, place in
the tensor): give each layer a `seed` of its own.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from typing import Any

import numpy as np
import torch

from relay.optim.int8_state import Int8State
from relay.optim.thread_pool import work_through

State = torch.Tensor | Int8State

VECTOR = 8  # torch treats the last `numel % VECTOR` elements in its own way; see fused_kernels
SMALLEST_SHARE = 2**16  # elements below which a second thread costs more than it gains

_probe_lock = threading.Lock()


@functools.cache
def _compile() -> tuple[Any, str]:
    """The kernels, or None and why not."""
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
    """Whether the fused optimizers can be compiled here; a warning says so once where they cannot."""
    with _probe_lock:
        return _compile()[0] is not None


def reason() -> str:
    """Why they are not available; empty where they are."""
    with _probe_lock:
        return _compile()[1]


@functools.cache
def matches_torch() -> bool:
    """Whether float32 Adam and SGD give torch's bits here, found by trying: it depends on how torch was compiled.

    torch's kernels contract multiplications and additions where the processor can, and do not where it cannot.
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
        options = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
        adam(mine[0], gradient, mine[1], mine[2], step=step, threads=1, **options)
        lists = [[theirs[0]], [gradient], [theirs[1]], [theirs[2]], [], [count]]
        torch._fused_adam_(*lists, **options, amsgrad=False, maximize=False)
        options = {"lr": 0.01, "momentum": 0.9, "dampening": 0.1, "nesterov": True, "weight_decay": 0.1}
        sgd(mine[0], gradient, mine[3], first_step=step == 1, threads=1, **options)
        lists = [[theirs[0]], [gradient], [theirs[3]]]
        torch._fused_sgd_(*lists, **options, maximize=False, is_first_step=step == 1)
    return all(torch.equal(left, right) for left, right in zip(mine, theirs, strict=True))


def adamw(
    master: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: State,
    exp_avg_sq: State,
    weight_out: torch.Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float = 1.0,
    maximize: bool = False,
    max_exp_avg_sq: torch.Tensor | None = None,
    seed: int = 0,
    threads: int | None = None,
) -> None:
    """AdamW (Loshchilov and Hutter 2019). `step` counts from 1; `max_exp_avg_sq` (float32) asks for AMSGrad."""
    constants = _adam_constants(lr, beta1, beta2, eps, step, _signed(factor, maximize))
    constants[1] = 1 - lr * weight_decay
    _Pass(master, gradient, exp_avg, exp_avg_sq, weight_out, max_exp_avg_sq).run(
        "ADAM", constants, step=step, seed=seed, threads=threads
    )


def adam(
    master: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: State,
    exp_avg_sq: State,
    weight_out: torch.Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float = 1.0,
    maximize: bool = False,
    max_exp_avg_sq: torch.Tensor | None = None,
    seed: int = 0,
    threads: int | None = None,
) -> None:
    """Adam (Kingma and Ba 2015), its weight decay added to the gradient; otherwise as `adamw`."""
    constants = _adam_constants(lr, beta1, beta2, eps, step, _signed(factor, maximize))
    constants[2] = weight_decay
    _Pass(master, gradient, exp_avg, exp_avg_sq, weight_out, max_exp_avg_sq).run(
        "ADAM", constants, step=step, seed=seed, threads=threads
    )


def sgd(
    master: torch.Tensor,
    gradient: torch.Tensor,
    momentum_buffer: State | None,
    weight_out: torch.Tensor | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    first_step: bool = False,
    step: int = 0,
    factor: float = 1.0,
    seed: int = 0,
    threads: int | None = None,
) -> None:
    """Stochastic gradient descent as torch has it: the first step sets the momentum buffer to the gradient.

    momentum_buffer: None exactly where momentum is 0. step: needed for random rounding only.
    """
    if (momentum_buffer is None) != (momentum == 0):
        received = "none" if momentum_buffer is None else "one"
        raise ValueError(
            f"momentum_buffer does not go with momentum={momentum}: expected one exactly where momentum is not 0, "
            f"received {received}. Allocate it, or pass None."
        )
    constants = [_signed(factor, maximize), weight_decay, momentum, 1 - dampening, lr]
    flags = (momentum != 0) | first_step << 1 | nesterov << 2
    _Pass(master, gradient, momentum_buffer, None, weight_out).run(
        "SGD", constants, step=step, seed=seed, threads=threads, flags=flags
    )


def lion(
    master: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: State,
    weight_out: torch.Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    step: int = 0,
    factor: float = 1.0,
    maximize: bool = False,
    seed: int = 0,
    threads: int | None = None,
) -> None:
    """Lion (Chen et al. 2023): the sign of an average, with decoupled weight decay. step: for random rounding only."""
    decay = 1 - lr * weight_decay
    constants = [_signed(factor, maximize), decay, beta1, 1 - beta1, beta2, 1 - beta2, lr]
    _Pass(master, gradient, exp_avg, None, weight_out).run("LION", constants, step=step, seed=seed, threads=threads)


def lamb(
    master: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: State,
    exp_avg_sq: State,
    weight_out: torch.Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: float = 1.0,
    maximize: bool = False,
    seed: int = 0,
    threads: int | None = None,
) -> float:
    """LAMB (You et al. 2020), on one tensor: a step of AdamW's direction, as long as lr times the tensor's own norm.

    Returns the trust ratio |master| / |direction|, 1 where either is 0. The direction is that of the moments as
    they are stored.
    """
    constants = [*_adam_constants(lr, beta1, beta2, eps, step, _signed(factor, maximize)), weight_decay]
    constants.append(1 - beta1**step)
    walk = _Pass(master, gradient, exp_avg, exp_avg_sq, weight_out)
    sums = walk.run("LAMB_MOMENTS", constants, step=step, seed=seed, threads=threads)
    parameter_norm, direction_norm = (math.sqrt(math.fsum(column)) for column in sums.reshape(-1, 2).T)
    ratio = parameter_norm / direction_norm if parameter_norm > 0 and direction_norm > 0 else 1.0
    constants[8] = lr * ratio
    walk.run("LAMB_APPLY", constants, step=step, seed=seed, threads=threads)
    return ratio


def sum_of_squares(gradient: torch.Tensor, *, threads: int | None = None) -> float:
    """The sum of squares of a flat gradient, in float64; the same whatever the number of threads."""
    kernels = _kernels()
    size = gradient.numel()
    kind = _kind(kernels, "gradient", gradient, size, (torch.float32, torch.bfloat16, torch.float16))
    sums = np.zeros(-(-size // kernels.BLOCK))

    def work(begin: int, end: int) -> None:
        kernels.sum_of_squares(begin, end, gradient.data_ptr(), kind, sums.ctypes.data)

    work_through(work, size, alignment=kernels.BLOCK, threads=threads, smallest=SMALLEST_SHARE)
    return math.fsum(sums)


class _Pass:
    """The operands of one update, checked, as the kernel takes them."""

    def __init__(
        self,
        master: torch.Tensor,
        gradient: torch.Tensor,
        first: State | None,
        second: State | None,
        weight_out: torch.Tensor | None,
        largest: torch.Tensor | None = None,
    ) -> None:
        self._kernels = kernels = _kernels()
        self._size = size = master.numel()
        self._alive = (master, gradient, first, second, weight_out, largest)  # only addresses are passed on
        short = (torch.bfloat16, torch.float16)
        _kind(kernels, "master", master, size, (torch.float32,))
        gradient_kind = _kind(kernels, "gradient", gradient, size, (torch.float32, *short))
        weight_kind = kernels.ABSENT
        if weight_out is not None:
            weight_kind = _kind(kernels, "weight_out", weight_out, size, short)
        if largest is not None:
            _kind(kernels, "max_exp_avg_sq", largest, size, (torch.float32,))
        self._operands = (
            *(master.data_ptr(), gradient.data_ptr(), gradient_kind),
            *_state(kernels, "the first state", first, size, signed=True),
            *_state(kernels, "the second state", second, size, signed=False),
            0 if largest is None else largest.data_ptr(),
            0 if weight_out is None else weight_out.data_ptr(),
            weight_kind,
        )

    def run(
        self, rule: str, constants: list[float], *, step: int, seed: int, threads: int | None, flags: int = 0
    ) -> np.ndarray:
        """Walk through the range with one rule; returns the two sums of each block (LAMB's)."""
        kernels, size, operands = self._kernels, self._size, self._operands
        number = getattr(kernels, rule)
        scalars = np.zeros(16, np.float32)
        scalars[: len(constants)] = constants
        sums = np.zeros(2 * -(-size // kernels.BLOCK) if rule == "LAMB_MOMENTS" else 0)
        addresses = scalars.ctypes.data, sums.ctypes.data
        keys = _keys(seed, step)
        vector_end = size - size % VECTOR

        def work(begin: int, end: int) -> None:
            kernels.update(number, begin, end, vector_end, flags, *operands, *addresses, *keys)

        work_through(work, size, alignment=kernels.BLOCK, threads=threads, smallest=SMALLEST_SHARE)
        return sums


def _signed(factor: float, maximize: bool) -> float:
    return -factor if maximize else factor


def _adam_constants(lr: float, beta1: float, beta2: float, eps: float, step: int, factor: float) -> list[float]:
    """As torch computes them in double before they are rounded; decay and L2 are neutral."""
    if step < 1:
        raise ValueError(f"step is out of range: expected 1 for the first step, received {step}. Count it first.")
    root_correction = math.sqrt(1 - beta2**step)
    return [factor, 1.0, 0.0, 1 - beta1, beta2, 1 - beta2, root_correction, eps, lr / (1 - beta1**step)]


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
    numbers = {
        torch.float32: kernels.FLOAT32,
        torch.bfloat16: kernels.BFLOAT16,
        torch.float16: kernels.FLOAT16,
        torch.uint8: kernels.INT8,
    }
    return numbers[tensor.dtype]


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
