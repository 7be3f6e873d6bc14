"""Regions of host memory: where tensors lie in them, what a slot is sent of them, and the host memory of the gradients.

A region is a flat tensor of bytes with several tensors in it, so that a layer crosses the link in few pieces. The
regions of weights are planned here; `relay.eps.store` allocates and fills them. Invariant: a gradient has the same
memory, whichever layers share its slot.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from hal.host import Host
from hal.slot.layout import Field, SlotContent, aligned, lay_out
from relay.eps.split_weights import remainder_bytes

WEIGHTS = "weights"
ROUNDED = "rounded weights"
BUFFERS = "buffers"
GRADIENTS = "gradients"

CONTENTS = 1024
"""How many slot contents are cached at least. Steps with other layers each time would make new ones without end."""

Wanted = tuple[str, torch.dtype]
"""A parameter or buffer, and the dtype in which the device takes it."""


@dataclass(frozen=True)
class GradientField:
    """A gradient that a segment computes: its parameter, its dtype, and which use of a tied parameter it is from.

    `use` counts the segments of a pass that have a gradient for it, in forward order.
    """

    name: str
    dtype: torch.dtype
    use: int = 0


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor and its memory: `offset` bytes into `flat` (a tensor of bytes)."""

    tensor: torch.Tensor
    flat: torch.Tensor
    offset: int


@dataclass(frozen=True)
class PlannedRegion:
    """A region of weights or buffers of one dtype: their names, where each lies, and what the region is counted as.

    `crosses` is set where the device takes the tensors as they lie here. With split masters `remainder` is the size of
    their other halves, which lie elsewhere.
    """

    names: list[str]
    fields: tuple[Field, ...]
    size: int
    dtype: torch.dtype
    state: str
    crosses: bool
    remainder: int


def plan_regions(
    tensors: Mapping[str, torch.Tensor],
    groups: Sequence[Sequence[Wanted]],
    here: Collection[Wanted],
    halved: Collection[str],
) -> list[PlannedRegion]:
    """The regions for a model's tensors: for each group those that are not `here`, then the rest, each by itself.

    `halved` are the parameters whose masters are split.
    """
    rest = [[(name, tensor.dtype)] for name, tensor in tensors.items()]
    crossing = {item for group in groups for item in group}  # the master of a rounded weight does not cross
    plans: list[PlannedRegion] = []
    planned = set(here)
    for group in [*groups, *rest]:
        own = [(name, tensors[name].dtype) for name, _ in group if name not in halved]
        for wanted in (own, [item for item in group if item[0] not in halved or item[1] is torch.bfloat16]):
            fresh = [item for item in dict.fromkeys(wanted) if item not in planned]
            planned.update(fresh)
            for state in (WEIGHTS, ROUNDED, BUFFERS):
                of_state = [item for item in fresh if _state_of(item, tensors[item[0]], halved) == state]
                for dtype, crosses in dict.fromkeys((item[1], item in crossing) for item in of_state):
                    names = [item[0] for item in of_state if (item[1], item in crossing) == (dtype, crosses)]
                    fields, size = lay_out([(tuple(tensors[name].shape), dtype) for name in names])
                    counts = [tensors[name].numel() for name in names]
                    remainder = remainder_bytes(counts) if names[0] in halved else 0
                    plans.append(PlannedRegion(names, fields, size, dtype, state, crosses, remainder))
    return plans


def _state_of(wanted: Wanted, tensor: torch.Tensor, halved: Collection[str]) -> str:
    if not isinstance(tensor, nn.Parameter):
        return BUFFERS
    return WEIGHTS if wanted[1] == tensor.dtype or wanted[0] in halved else ROUNDED


