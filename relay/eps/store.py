"""The layer store: every parameter and buffer of the model, in host memory, laid out for transfers.

Each segment's parameters are in one contiguous region (one for each dtype), so that a layer is one transfer. A
parameter that several segments use is in the region of the first. If the device computes in a lower precision, the
master weights stay here in their own dtype, and the store has a rounded copy of those that the device takes rounded;
only the copy crosses the link. With split masters there is no copy: such a parameter is the rounded weight and a
remainder (`relay.eps.split_weights`).

The store takes over the model's tensors: the module's parameters become views of the store, so a model is never held
twice and always shows the current weights. Invariant: a name has the same memory for as long as the store lives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hal.event import Event
from hal.host import Host
from hal.page_lock import give_back_free_memory
from hal.slot.layout import SlotContent, lay_out
from relay.eps.aliases import Alias, find_aliases
from relay.eps.regions import (
    ROUNDED,
    GradientField,
    GradientMemory,
    SlotContents,
    Stored,
    Wanted,
    lay_out_content,
    plan_regions,
)
from relay.eps.rows import ROWS, TableRows
from relay.eps.split_weights import REMAINDERS, SplitWeights, shown_as_float32, to_be_split
from relay.errors import ModelChanged
from relay.optim.split_master import SplitMaster

logger = logging.getLogger("relay")

TRIM_EVERY = 16 << 20
"""After so many bytes have moved in, freed memory is returned to the system."""


class LayerStore:
    """Parameters and buffers by the model's own names. With `splits`, masters are split where they can be.

    `part` is that of `SplitWeights`.
    """

    def __init__(self, host: Host, splits: bool = False, part: Callable[[str], tuple[int, int]] | None = None) -> None:
        self._host = host
        self.splits = splits
        self.split = SplitWeights(part)
        self._stored: dict[Wanted, Stored] = {}
        self._master: dict[str, torch.dtype] = {}
        self._copies: dict[str, list[torch.Tensor]] = {}
        self._contents = SlotContents()
        self._rows: dict[Wanted, Stored] = {}
        self.gradients = GradientMemory(host)
        self._seen: dict[str, tuple[torch.Tensor, int]] = {}
        self._regions: list[tuple[torch.Tensor, str]] = []
        self._complete = False
        self.aliases: dict[str, Alias] = {}
        self._adopted: dict[str, tuple[torch.Tensor, torch.dtype]] = {}
        self.updated: dict[str, Event] = {}
        self.version = 0
        self._changes: dict[str, int] = {}
        self._change = 0
        self.moved: Callable[[], None] = lambda: None  # called after the model's tensors have moved
        self.before_reading: Callable[[Sequence[str]], None] = lambda names: None  # called by `updates_of`

    def take_over(self, model: nn.Module, groups: Iterable[Sequence[Wanted]]) -> None:
        """Move a model's tensors in, one group (a segment's) after another. Tensors that are here already are skipped.

        Tensors that no group names come last, each by itself. The memory of a tensor is freed as it moves, so the host
        holds one region more at most than the store will. Raises OutOfMemory before anything has moved where the host's
        capacity is too small; where the system refuses a region, the next call continues.
        """
        tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        groups = [list(group) for group in groups]
        unfit = {*self._master, *(alias.owner for alias in self.aliases.values())}
        halved = to_be_split(tensors, groups, unfit) if self.splits else set()
        planned = {*self._stored, *((name, tensors[name].dtype) for name in self.aliases)}
        plans = plan_regions(tensors, groups, planned, halved)
        self._host.require(sum(plan.size + plan.remainder for plan in plans), "the model")
        moved = 0
        # One region is allocated and filled after the other.
        for plan in plans:
            names, fields, dtype, state = plan.names, plan.fields, plan.dtype, plan.state
            flat = self._host.alloc(plan.size // dtype.itemsize, dtype, state, crosses=plan.crosses)
            self._regions.append((flat, state))
            raw = flat.view(torch.uint8)
            moved += raw.numel()
            if moved >= TRIM_EVERY:
                give_back_free_memory()
                moved = 0
            homes = [raw[field.offset : field.offset + field.size].view(dtype).view(field.shape) for field in fields]
            if plan.remainder:
                remainder = self.split.take(names, homes, lambda size: self._host.alloc(size, torch.uint8, REMAINDERS))
                self._regions.append((remainder, REMAINDERS))
            for name, field, home in zip(names, fields, homes, strict=True):
                tensor = tensors[name]
                with torch.no_grad():
                    if plan.remainder:
                        self.split.assign(name, tensor)
                        if name in self._adopted:
                            self._adopted[name] = (tensor, torch.bfloat16)
                    else:
                        home.copy_(self.read(name) if name in self.split else tensor)
                    if state != ROUNDED:
                        self._master[name] = dtype
                        tensor.data = home  # the original memory goes as soon as its module lets go of it
                        self._seen[name] = (tensor, tensor._version)
                    else:
                        self._copies.setdefault(name, []).append(home)
                self._stored[(name, dtype)] = Stored(home, raw, field.offset)
        for name in self.aliases:
            self._view_owner(name, tensors[name])
        if halved and self._adopted and len(self.split) == len(halved):  # the first time
            logger.warning(
                "master_weights='split': %d of the model's parameters are bfloat16 while this trainer holds them (the "
                "other half of each is the trainer's). trainer.state_dict(), sync_to and checkpoints give float32, and "
                "close() gives float32 back to the model.",
                len(halved),
            )
        self._complete = True
        self.moved()

    def _view_owner(self, name: str, tensor: torch.Tensor) -> None:
        """Let a buffer that views another tensor view that one's memory here."""
        alias = self.aliases[name]
        wanted = (alias.owner, tensor.dtype)
        if (name, tensor.dtype) in self._stored or wanted not in self._stored:
            return
        owner = self._stored[wanted]
        home = owner.tensor.view(-1)[alias.start : alias.start + tensor.numel()].view(tensor.shape)
        self._stored[(name, tensor.dtype)] = Stored(
            home, owner.flat, owner.offset + alias.start * tensor.element_size()
        )
        self._master[name] = tensor.dtype
        tensor.data = home
        self._seen[name] = (tensor, tensor._version)

    def owner(self, name: str) -> str:
        """The tensor whose memory a name's is: its own, or that of the one that it views."""
        while name in self.aliases:
            name = self.aliases[name].owner
        return name

    def find_aliases(self, model: nn.Module) -> None:
        """Learn which of the model's tensors share memory. Raises PartitionError; nothing has moved then."""
        if not self._complete:
            self.aliases = find_aliases(model)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The master weight (or buffer) of that name; the bfloat16 half of one that is split."""
        return self._stored[(name, self._master[name])].tensor

    def master(self, name: str) -> torch.Tensor | SplitMaster:
        """The master weight of that name, to be updated in place."""
        return self.split[name] if name in self.split else self[name]

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a parameter is trained: float32 where its master is split."""
        return torch.float32 if name in self.split else self._master[name]

    def dtype_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """The dtype in which a parameter of the model is trained, whether it has been taken over or not."""
        return torch.float32 if name in self.split else tensor.dtype

    def read(self, name: str) -> torch.Tensor:
        """A master weight (or buffer) in its own dtype: the memory itself, or new memory where it is split."""
        return self.split[name].to_float() if name in self.split else self[name]

    def read_from(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The same for a tensor of the model that may not have been taken over yet."""
        return self.read(name) if name in self.split else tensor.detach()

    def write(self, name: str, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Set a tensor of the model, whether it has been taken over or not, and its copies for the device."""
        with torch.no_grad():
            if name not in self.split:
                tensor.copy_(values)  # the next pass notices it as an edit, and rounds anew
                return
            self.updated_from(name, values)
            self.changed([name])

    def updated_from(self, name: str, updated: torch.Tensor) -> None:
        """Take in an update of what `read` returned, and write the copies of the master weight anew."""
        if name in self.split:
            self.split.assign(name, updated)
        self.round(name)

    def round(self, name: str) -> None:
        """Write the copies of a master weight in other dtypes anew."""
        for copy in self.rounded(name):
            copy.copy_(self.read(name))

    def as_traced(self) -> AbstractContextManager[None]:
        """A context in which split parameters of the model are float32, as which programs take their gradients."""
        return shown_as_float32(self.split_tensors())

    def split_tensors(self) -> list[torch.Tensor]:
        """The parameters of the model whose masters are split."""
        return [self._seen[name][0] for name in self.split]

    def holds(self, wanted: Wanted) -> bool:
        """Whether a name is here in that dtype."""
        return wanted in self._stored or wanted in self._rows

    def add_rows(self, rows: TableRows) -> torch.Tensor:
        """The memory from which rows of a table are sent, under a name of its own (`TableRows.key`)."""
        wanted = (rows.key, rows.dtype)
        if wanted not in self._rows:
            shape = (rows.count, *self[rows.name].shape[1:])
            fields, size = lay_out([(shape, rows.dtype)])
            flat = self._host.alloc(size, torch.uint8, ROWS, crosses=True)
            self._rows[wanted] = Stored(flat[: fields[0].size].view(rows.dtype).view(shape), flat, 0)
        return self._rows[wanted].tensor

    def rounded(self, name: str) -> list[torch.Tensor]:
        """The copies of a master weight in other dtypes, to be written whenever it changes; see `round`."""
        return self._copies.get(name, [])

    def adopt(self, model: nn.Module) -> None:
        """Note the model's parameters, which `take_over` will move in: from now on `check` expects them."""
        self._adopted = {name: (parameter, parameter.dtype) for name, parameter in model.named_parameters()}

    def check(self, model: nn.Module) -> None:
        """Raise ModelChanged if the model's tensors are not those that were adopted and taken over."""
        now: dict[str, torch.Tensor] = dict(model.named_parameters())
        if self._adopted:
            for name in now:
                if name not in self._adopted:
                    raise ModelChanged(name, added=True)
        for name, (tensor, dtype) in self._adopted.items():
            if now.get(name) is not tensor or tensor.dtype != dtype:
                raise ModelChanged(name)
        if not self._seen:
            return
        now.update(model.named_buffers())
        for name, (tensor, _) in self._seen.items():
            home = self[name]
            if now.get(name) is not tensor or tensor.data_ptr() != home.data_ptr() or tensor.dtype != home.dtype:
                raise ModelChanged(name)

    def take_edits(self) -> None:
        """Round again the weights that were written through the model since the last call."""
        edited = {self.owner(name) for name, (tensor, version) in self._seen.items() if tensor._version != version}
        self.changed(edited)
        for name in edited & set(self.split):
            logger.warning(
                "%r was written through the model, in which it is bfloat16: its master weight is that bfloat16 now. "
                "master_weights='fp32' keeps such writes in float32.",
                name,
            )
            self.split[name].forget_remainder()
        for (name, dtype), stored in self._stored.items():
            if dtype != self._master[name] and name in edited:
                with torch.no_grad():
                    stored.tensor.copy_(self.read(name))
        for name, (tensor, _) in self._seen.items():
            self._seen[name] = (tensor, tensor._version)

    def changed(self, names: Iterable[str]) -> None:
        """Note that these tensors change, so that copies on the device are old."""
        self._change += 1
        self._changes.update((self.owner(name), self._change) for name in names)

    def versions(self, content: SlotContent) -> tuple[int, ...]:
        """A number for each tensor of a content. It differs from an earlier one if the tensor was changed since.

        Writes through a tensor's `.data` are not noticed.
        """
        return tuple(self._changes.get(name, 0) for name in self._contents.names_of(content))

    def rename(self, names: Mapping[str, str | None]) -> None:
        """Rename tensors, and remove those whose new name is None, with their memory.

        A tensor that is removed gets memory of its own, so that its module stays usable. Nothing may be running.
        """
        for old, new in names.items():
            if new is None and old in self._seen:
                tensor = self._seen[old][0]
                tensor.data = self.read(old) if old in self.split else tensor.data.clone()

        def renamed(table: dict[Any, Any], new_key: Callable[[Any], Any]) -> dict[Any, Any]:
            moved = ((new_key(key), value) for key, value in table.items())
            return {key: value for key, value in moved if key is not None}

        def new_name(name: str) -> str | None:
            return names.get(name, name)

        def new_wanted(wanted: Wanted) -> Wanted | None:
            name = new_name(wanted[0])
            return None if name is None else (name, wanted[1])

        self.aliases.clear()
        self._complete = False  # layers that were put in have parameters that are new here
        self._stored = renamed(self._stored, new_wanted)
        self._master = renamed(self._master, new_name)
        self._seen = renamed(self._seen, new_name)
        self._copies = renamed(self._copies, new_name)
        self.split.rename(names)
        self.updated.clear()
        self._contents.clear()
        self.gradients.free()
        self._free_rows()
        living = {stored.flat.data_ptr() for stored in self._stored.values()} | self.split.regions()
        for flat, state in self._regions:
            if flat.data_ptr() not in living:
                self._host.free(flat, state)
        self._regions = [(flat, state) for flat, state in self._regions if flat.data_ptr() in living]

    def give_back(self) -> None:
        """Give the model's tensors memory of their own, one region after another, and free the store's.

        Nothing may be running. The host holds one region more at most. Tensors that the store does not hold any more
        stay as they are.
        """
        self.updated.clear()
        self._contents.clear()
        self.gradients.free()
        self._free_rows()
        homes = {name: self._stored.pop((name, dtype)) for name, dtype in self._master.items()}
        self._stored.clear()
        self._copies.clear()
        self._regions.reverse()  # popped from the end
        while self._regions:
            flat, state = self._regions.pop()
            here = [name for name, home in homes.items() if home.flat.data_ptr() == flat.data_ptr()]
            given: dict[str, torch.Tensor] = {}
            for name in sorted(here, key=self.aliases.__contains__):  # owners before those that view them
                tensor, home = self._seen.pop(name)[0], homes.pop(name).tensor
                if tensor.data_ptr() == home.data_ptr() and tensor.dtype == home.dtype:
                    alias = self.aliases.get(name)
                    owner = None if alias is None else given.get(alias.owner)
                    if name in self.split:
                        tensor.data = self.split.whole(name)
                    elif alias is None or owner is None:
                        tensor.data = home.clone()
                    else:
                        tensor.data = owner.view(-1)[alias.start : alias.start + home.numel()].view(home.shape)
                    given[name] = tensor.data
            self._host.free(flat, state)
        self._master.clear()
        self.split.clear()
        self.aliases.clear()
        self._complete = False
        self._adopted.clear()
        self.moved()

    def _free_rows(self) -> None:
        for rows in self._rows.values():
            self._host.free(rows.flat, ROWS)
        self._rows.clear()

    def content(
        self,
        name: str,
        tensors: Sequence[Wanted],
        gradients: Sequence[GradientField],
        keeps_gradients: bool,
        narrow: Sequence[torch.dtype | None] = (),
    ) -> SlotContent:
        """What a slot holds for these tensors and gradients, in as few contiguous pieces as possible.

        With `keeps_gradients` each gradient has memory of its own on the host. It is the same whichever layers share
        the slot, since the layers of a step may differ from those of the step before.
        """
        key = (name, *tensors, *gradients, keeps_gradients, *narrow)

        def make() -> SlotContent:
            stored = [self._rows.get(wanted) or self._stored[wanted] for wanted in tensors]
            homes, kept = self.gradients.homes(gradients, self._shape, narrow) if keeps_gradients else ([], [])
            return lay_out_content(name, stored, gradients, self._shape, homes, kept)

        return self._contents.find(key, (self.owner(one) for one, _ in tensors), 4 * len(self._stored), make)

    def ready(self, content: SlotContent) -> list[Event]:
        """The updates that must have ended before a content is sent to the device."""
        return self.updates_of(self._contents.names_of(content))

    def updates_of(self, names: Sequence[str]) -> list[Event]:
        """The updates that must have ended before these tensors are read. Deferred ones are submitted."""
        self.before_reading(names)
        return list(dict.fromkeys(self.updated[name] for name in names if name in self.updated))

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter, or of the rows of one."""
        rows = next((rows.tensor for (key, _), rows in self._rows.items() if key == name), None)
        return tuple((self[name] if rows is None else rows).shape)
