"""Tensors of a model that share memory without being one tensor: which follow another, and which are refused.

Tied weights are one parameter under two names, and are no concern of this module. Here two tensors lie in one memory:
a buffer that is a view of a parameter, as made by `detach()`, follows it, since the store lets it view the parameter's
new memory. Two parameters over one memory are refused: plain PyTorch would update that memory twice a step, and no
optimizer is meant to. It moves nothing. Invariant: of tensors that share memory none is taken over as if it were alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from relay.errors import PartitionError


@dataclass(frozen=True)
class Alias:
    """A buffer that views another tensor: from its element `start` on, contiguous."""

    owner: str
    start: int


def find_aliases(model: nn.Module) -> dict[str, Alias]:
    """The buffers that view a parameter or an earlier buffer. Raises PartitionError for what cannot be trained."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, parameter in parameters.items():
        if parameter.requires_grad and _overlaps_itself(parameter):
            raise PartitionError(
                f"Several elements of the parameter {name!r} of shape {tuple(parameter.shape)} lie in one place of "
                f"memory (its strides are {parameter.stride()}; expand() makes such tensors), so an update would "
                f"change them together. Give it memory of its own: {path(name)} = nn.Parameter({path(name)}.detach()"
                ".clone()); or make a smaller parameter, and expand it in the forward."
            )
    aliases: dict[str, Alias] = {}
    before: list[tuple[str, torch.Tensor]] = []
    for name, tensor in sorted([*parameters.items(), *buffers.items()], key=lambda item: item[1].data_ptr()):
        if not _has_memory(tensor):
            continue
        before = [one for one in before if _end(one[1]) > tensor.data_ptr()]
        for other_name, other in before:
            if _share_elements(tensor, other):
                _judge((other_name, other), (name, tensor), aliases)
        before.append((name, tensor))
    return aliases


def path(name: str) -> str:
    """A tensor's name as Python code that reaches it from `model`, or from the list `modules`."""
    parts = name.split(".")
    root = "modules" if parts[0].isdigit() else "model"
    return root + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts)


def _judge(first: tuple[str, torch.Tensor], second: tuple[str, torch.Tensor], aliases: dict[str, Alias]) -> None:
    """Two tensors that share elements: note the one that follows, or raise PartitionError."""
    trained = [isinstance(tensor, nn.Parameter) for _, tensor in (first, second)]
    if all(trained):
        if first[1].requires_grad or second[1].requires_grad:
            raise _shared_parameters(first, second)
        return  # nothing writes to either
    (owner, owned), (name, buffer) = (second, first) if trained[1] else (first, second)
    start = (buffer.data_ptr() - owned.data_ptr()) // owned.element_size()
    inside = start >= 0 and start + buffer.numel() <= owned.numel()
    if not (inside and buffer.dtype == owned.dtype and buffer.is_contiguous() and owned.is_contiguous()):
        if not any(trained):
            return  # two buffers that overlap in part; each has its own numbers until one is written to
        raise PartitionError(
            f"The buffer {name!r} shares memory with the parameter {owner!r}, but is no contiguous part of it, so it "
            f"cannot follow when the parameter is updated. Compute it in the forward, from {path(owner)}.detach(); or "
            f"give it memory of its own: {path(name)} = {path(name)}.clone()."
        )
    if any(trained) or name not in aliases:
        aliases[name] = Alias(owner, start)


def _shared_parameters(first: tuple[str, torch.Tensor], second: tuple[str, torch.Tensor]) -> PartitionError:
    (name, one), (other_name, other) = first, second
    whole = one.shape == other.shape and one.stride() == other.stride() and one.data_ptr() == other.data_ptr()
    way = (
        f"Tie them as one parameter: {path(other_name)} = {path(name)}"
        if whole
        else f"Give one memory of its own, {path(other_name)} = nn.Parameter({path(other_name)}.detach().clone()), or "
        f"take the part out of {path(name)} in the forward"
    )
    return PartitionError(
        f"The parameters {name!r} and {other_name!r} are two tensors over one memory (made with .data, or as a view), "
        f"so each step would update that memory twice. {way}."
    )


def _has_memory(tensor: torch.Tensor) -> bool:
    ordinary = tensor.layout is torch.strided and not tensor.is_meta
    return ordinary and tensor.numel() > 0 and tensor.data_ptr() != 0


def _extent(tensor: torch.Tensor) -> int:
    """From a tensor's first element to behind its last, in elements."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _end(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + _extent(tensor) * tensor.element_size()


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements lie in one place. Dimensions that are nested in memory, as nearly all are, do not."""
    if not _has_memory(tensor):
        return False
    covered = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride < covered:
            return bool(_marks(tensor, tensor.data_ptr(), _extent(tensor)).max() > 1)
        covered += (size - 1) * stride
    return False


def _share_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors whose memory begins in one range have an element in common."""
    if first.element_size() != second.element_size():
        return True
    if first.is_contiguous() or second.is_contiguous():
        return True  # one has no gaps in which the other could lie
    start = min(first.data_ptr(), second.data_ptr())
    size = (max(_end(first), _end(second)) - start) // first.element_size()
    return bool((_marks(first, start, size).bool() & _marks(second, start, size).bool()).any())


def _marks(tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """How many elements of a tensor lie at each of `size` places in memory, counted from the address `start`."""
    marks = torch.zeros(size, dtype=torch.int64)
    places = torch.arange(size).as_strided(
        tensor.shape, tensor.stride(), (tensor.data_ptr() - start) // tensor.element_size()
    )
    return marks.index_add_(0, places.reshape(-1), torch.ones(tensor.numel(), dtype=torch.int64))