class GradientMemory:
    """The host memory of gradients that wait there until all have arrived."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._stored: dict[GradientField, Stored] = {}
        self._flats: list[torch.Tensor] = []

    def of(self, gradients: Sequence[GradientField], shape: Callable[[str], Sequence[int]]) -> list[Stored]:
        """The memory of these gradients. Those that have none yet get it, side by side."""
        fresh = [one for one in gradients if one not in self._stored]
        fields, size = lay_out([(tuple(shape(one.name)), one.dtype) for one in fresh])
        if fresh:
            flat = self._host.alloc(size, torch.uint8, GRADIENTS, crosses=True)
            self._flats.append(flat)
            for gradient, field in zip(fresh, fields, strict=True):
                tensor = flat[field.offset : field.offset + field.size].view(field.dtype).view(field.shape)
                self._stored[gradient] = Stored(tensor, flat, field.offset)
        return [self._stored[one] for one in gradients]

    def kept(self, gradients: Sequence[GradientField], shape: Callable[[str], Sequence[int]]) -> list[Stored]:
        """Memory for copies of gradients, in these dtypes. Nothing is sent to it, so it is not page-locked."""
        fresh = [one for one in gradients if one not in self._stored]
        for dtype in dict.fromkeys(one.dtype for one in fresh):
            own = [one for one in fresh if one.dtype is dtype]
            fields, size = lay_out([(tuple(shape(one.name)), dtype) for one in own])
            flat = self._host.alloc(size // dtype.itemsize, dtype, GRADIENTS)
            self._flats.append(flat)
            raw = flat.view(torch.uint8)
            for gradient, field in zip(own, fields, strict=True):
                tensor = raw[field.offset : field.offset + field.size].view(dtype).view(field.shape)
                self._stored[gradient] = Stored(tensor, raw, field.offset)
        return [self._stored[one] for one in gradients]

    def homes(
        self,
        gradients: Sequence[GradientField],
        shape: Callable[[str], Sequence[int]],
        narrow: Sequence[torch.dtype | None],
    ) -> tuple[list[Stored], list[Stored]]:
        """The memory that gradients are sent to, or that copies of them are kept in where some are stored narrower."""
        if not any(narrow):
            return self.of(gradients, shape), []
        dtypes = [dtype or one.dtype for one, dtype in zip(gradients, narrow, strict=True)]
        return [], self.kept([replace(one, dtype=dtype) for one, dtype in zip(gradients, dtypes, strict=True)], shape)

    def beyond(self, other: GradientMemory) -> int:
        """Bytes of gradients here for which another has no memory."""
        return sum(extent(home.tensor) for one, home in self._stored.items() if one not in other._stored)

    def free(self) -> None:
        """Free the memory of all gradients."""
        for flat in self._flats:
            self._host.free(flat, GRADIENTS)
        self._flats.clear()
        self._stored.clear()


def extent(tensor: torch.Tensor) -> int:
    """Bytes that a tensor takes in a region, including the padding up to the next tensor."""
    return aligned(tensor.numel() * tensor.dtype.itemsize)


def as_they_lie(stored: Sequence[Stored], fields: Sequence[Field]) -> tuple[tuple[int, torch.Tensor], ...]:
    """The same memory in as few contiguous pieces (of bytes) as possible, each with its offset among the fields."""
    pieces: list[tuple[int, torch.Tensor]] = []
    start = end = 0
    for number, (one, field) in enumerate(zip(stored, fields, strict=True)):
        if not number or one.flat is not stored[number - 1].flat or one.offset != end:
            start = one.offset
            pieces.append((field.offset, one.flat[start:start]))
        end = one.offset + extent(one.tensor)
        pieces[-1] = (pieces[-1][0], one.flat[start:end])
    return tuple(pieces)


def lay_out_content(
    name: str,
    stored: Sequence[Stored],
    gradients: Sequence[GradientField],
    shape: Callable[[str], tuple[int, ...]],
    homes: Sequence[Stored],
    kept: Sequence[Stored],
) -> SlotContent:
    """What a slot holds for these tensors and gradients, in as few contiguous pieces as possible.

    `homes` is the host memory that the gradients are sent to, if each has its own, and `kept` that of their copies.
    """
    fields, size = lay_out([(tuple(one.tensor.shape), one.tensor.dtype) for one in stored])
    gradient_fields, gradient_size = lay_out([(shape(one.name), one.dtype) for one in gradients])
    return SlotContent(
        name,
        fields,
        size,
        as_they_lie(stored, fields),
        tuple(one.tensor for one in stored),
        gradient_fields,
        gradient_size,
        as_they_lie(homes, gradient_fields if homes else ()),
        tuple(home.tensor for home in homes),
        tuple(one.tensor for one in kept),
    )


class SlotContents:
    """The contents of slots that have been laid out, each with the names of its tensors."""

    def __init__(self) -> None:
        self._contents: dict[tuple[object, ...], SlotContent] = {}
        self._names: weakref.WeakKeyDictionary[SlotContent, tuple[str, ...]] = weakref.WeakKeyDictionary()

    def find(
        self, key: tuple[object, ...], names: Iterable[str], most: int, make: Callable[[], SlotContent]
    ) -> SlotContent:
        """The content under a key, made now if it is new, of the tensors `names`.

        Beyond `most` and `CONTENTS` the least recently used is dropped.
        """
        content = self._contents.pop(key, None)
        if content is None:
            content = make()
            self._names[content] = tuple(names)
        self._contents[key] = content  # moved to the end
        while len(self._contents) > max(CONTENTS, most):
            del self._contents[next(iter(self._contents))]
        return content

    def names_of(self, content: SlotContent) -> tuple[str, ...]:
        """The tensors that a content is made of."""
        return self._names[content]

    def clear(self) -> None:
        """Drop all contents."""
        self._contents.clear()
        self._names.clear()
