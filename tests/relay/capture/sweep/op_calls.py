"""Calls of ATen ops as PyTorch's own samples of operators and modules make them, forward and backward.

They are what autograd runs on the CPU: `recorded_calls` keeps a few of each overload, distinct in the shapes of their
tensors. `layouts` lays their tensors otherwise in memory. Values stay those of the sample, so that indices are valid.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

CALLS_AN_OP = 8
"""How many calls of an overload are kept."""


@dataclass(frozen=True)
class Call:
    """A call of an overload with real tensors."""

    op: Any
    given: tuple[Any, ...]
    structure: pytree.TreeSpec

    @property
    def tensors(self) -> list[int]:
        """Which of `given` are tensors."""
        return [index for index, value in enumerate(self.given) if isinstance(value, torch.Tensor)]

    def run(self, given: Sequence[Any]) -> list[torch.Tensor]:
        """The tensors that the op returns for other arguments of the same structure."""
        args, kwargs = pytree.tree_unflatten(list(given), self.structure)
        return [result for result in pytree.tree_leaves(self.op(*args, **kwargs)) if isinstance(result, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Keeps calls of functional ATen ops that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, dict[Any, Call]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and not func._schema.is_mutable and not func.is_view:
            self._keep(func, args, kwargs)
        return func(*args, **kwargs)

    def _keep(self, func: Any, args: Any, kwargs: Any) -> None:
        kept = self.calls.setdefault(func, {})
        given, structure = pytree.tree_flatten((args, kwargs))
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        if not tensors or any(tensor.layout is not torch.strided for tensor in tensors):
            return
        # By how many dimensions, and whether one is of length one: this is what strides depend on.
        key = tuple((tensor.dim(), tensor.dtype, 1 in tensor.shape) for tensor in tensors)
        if len(kept) < CALLS_AN_OP and key not in kept:
            values = tuple(value.detach().clone() if isinstance(value, torch.Tensor) else value for value in given)
            kept[key] = Call(func, values, structure)


def recorded_calls(part: slice = slice(None), samples: int = 8) -> list[Call]:
    """Calls that part of PyTorch's samples make, at most so many samples of each operator and module."""
    recorder = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in itertools.chain(_operators(part, samples), _modules(part, samples)):
            _record(recorder, run)
    return [call for calls in recorder.calls.values() for call in calls.values()]


def _operators(part: slice, samples: int) -> Iterator[Callable[[], Any]]:
    for info in op_db[part]:
        if info.supports_dtype(torch.float32, "cpu") and info.supports_autograd:
            torch.manual_seed(0)
            for sample in itertools.islice(info.sample_inputs("cpu", torch.float32, requires_grad=True), samples):
                yield functools.partial(info.op, sample.input, *sample.args, **sample.kwargs)


def _modules(part: slice, samples: int) -> Iterator[Callable[[], Any]]:
    for info in module_db[part]:
        for training in (True, False):
            torch.manual_seed(0)
            made = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
            )
            for sample in [given for given in made if given.forward_input is not None][:samples]:
                yield functools.partial(_run_module, info, sample, training)


def _run_module(info: Any, sample: Any, training: bool) -> Any:
    module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(training)
    return module(*sample.forward_input.args, **sample.forward_input.kwargs)


def _record(recorder: Recorder, run: Callable[[], Any]) -> None:
    """Forward and backward under the recorder; what PyTorch does not run itself is no sample."""
    try:
        with recorder:
            for result in pytree.tree_leaves(run()):
                if isinstance(result, torch.Tensor) and result.requires_grad:
                    result.backward(torch.ones_like(result), retain_graph=True)
    except Exception:
        return


LAYOUTS = ("swapped", "channels last", "reversed", "gaps", "one row", "one value")


def laid(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """A tensor of that shape that lies otherwise: its dimensions in another order, or with gaps, or expanded.

    The values stay, unless it is expanded, which only tensors of floats are: others may be indices.
    """
    dims = list(range(tensor.dim()))
    if len(dims) < 2 or not tensor.numel():
        return tensor
    if how == "gaps":
        return tensor.repeat_interleave(2, -1)[..., ::2]
    if how == "one row":
        return tensor[:1].expand(tensor.shape) if tensor.is_floating_point() else tensor
    if how == "one value":
        return tensor.flatten()[0].expand(tensor.shape) if tensor.is_floating_point() else tensor
    if how == "swapped":
        dims[-1], dims[-2] = dims[-2], dims[-1]
    elif how == "channels last":
        dims = [dims[0], *dims[2:], dims[1]]
    else:
        dims = dims[::-1]
    return tensor.permute(dims).contiguous().permute([dims.index(dim) for dim in range(len(dims))])


def layouts(call: Call) -> Iterator[tuple[Any, ...]]:
    """The arguments of a call: as they are, and with all tensors, one of them, and all but one laid otherwise."""
    indices = call.tensors
    all_but_one = ([other for other in indices if other != index] for index in indices)
    chosen = [indices, *([index] for index in indices), *all_but_one]
    seen = set()
    for how in LAYOUTS:
        for subset in [[], *chosen]:
            given = tuple(laid(value, how) if index in subset else value for index, value in enumerate(call.given))
            strides = tuple(given[index].stride() for index in indices)
            if strides not in seen:
                seen.add(strides)
                yield given
