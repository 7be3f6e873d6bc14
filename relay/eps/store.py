"""The layer store: every parameter and buffer of the model, in host memory, laid out for the relay.

Each segment's parameters lie in one contiguous region (one for each dtype), so that a layer is one transfer. A
parameter that several segments use lies with the first of them. The store takes the model's tensors over: the
module's parameters become views of the store, so a model is never held twice and always shows the current weights.

Invariant: a name has one place for as long as the store lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hal.event import Event
from hal.host import Host
from hal.slot import ALIGNMENT, Field, SlotContent, lay_out

WEIGHTS = "weights"
BUFFERS = "buffers"


@dataclass(frozen=True, eq=False)
class _Stored:
    """Where a tensor lies: `offset` bytes into `flat` (a tensor of bytes)."""

    tensor: torch.Tensor
    flat: torch.Tensor
    offset: int


class LayerStore:
    """Parameters and buffers by the model's own names."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._stored: dict[str, _Stored] = {}
        self._contents: dict[tuple[str, ...], SlotContent] = {}
        self._names_of: dict[SlotContent, tuple[str, ...]] = {}
        self.updated: dict[str, Event] = {}
        self.version = 0

    def take_over(self, model: nn.Module, groups: Iterable[Sequence[str]]) -> None:
        """Move a model's tensors in, one group of names (a segment's) after another; names already here are passed.

        Tensors that no group names come last, each for itself. Raises OutOfMemory before anything has moved.
        """
        tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        remaining = set(tensors) - set(self._stored)
        plans: list[tuple[list[str], tuple[Field, ...], int, torch.dtype, str]] = []
        rest = [[name] for name in tensors]
        for group in [*groups, *rest]:
            names = [name for name in group if name in remaining]
            remaining.difference_update(names)
            for state in (WEIGHTS, BUFFERS):
                of_state = [name for name in names if isinstance(tensors[name], nn.Parameter) == (state == WEIGHTS)]
                for dtype in dict.fromkeys(tensors[name].dtype for name in of_state):
                    members = [name for name in of_state if tensors[name].dtype == dtype]
                    fields, size = lay_out([(tuple(tensors[name].shape), dtype) for name in members])
                    plans.append((members, fields, size, dtype, state))
        flats = [self._host.alloc(size // dtype.itemsize, dtype, state) for _, _, size, dtype, state in plans]
        for (members, fields, _, dtype, _), flat in zip(plans, flats, strict=True):
            raw = flat.view(torch.uint8)
            for name, place in zip(members, fields, strict=True):
                tensor = tensors[name]
                count = tensor.numel() * dtype.itemsize
                home = raw[place.offset : place.offset + count].view(dtype).view(place.shape)
                with torch.no_grad():
                    home.copy_(tensor)
                    tensor.data = home  # the original memory goes as soon as its own module lets go of it
                self._stored[name] = _Stored(home, raw, place.offset)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._stored[name].tensor

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def content(self, name: str, tensors: Sequence[str], gradients: Sequence[str]) -> SlotContent:
        """What a slot needs to hold these tensors and the gradients of some: as few contiguous pieces as they have."""
        key = (name, *tensors, "", *gradients)
        content = self._contents.get(key)
        if content is None:
            content = self._contents[key] = self._lay_out_content(name, tensors, gradients)
            self._names_of[content] = tuple(tensors)
        return content

    def ready_content(self, content: SlotContent) -> list[Event]:
        """The updates that must have ended before a content is sent."""
        events = [self.updated[name] for name in self._names_of[content] if name in self.updated]
        return list(dict.fromkeys(events))

    def _lay_out_content(self, name: str, tensors: Sequence[str], gradients: Sequence[str]) -> SlotContent:
        pieces: list[tuple[int, torch.Tensor]] = []
        fields: list[Field] = []
        size = 0
        run_flat: torch.Tensor | None = None
        run_start = run_end = run_base = 0
        for tensor_name in tensors:
            stored = self._stored[tensor_name]
            extent = -(-stored.tensor.numel() * stored.tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT
            if stored.flat is not run_flat or stored.offset != run_end:
                run_flat, run_start, run_base = stored.flat, stored.offset, size
                pieces.append((run_base, stored.flat[run_start:run_start]))
            run_end = stored.offset + extent
            pieces[-1] = (run_base, stored.flat[run_start:run_end])
            fields.append(
                Field(run_base + stored.offset - run_start, tuple(stored.tensor.shape), stored.tensor.dtype)
            )
            size = run_base + run_end - run_start
        shapes = [(tuple(self[gradient].shape), self[gradient].dtype) for gradient in gradients]
        gradient_fields, gradient_size = lay_out(shapes)
        return SlotContent(
            name,
            tuple(fields),
            size,
            tuple(pieces),
            tuple(self[tensor_name] for tensor_name in tensors),
            gradient_fields,
            gradient_size,
        )
