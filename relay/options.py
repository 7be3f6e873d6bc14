"""The options of a trainer, and of a simulated run: what each may be, told before anything is built.

It knows no model beyond whether one was given whole or as a list, and opens nothing. Errors are ValueError or
TypeError, and name the option.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from hal.spec.units import parse_size

P = ParamSpec("P")
R = TypeVar("R")

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What each precision computes in."""

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}
"""What each state dtype is stored in."""

RENAMED = {
    "active": "active_layers",
    "facts": "metadata",
    "parameter_groups": "param_groups",
    "programs": "max_cached_programs",
    "stall_seconds": "stall_timeout",
}
"""Former names of arguments, each with the present one. A former name is refused."""

FIXED_SCALE = 65536.0
"""What a loss scale given as "fixed" stays at: where a dynamic one begins."""

_CHOICES: dict[str, Any] = {
    "precision": COMPUTE,
    "state_dtype": STATE_DTYPES,
    "stash": ("device", "host"),
    "on_nonfinite": ("stop", "skip", "log"),
    "on_device_lost": ("raise", "retry"),
}
_POSITIVE = ("stall_timeout", "clip_grad_norm", "clip_grad_value")
_COUNTS = ("microbatches", "slots", "max_cached_programs", "layers_per_slot", "batch", "sequence")


def check(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option, of those given, that is not among its choices or out of its range."""
    for name, choices in _CHOICES.items():
        if name in options and options[name] not in choices:
            if (name, options[name]) == ("on_device_lost", "repeat"):
                raise ValueError("on_device_lost='repeat' is called 'retry' now.")
            raise ValueError(f"{name}={options[name]!r} is not one of {', '.join(map(repr, choices))}")
    for name in _POSITIVE:
        value = options.get(name)
        if value is not None and not (isinstance(value, Real) and value > 0):
            raise ValueError(f"{name}={value!r} must be a number above 0, or None")
    for name in _COUNTS:
        value = options.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r} must be a whole number of at least 1")
    recompute = options.get("recompute", True)
    if not isinstance(recompute, int) or recompute < 0:
        raise ValueError(f"recompute={recompute!r} must be True, False, or the number of segments that recompute")
    seed = options.get("seed", 0)
    if not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed!r} must be a whole number from 0 to 2**64 - 1")
    fixed_scale(options.get("loss_scale", "dynamic"))


def list_of_modules(
    model: nn.Module | Sequence[nn.Module], loss: Callable[..., torch.Tensor] | None
) -> list[nn.Module] | None:
    """The modules of a model given as a list, or as a Sequential with a loss beside it; None for a whole model."""
    if isinstance(model, nn.Module) and not (isinstance(model, (nn.Sequential, nn.ModuleList)) and loss is not None):
        if loss is not None:
            raise ValueError("loss= goes with a list of modules; a whole model gives its loss in output.loss")
        return None
    modules: list[nn.Module] = list(model)
    if not modules or loss is None:
        raise ValueError("a list of modules needs at least one module, and loss=callable(output, targets)")
    if not all(isinstance(module, nn.Module) for module in modules):
        raise TypeError("model must be an nn.Module or a list of nn.Module")
    return modules


def fixed_scale(scale: str | float) -> float:
    """The number that a loss scale stays at; 1 for a dynamic one."""
    if scale == "dynamic":
        return 1.0
    if scale == "fixed":
        return FIXED_SCALE
    if isinstance(scale, bool) or not isinstance(scale, Real) or not scale > 0 or math.frexp(scale)[0] != 0.5:
        raise ValueError(
            f"loss_scale={scale!r} must be 'dynamic', 'fixed' (at {FIXED_SCALE:g}), or the power of two to fix it at: "
            "so unscaling is exact"
        )
    return float(scale)


def warn_of_unused(loss_scale: str | float, precision: str) -> None:
    """Say where a loss scale is asked for that a precision has no use for."""
    if precision != "fp16" and loss_scale != "dynamic":
        warnings.warn(
            f"loss_scale={loss_scale!r} has no effect with precision={precision!r}: only fp16 scales its loss.",
            stacklevel=4,
        )


def shared_inputs(names: Sequence[str], whole: bool) -> tuple[str, ...]:
    """The names of inputs that are not cut. Raises ValueError where there can be none."""
    if isinstance(names, str):
        raise ValueError(f"shared_inputs={names!r} must be a list of names: shared_inputs=[{names!r}]")
    if names and not whole:
        raise ValueError(
            f"shared_inputs={list(names)!r} names inputs of a whole model, and a list of modules has inputs without "
            "names. Leave it out, or give the model whole."
        )
    return tuple(names)


def size_or_none(size: int | str | None) -> int | None:
    """Bytes, where a limit is given."""
    return None if size is None else parse_size(size)


def refuse_renamed(function: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the public `function`: a former name of one of its arguments raises TypeError with the new name."""

    def decorate(target: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(target).parameters

        @functools.wraps(target)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if RENAMED.get(name) in known:
                    raise TypeError(f"{function}() takes no {name!r}. It is called {RENAMED[name]!r} now.")
            return target(*args, **kwargs)

        return call

    return decorate


def refuse_unknown(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for a keyword that is not known, with the one that it resembles."""
    for name in given:
        if name not in known:
            near = [one for one in known if one.startswith(name)] or difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else f" It takes {', '.join(known)}."
            raise TypeError(f"relay.{function}() takes no {name!r}.{hint}")


def several(function: str, name: str, values: Any) -> tuple[Any, ...]:
    """The values to choose from. TypeError for a single one, ValueError for none."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"relay.{function}() chooses {name} among several: give a list, such as [{values!r}].")
    found = tuple(values)
    if not found:
        raise ValueError(f"relay.{function}() chooses {name} among those given, and none were: {name}={values!r}.")
    return found
