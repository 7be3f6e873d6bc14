"""Refusing what the trace of a whole model would silently lose.

The trace of a model holds ops alone. Outside of the repeated layers, a custom gradient (`torch.autograd.Function`) or a
hook on a tensor leaves no op in it, and a backward that the model runs itself would not reach through layers. A hook on
a parameter would never be called, since gradients are not accumulated by autograd. Training would continue with other
gradients than PyTorch's, so these are errors. Inside layers, custom gradients and tensor hooks are captured.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from relay.errors import PartitionError

_inside_layer = 0


@contextmanager
def inside_layer() -> Iterator[None]:
    """While open, the code of a layer runs. Nothing is refused in it, as the layer is captured later."""
    global _inside_layer
    _inside_layer += 1
    try:
        yield
    finally:
        _inside_layer -= 1


@contextmanager
def hooks_wait() -> Iterator[None]:
    """While open, registering a hook on a tensor that requires no gradient does nothing, instead of failing.

    Layers run without gradients to find the shapes of their outputs, or in evaluation. Without this, a layer that
    registers hooks on tensors would fail there, but not in training.
    """
    with _NoGradients():
        yield


def check_module(model: nn.Module) -> None:
    """Raise PartitionError for what no trace can hold: gradient hooks of parameters, TorchScript modules, tensors made
    in inference mode, and parameters and buffers without a shape."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            layer = name.rpartition(".")[0]
            raise PartitionError(
                f"layer {layer!r} is a lazy module whose {name.rpartition('.')[2]!r} has no shape yet. Call the model "
                "once on a sample, under torch.no_grad(), before it is trained."
            )
        if tensor.is_inference():
            raise PartitionError(
                f"{name!r} was made under torch.inference_mode, so it cannot be trained. Build the model, or load its "
                "weights, outside of it."
            )
    for name, parameter in model.named_parameters():
        hooks = [parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)]
        if any(hooks):
            raise PartitionError(
                f"parameter {name!r} has a hook on its gradient, which would never be called, since gradients are not "
                "accumulated by autograd. Remove the hook; for scaling or clipping use param_groups=, "
                "clip_grad_norm= or clip_grad_value=."
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise PartitionError(
                f"{name or 'the model'!r} is compiled by torch.jit, so its Python code cannot be traced. Pass the "
                "module as it was before compilation."
            )


def check_outside(model: nn.Module, blocks: Mapping[str, nn.Module]) -> None:
    """Raise PartitionError for backward hooks of modules outside the repeated blocks, and of these themselves."""
    layers = {id(block): name for name, block in blocks.items()}
    within = {id(part) for block in blocks.values() for part in block.modules() if part is not block}
    for name, module in model.named_modules():
        if id(module) in within or not (module._backward_hooks or module._backward_pre_hooks):
            continue
        if id(module) in layers:
            raise PartitionError(
                f"{name!r} has a backward hook, and is one of the repeated layers itself. PyTorch calls such a hook "
                "around the layer, in the model's own code, of which only ops are traced, so it would be lost. Put it "
                "on a module within the layer, where hooks run with the layer's backward (for what the whole layer "
                "computes, wrap that in one module), or pass the model as a list of modules, with loss=."
            )
        raise PartitionError(
            f"{name or 'the model'!r} has a backward hook, and is not within one of the repeated layers. Only ops are "
            "traced there, so the hook would be lost. Put it on a module within a layer, or pass the model as a list "
            "of modules, with loss=."
        )


@contextmanager
def refusing() -> Iterator[Unseen]:
    """While open, raise PartitionError for custom gradients, tensor hooks and backwards outside of layers.

    For use around the trace of a whole model. Yields an `Unseen`, which collects other tensors that no op made.
    """
    plain = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        # The backward of a registered op (torch.library.custom_op) is not lost: the trace holds the op itself.
        registered = cls.__name__.startswith("GeneratedBackwardFor_")
        if registered or _inside_layer or threading.get_ident() != thread:
            return plain.__get__(None, cls)(*args, **kwargs)
        raise PartitionError(
            f"the model calls {cls.__name__}.apply, a custom gradient, outside of its repeated layers, where only ops "
            "are traced, so its backward would be lost. Move the call into one of the layers, or pass the model as a "
            "list of modules, with loss=."
        )

    thread = threading.get_ident()
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        with _TensorHooks() as hooks:
            yield hooks.unseen
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]


