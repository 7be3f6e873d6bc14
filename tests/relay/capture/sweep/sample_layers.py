"""PyTorch's own samples of operators and modules, each as a layer.

A layer is given one tensor: the sample's first dense one that requires a gradient. Other dense tensors that require one
are its parameters, the rest its buffers. It returns all tensors that the operator returns. Samples have fixed names:
`add/1`, `add_/0` (in place), `nn.Linear/2`.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

OPERATOR_SAMPLES = 2
"""How many samples of each operator are layers: the first, and one from the middle."""


class Constant:
    """A sparse tensor among the arguments. Copies of the layer share it, since PyTorch does not copy all layouts."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __deepcopy__(self, memo: Any) -> Constant:
        return self


class Operator(nn.Module):
    """A function of several arguments as a layer of one.

    One with parameters of its own is `trained`, and may have arguments that are none: it is given a one, unused.
    """

    def __init__(self, function: Callable[..., Any], arguments: Any, trained: bool = False) -> None:
        super().__init__()
        self.function = function
        self.given, self.structure = pytree.tree_flatten(arguments)
        self.value = _first_trained(self.given)
        if self.value is None and not trained:
            raise NotASample("no dense tensor of it requires a gradient")
        self.names: dict[int, str] = {}
        for index, argument in enumerate(self.given):
            if not isinstance(argument, torch.Tensor) or index == self.value:
                continue
            if argument.layout is not torch.strided:
                self.given[index] = Constant(argument.detach())
                continue
            self.names[index] = name = f"argument_{index}"
            copied = argument.detach().clone(memory_format=torch.contiguous_format)
            if argument.requires_grad:
                self.register_parameter(name, nn.Parameter(copied))
            else:
                self.register_buffer(name, copied)
            self.given[index] = None

    def take_example(self) -> torch.Tensor:
        """What the layer is given, and holds no longer."""
        if self.value is None:
            return torch.ones(1)
        given = self.given[self.value].detach().clone(memory_format=torch.contiguous_format)
        self.given[self.value] = None
        return given

    def forward(self, value: torch.Tensor) -> Any:
        given = [argument.tensor if isinstance(argument, Constant) else argument for argument in self.given]
        for index, name in self.names.items():
            given[index] = getattr(self, name)
        if self.value is not None:
            given[self.value] = value
        args, kwargs = pytree.tree_unflatten(given, self.structure)
        return tensors_of(self.function(*args, **kwargs))


class Module(nn.Module):
    """A module of several arguments as a layer of one."""

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        super().__init__()
        self.module = module
        self.operator = Operator(lambda *args, **kwargs: module(*args, **kwargs), arguments, True)

    def take_example(self) -> torch.Tensor:
        return self.operator.take_example()

    def forward(self, value: torch.Tensor) -> Any:
        self.operator.function = self.module
        return self.operator(value)


def tensors_of(result: Any) -> tuple[torch.Tensor, ...]:
    """The tensors among what an operator returns."""
    return tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor))


def _first_trained(given: list[Any]) -> int | None:
    for index, argument in enumerate(given):
        if isinstance(argument, torch.Tensor) and argument.requires_grad and argument.layout is torch.strided:
            return index
    return None


class NotASample(Exception):
    """A sample that PyTorch itself does not train."""


@dataclass(frozen=True)
class Sample:
    """One sample. `make` builds its layer and what that is given, the same ones at every call."""

    name: str
    make: Callable[[], tuple[nn.Module, torch.Tensor]]


def operator_samples(part: slice = slice(None)) -> Iterator[Sample]:
    """The samples of operators that can be trained in float32, and of their in-place forms."""
    for info in op_db[part]:
        if not (info.supports_dtype(torch.float32, "cpu") and info.supports_autograd):
            continue
        name = info.name + (f".{info.variant_test_name}" if info.variant_test_name else "")
        for number in range(OPERATOR_SAMPLES):
            yield Sample(f"{name}/{number}", functools.partial(_operator, info, info.op, number))
        if info.inplace_variant is not None and info.supports_inplace_autograd:
            yield Sample(f"{name}_/0", functools.partial(_operator, info, _in_place(info.inplace_variant), 0))


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    def on_a_copy(value: torch.Tensor, /, *args: Any, **kwargs: Any) -> Any:
        return function(value.clone(), *args, **kwargs)

    return on_a_copy


def _operator(info: Any, function: Callable[..., Any], number: int) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    samples = list(info.sample_inputs("cpu", torch.float32, requires_grad=True))
    index = 0 if number == 0 else len(samples) // 2
    if number and index == 0:
        raise NotASample("the operator has one sample")
    sample = samples[index]
    # What a loss may depend on of a result that is not unique, such as eigenvectors.
    process = sample.output_process_fn_grad
    layer = Operator(
        lambda *args, **kwargs: process(function(*args, **kwargs)), ((sample.input, *sample.args), sample.kwargs)
    )
    return layer, layer.take_example()


def module_samples(part: slice = slice(None)) -> Iterator[Sample]:
    """All samples of modules, in training."""
    for info in module_db[part]:
        count = len(_module_inputs(info))
        for number in range(count):
            yield Sample(f"{info.name}/{number}", functools.partial(_module, info, number))


@functools.lru_cache(maxsize=1)
def _module_inputs(info: Any) -> list[Any]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
        return [sample for sample in made if sample.forward_input is not None]


def _module(info: Any, number: int) -> tuple[nn.Module, torch.Tensor]:
    sample = _module_inputs(info)[number]
    torch.manual_seed(0)
    module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train()
    layer = Module(module, (sample.forward_input.args, sample.forward_input.kwargs))
    return layer, layer.take_example()


def all_samples(part: slice = slice(None)) -> Iterator[Sample]:
    """Those of part of the operators, then those of that part of the modules."""
    return itertools.chain(operator_samples(part), module_samples(part))


def sample_named(name: str) -> Sample:
    """The sample of that name."""
    family, _, number = name.rpartition("/")
    for info in module_db:
        if info.name == family:
            return Sample(name, functools.partial(_module, info, int(number)))
    return next(sample for sample in operator_samples() if sample.name == name)
