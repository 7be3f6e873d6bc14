"""Parameters and buffers that code holds outside its module's own tables: in attributes, lists, closures, defaults.

A trace replaces a module's parameters by name. A parameter that code reaches in another way, or a view of one that was
made before, would be a constant in it, without a gradient and with old numbers. While a model is compiled, ops are
watched for such tensors, and each is replaced by what stands for its parameter. A parameter of another segment is
reported by `HeldElsewhere`, so that the segment takes it as its own. Nothing is traced here. Invariant: views that code
holds show their parameter's numbers also where the model is called outside of Relay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from relay.capture.memory_order import inverse, order_in_memory
from relay.errors import CaptureError, RelayError

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


class HeldElsewhere(RelayError):
    """A segment's code holds the tensor `name` of the model, which is not among the segment's own."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        super().__init__(f"it holds {name!r}")
        self.name = name
        self.tensor = tensor


@dataclass(frozen=True, eq=False)
class _Memory:
    """Where one of the model's tensors lies, or lay before the trainer moved it."""

    name: str
    tensor: torch.Tensor
    storage: StorageWeakRef
    first: int
    last: int
    dtype: torch.dtype
    contiguous: bool


@dataclass(frozen=True, eq=False)
class HeldView:
    """A tensor that code holds, and what it is of its `owner`: `start` elements from its first; None if it is all.

    `differentiable` is whether a gradient flows through the view to the owner.
    """

    tensor: torch.Tensor
    name: str
    owner: torch.Tensor
    start: int | None
    differentiable: bool = True

    def of(self, current: torch.Tensor) -> torch.Tensor:
        """The same view of what stands for the owner."""
        if self.start is None:
            return current
        order = order_in_memory(self.tensor)
        if order is None:
            strides = self.tensor.stride()
            view = current.reshape(-1)[self.start :].as_strided(self.tensor.shape, strides)
        else:
            sizes = [self.tensor.shape[dim] for dim in order]
            view = current.reshape(-1).narrow(0, self.start, self.tensor.numel()).view(sizes).permute(inverse(order))
        return view if self.differentiable else view.detach()


class HeldTensors:
    """The tensors of one model, and which of them code was found to hold by itself."""

    def __init__(self, model: Callable[[], nn.Module]) -> None:
        self._model = model
        self._memory: dict[int, list[_Memory]] = {}
        self._noted: dict[str, tuple[int, int]] = {}
        self._names: dict[int, str] = {}
        self._views: dict[int, HeldView] = {}
        self._unregistered: dict[int, str] = {}
        self.note()

    def note(self) -> None:
        """Learn where the model's tensors lie now. Where they lay before is known still."""
        model = self._model()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._names = {id(tensor): name for name, tensor in tensors}
        for name, tensor in tensors:
            if not _has_memory(tensor) or self._noted.get(name) == (id(tensor), tensor.data_ptr()):
                continue
            self._noted[name] = id(tensor), tensor.data_ptr()
            storage = StorageWeakRef(tensor.untyped_storage())
            first, last = _extent(tensor)
            memory = _Memory(name, tensor, storage, first, last, tensor.dtype, tensor.is_contiguous())
            self._memory.setdefault(storage.cdata, []).append(memory)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The model's name of a tensor, or None for one that the model had before it was edited."""
        return self._names.get(id(tensor))

    def view_of(self, tensor: torch.Tensor) -> HeldView | None:
        """What a tensor is of one of the model's; None if it is none of it.

        Raises CaptureError for a view that cannot follow its parameter.
        """
        known = self._views.get(id(tensor))
        if known is not None:
            return known
        if not _has_memory(tensor):
            return None
        first, last = _extent(tensor)
        for memory in reversed(self._memory.get(tensor.untyped_storage()._cdata, [])):
            if not memory.storage.expired() and memory.first <= first and last <= memory.last:
                break
        else:
            return None
        if tensor is memory.tensor:
            return HeldView(tensor, memory.name, memory.tensor, None)
        if tensor.dtype != memory.dtype or memory.tensor.dtype != memory.dtype or not memory.contiguous:
            raise CaptureError(
                f"the model holds a tensor of shape {tuple(tensor.shape)} that is a view of {memory.name!r} in another "
                "dtype or memory order, made before training, so it cannot follow when that is updated. Compute it in "
                "the forward.",
                layer=memory.name,
            )
        start = (first - memory.first) // tensor.element_size()
        view = HeldView(tensor, memory.name, memory.tensor, start, tensor.grad_fn is not None)
        self._views[id(tensor)] = view
        return view

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is known as a view of one of the model's."""
        return id(tensor) in self._views

    def views(self) -> list[torch.Tensor]:
        """The views of the model's tensors that code was found to hold."""
        return [view.tensor for view in self._views.values()]

    def follow(self) -> None:
        """Let all views that code holds show the numbers of their parameters, wherever these lie now."""
        for view in self._views.values():
            with torch.no_grad():
                now = view.of(view.owner.data)
                moved = view.tensor.data_ptr() != now.data_ptr()
                if moved and view.tensor.dtype == now.dtype:  # not where split master weights halve the parameter
                    view.tensor.data = now

    def check_constant(self, tensor: torch.Tensor, layer: str) -> None:
        """Raise CaptureError for a constant through which a gradient would flow; warn of one that could be trained."""
        sources = [self._names[id(leaf)] for leaf in leaves_of([tensor]) if id(leaf) in self._names]
        if sources:
            raise CaptureError(
                f"layer {layer!r} uses a tensor of shape {tuple(tensor.shape)} that was computed before, outside of "
                f"the forward, from the parameter {sources[0]!r}. No gradient would flow through it, and its numbers "
                "would be old. Compute it in the forward, or detach it.",
                layer=layer,
            )
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad and id(tensor) not in self._unregistered:
            self._unregistered[id(tensor)] = (
                f"layer {layer!r} uses a parameter of shape {tuple(tensor.shape)} that is not registered in the model. "
                "It stays as it is, since model.parameters() does not have it. Register it if it is to be trained."
            )

    def warn(self) -> None:
        """Warn once of each parameter that is used and cannot be trained."""
        for number, message in self._unregistered.items():
            if message:
                warnings.warn(message, stacklevel=6)
                self._unregistered[number] = ""