@contextmanager
def hooks_refused() -> Iterator[None]:
    """While open, raise PartitionError for tensor hooks and backwards that code makes itself."""
    with _TensorHooks():
        yield


_HOOKING: dict[Any, str] = {
    torch.Tensor.register_hook: "calls register_hook on a tensor",
    torch.Tensor.register_post_accumulate_grad_hook: "calls register_post_accumulate_grad_hook on a tensor",
    # register_multi_grad_hook reads it, as does code that hooks a node of the backward.
    torch.Tensor.grad_fn.__get__: "reads a tensor's grad_fn, on which it can have hooks,",  # type: ignore[union-attr]
}


_DATA_GET: Any = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_DATA_SET: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_DIFFERENTIATING: dict[Any, str] = {
    torch.autograd.grad: "torch.autograd.grad",
    torch.autograd.backward: "torch.autograd.backward",
    torch.Tensor.backward: "backward()",
}


class Unseen:
    """Tensors of a model that are not the result of an op in its trace.

    They are harmless unless an op uses them, so the error is raised only then (`why` is its message).
    """

    def __init__(self) -> None:
        self._data: list[torch.Tensor] = []

    def note(self, func: Any, args: Any, result: Any) -> None:
        """Collect the tensors of a call that reads or sets `.data`."""
        if func == _DATA_GET:
            self._data.append(result)
        elif func == _DATA_SET:
            self._data.append(args[0])

    def why(self, constant: torch.Tensor) -> str:
        """How the model obtained a tensor that no op of the trace made, and what to do instead."""
        if any(constant is tensor for tensor in self._data):
            return (
                "reads or sets .data outside of its repeated layers, where only ops are traced. Use x.detach() for "
                "a tensor without gradient."
            )
        return (
            f"reads a tensor of shape {tuple(constant.shape)} that one of its layers stored in an attribute (an "
            "auxiliary loss, for example). Only the outputs of layers are passed between them. Return the tensor."
        )


class _TensorHooks(TorchFunctionMode):
    """Raises PartitionError for hooks on tensors and for backwards outside of layers, and fills `unseen`."""

    def __init__(self) -> None:
        super().__init__()
        self.unseen = Unseen()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _HOOKING and not _inside_layer:
            raise PartitionError(
                f"the model {_HOOKING[func]} outside of its repeated layers, where only ops are traced, so the hook "
                "would be lost. Move it into one of the layers."
            )
        if func in _DIFFERENTIATING and not _inside_layer:
            raise PartitionError(
                f"the model calls {_DIFFERENTIATING[func]} outside of its repeated layers. No gradient flows through "
                "layers while the model is traced, so the result would differ from PyTorch's. Remove such a term (a "
                "gradient penalty, for example), or compute it within one layer."
            )
        result = func(*args, **(kwargs or {}))
        if not _inside_layer:
            self.unseen.note(func, args, result)
        return result


class _NoGradients(TorchFunctionMode):
    """Ignores hooks on tensors that require no gradient, as they would never be called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKING_FOR_GRADIENTS and not args[0].requires_grad:
            return _ASKING_FOR_GRADIENTS[func]()
        return func(*args, **(kwargs or {}))


_ASKING_FOR_GRADIENTS: dict[Any, Any] = {
    torch.Tensor.register_hook: lambda: RemovableHandle(OrderedDict()),
    torch.Tensor.retain_grad: lambda: None,
}
