"""What a trace cannot see, refused by name: gradients and draws that are made by Python and not by ops.

The trace of a whole model records ops. A custom gradient (`torch.autograd.Function`) or a hook on a tensor, outside of
the repeated layers, leaves no op behind, and a hook on a parameter is called by an autograd that never runs here:
training would go on with other gradients than PyTorch's, silently. A backward that the model makes itself would not
reach through layers. Numbers drawn from Python's or numpy's generators
become constants of the trace. Inside of layers custom gradients and tensor hooks are captured as they are.
"""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from relay.errors import PartitionError

_inside_layer = 0


@contextmanager
def inside_layer() -> Iterator[None]:
    """While open, what runs is a layer's own code, which is captured later with all that it does."""
    global _inside_layer
    _inside_layer += 1
    try:
        yield
    finally:
        _inside_layer -= 1


@contextmanager
def hooks_wait() -> Iterator[None]:
    """While open, a layer runs without gradients, for the shapes that it returns or to evaluate: its hooks wait.

    A layer that sets one without asking whether the tensor requires a gradient would fail otherwise, where in training
    none would fail.
    """
    with _NoGradients():
        yield


def check_module(model: nn.Module) -> None:
    """Raise PartitionError for what no capture can keep: gradient hooks of parameters, modules without Python, and
    tensors that can never be written."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_inference():
            raise PartitionError(
                f"{name!r} was made under torch.inference_mode, so it cannot be trained. Build the model, or load its "
                "weights, outside of it."
            )
    for name, parameter in model.named_parameters():
        hooks = [parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)]
        if any(hooks):
            raise PartitionError(
                f"parameter {name!r} has a hook on its gradient, which would never be called: gradients go to the "
                "optimizer without passing through autograd's accumulation. Remove the hook; for scaling or clipping "
                "use param_groups=, clip_grad_norm= or clip_grad_value=."
            )
    for name, module in model.named_modules():
        by = "torch.jit" if isinstance(module, torch.jit.ScriptModule) else ""
        by = "torch.compile" if "_orig_mod" in module._modules else by
        if by:
            raise PartitionError(
                f"{name or 'the model'!r} is compiled by {by}, so its Python code cannot be traced. Give the module as "
                "it was before."
            )


def check_outside(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Raise PartitionError for backward hooks of modules that are not within one of the repeated blocks."""
    within = {id(one) for block in blocks.values() for one in block.modules() if one is not block}
    for name, module in model.named_modules():
        if id(module) not in within and (module._backward_hooks or module._backward_pre_hooks):
            raise PartitionError(
                f"{name or 'the model'!r} has a backward hook, and is not within one of the repeated layers, so the "
                "hook would not be called. Put it on a module within a layer."
            )


@contextmanager
def refusing() -> Iterator[Unseen]:
    """While a whole model is traced: custom gradients and hooks on tensors outside of its layers are refused.

    Yields what else was seen by which tensors get past a trace.
    """
    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if _inside_layer or threading.get_ident() != thread:
            return plain.__get__(None, cls)(*args, **kwargs)
        if cls is CheckpointFunction:
            # The relay recomputes in any case. Without an input that is trained nothing inside has a gradient.
            trained = any(isinstance(one, torch.Tensor) and one.requires_grad for one in args[2:])
            with nullcontext() if trained else torch.no_grad():
                return args[0](*args[2:])
        raise PartitionError(
            f"the model calls {cls.__name__}.apply, a custom gradient, outside of its repeated layers, where only ops "
            "are recorded: its backward would be lost. Put the call into one of the layers, or give the model as a "
            "list of modules, with loss=."
        )

    thread = threading.get_ident()
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        with _TensorHooks() as hooks:
            yield hooks.unseen
    finally:
        torch.autograd.Function.apply = plain


@contextmanager
def watching_draws() -> Iterator[None]:
    """While a model is recorded: says so where it draws from Python's or numpy's random numbers."""
    before = _generators()
    yield
    if _generators() != before:
        warnings.warn(
            "the model drew from Python's or numpy's random numbers while it was recorded (layerdrop, say). What it "
            "drew stays as it is for every batch of this shape. Turn that off; step(batch, active_layers=...) leaves "
            "layers out, and dropout of torch is drawn anew each step.",
            stacklevel=2,
        )


_HOOKING: dict[Any, str] = {
    torch.Tensor.register_hook: "calls register_hook on a tensor",
    torch.Tensor.register_post_accumulate_grad_hook: "calls register_post_accumulate_grad_hook on a tensor",
    # register_multi_grad_hook does so, and whoever hooks a node of the backward.
    torch.Tensor.grad_fn.__get__: "reads a tensor's grad_fn, on which it can have hooks,",  # type: ignore[attr-defined]
}


_DATA_GET: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_DATA_SET: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_DIFFERENTIATING: dict[Any, str] = {
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
    torch.Tensor.backward: "backward()",
}


class Unseen:
    """What a model did, outside of its layers, that makes tensors which are no op's result to a trace.

    Harmless where nothing is computed from them, so it is told only of one that a later op uses.
    """

    def __init__(self) -> None:
        self._data: list[torch.Tensor] = []

    def note(self, func: Any, args: Any, result: Any) -> None:
        """See to a call that was made."""
        if func == _DATA_GET:
            self._data.append(result)
        elif func == _DATA_SET:
            self._data.append(args[0])

    def why(self, constant: torch.Tensor) -> str:
        """How the model came by a tensor that no op of the trace gave it, and what to do instead."""
        if any(constant is one for one in self._data):
            return (
                "reads or sets .data outside of its repeated layers, where only ops are recorded. Use x.detach() for "
                "a tensor without gradient."
            )
        return (
            f"reads a tensor of shape {tuple(constant.shape)} that one of its layers left in an attribute (an "
            "auxiliary loss, say). Between layers only what they return is handed on: return it."
        )


class _TensorHooks(TorchFunctionMode):
    """Refuses hooks on tensors and backwards, and notes what else a trace does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.unseen = Unseen()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOOKING and not _inside_layer:
            raise PartitionError(
                f"the model {_HOOKING[func]} outside of its repeated layers, where only ops are recorded: the hook "
                "would be lost. Put it into one of the layers."
            )
        if func in _DIFFERENTIATING and not _inside_layer:
            raise PartitionError(
                f"the model calls {_DIFFERENTIATING[func]} outside of its repeated layers. No gradient flows through "
                "layers as the model is traced, so it would find another one than PyTorch. Leave such a term (a "
                "gradient penalty, say) out, or compute it within one layer."
            )
        result = func(*args, **(kwargs or {}))
        if not _inside_layer:
            self.unseen.note(func, args, result)
        return result


class _NoGradients(TorchFunctionMode):
    """Lets tensors that require no gradient be hooked: nothing will flow to call it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKING_FOR_GRADIENTS and not args[0].requires_grad:
            return _ASKING_FOR_GRADIENTS[func]()
        return func(*args, **(kwargs or {}))


_ASKING_FOR_GRADIENTS: dict[Any, Any] = {
    torch.Tensor.register_hook: lambda: RemovableHandle(OrderedDict()),
    torch.Tensor.retain_grad: lambda: None,
}


def _generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    state = numpy.random.get_state()
    return (random.getstate(), int(state[1][0]), int(state[2]))