def leaves_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves to which gradients of these tensors flow."""
    stack: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    found = []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(variable := getattr(node, "variable", None), torch.Tensor):
            found.append(variable)
        stack += [following for following, _ in node.next_functions]
    return found


_watched: list[HeldTensors] = []
"""The tensors of the model that is being compiled, the innermost last. Compiling holds a lock."""


@contextmanager
def watching(held: HeldTensors) -> Iterator[None]:
    """While open, traces look for tensors of that model which code holds by itself."""
    held.note()
    _watched.append(held)
    try:
        yield
    finally:
        _watched.pop()
    held.warn()


def is_held(tensor: torch.Tensor) -> bool:
    """Whether a tensor is known as a view of one of the watched model's."""
    return bool(_watched) and _watched[-1].holds(tensor)


class Replacing(TorchFunctionMode):
    """Replaces tensors that code holds by what stands for them, in all ops of a module. `used` are those it found.

    `current` are what stands for the tensors `originals`. Without `held`, only the views in `used` are replaced.
    """

    def __init__(
        self,
        originals: Sequence[torch.Tensor],
        current: Sequence[torch.Tensor],
        layer: str,
        held: HeldTensors | None,
        used: Mapping[int, HeldView] | None = None,
        constants: bool = True,
        elsewhere: bool = True,
    ) -> None:
        super().__init__()
        self._current = {id(original): now for original, now in zip(originals, current, strict=True)}
        self._standing = {id(now) for now in current}
        self._layer = layer
        self._held = held
        self._constants = constants
        self._elsewhere = elsewhere
        self.used: dict[int, HeldView] = dict(used or {})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # other modes watch what code asks of its tensors
            found = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if self._replaces(leaf)}
        if found:
            args, kwargs = pytree.tree_map(lambda leaf: self._of(leaf) if id(leaf) in found else leaf, (args, kwargs))
        return func(*args, **kwargs)

    def _replaces(self, leaf: Any) -> bool:
        if type(leaf) not in _PLAIN or id(leaf) in self._standing:
            return False
        if id(leaf) in self.used:
            return True
        if self._held is None or not _has_memory(leaf):
            return False
        view = self._held.view_of(leaf)
        if view is None:
            if self._constants:
                self._held.check_constant(leaf, self._layer)
            return False
        if id(view.owner) not in self._current:
            name = self._held.name_of(view.owner)
            if name is None or not self._elsewhere:
                return False
            raise HeldElsewhere(name, view.owner)
        self.used[id(leaf)] = view
        return True

    def _of(self, leaf: torch.Tensor) -> torch.Tensor:
        view = self.used[id(leaf)]
        return view.of(self._current[id(view.owner)])


def replacing(
    originals: Sequence[torch.Tensor],
    current: Sequence[torch.Tensor],
    layer: str,
    constants: bool = True,
    elsewhere: bool = True,
) -> Any:
    """A mode that replaces what code holds of the watched model; without effect where no model is watched.

    With `constants`, tensors that are none of the model's are checked: not where ops run on real tensors. With
    `elsewhere`, a tensor of the model that is not among `originals` raises HeldElsewhere.
    """
    if not _watched:
        return nullcontext()
    return Replacing(originals, current, layer, _watched[-1], constants=constants, elsewhere=elsewhere)


def _has_memory(tensor: torch.Tensor) -> bool:
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not wrapped and tensor.numel() > 0 and tensor.untyped_storage().nbytes() > 0


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and behind its last."""
    last = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + last * tensor.element_size()
