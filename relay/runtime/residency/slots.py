"""The slots of a device, and which segment goes to which.

Most segments take turns in a ring of slots. A resident segment has a slot of its own, exactly as large as its weights,
which holds them from pass to pass; only tensors that have changed on the host since are sent again. Its gradients lie
in a region of its own where there is room, else in one that it borrows from a slot of the ring.

Which segments are resident is chosen elsewhere (`relay.runtime.residency.choice`). Invariant: the addresses of a slot
never change while it exists.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hal.device import Device, Queue
from hal.event import Event
from hal.slot.device_slot import DeviceSlot, GradientRegion
from hal.slot.layout import SlotContent


class SlotRing:
    """Slots that segments take in turn: the least recently visited slot is used next."""

    def __init__(self, device: Device, count: int, parameter_size: int, gradient_size: int) -> None:
        self.parameter_size = parameter_size
        self.gradient_size = gradient_size
        self.slots: list[DeviceSlot] = []
        try:
            for number in range(count):
                self.slots.append(DeviceSlot(device, number, parameter_size, gradient_size))
        except BaseException:
            self.free()
            raise

    def assign(self, visits: Sequence[SlotContent]) -> list[DeviceSlot]:
        """A slot for each visit in order. A content keeps its slot until another content needs it."""
        holds = {slot: slot.content for slot in self.slots}
        order = sorted(self.slots, key=lambda slot: slot.content is not None)
        assigned = []
        for content in visits:
            slot = next((slot for slot in self.slots if holds[slot] is content), order[0])
            holds[slot] = content
            order.remove(slot)
            order.append(slot)
            assigned.append(slot)
        return assigned

    def free(self) -> None:
        """Free the device memory."""
        for slot in self.slots:
            slot.free()


class ResidentSlot(DeviceSlot):
    """The slot of one resident segment.

    `versions` are those of the tensors that it holds (`LayerStore.versions`); None where it holds nothing.
    """

    def __init__(self, device: Device, content: SlotContent, region: GradientRegion | None) -> None:
        what = f"the resident layer {content.name!r}"
        super().__init__(device, -1, content.size, content.gradient_size, region, what)
        self.keeps_gradients = region is None
        self.identity = content.identity
        self.parameter_size, self.gradient_size = content.size, content.gradient_size
        self.versions: tuple[int, ...] | None = None
        self._first = content  # the identity holds while these tensors live

    def stale(self, versions: Sequence[int]) -> list[int] | None:
        """The tensors that are older here than these versions, as indices; None where nothing is here at all."""
        if self.versions is None:
            return None
        pairs = enumerate(zip(self.versions, versions, strict=True))
        return [index for index, (here, wanted) in pairs if here != wanted]

    def reload(
        self, content: SlotContent, stale: Sequence[int] | None, queue: Queue, wait: Sequence[Event]
    ) -> list[Event]:
        """Send these tensors again, or all of them for None. Returns the events of the transfers."""
        return self.load(content, self.version + 1, queue, wait, stale)


class Slots:
    """All slots of a device: the ring, and those of resident segments by what they hold."""

    def __init__(self, device: Device, count: int, parameter_size: int, gradient_size: int) -> None:
        self._device = device
        self.ring = SlotRing(device, count, parameter_size, gradient_size)
        self._resident: dict[tuple[object, ...], ResidentSlot] = {}

    @property
    def all(self) -> list[DeviceSlot]:
        """Every slot."""
        return [*self.ring.slots, *self._resident.values()]

    @property
    def held(self) -> dict[object, int]:
        """The identities of what resident slots hold, each with the bytes of the slot's own gradient region."""
        return {
            identity: slot.gradient_size if slot.keeps_gradients else 0 for identity, slot in self._resident.items()
        }

    def resident_slot(self, content: SlotContent) -> ResidentSlot | None:
        """The slot of a resident segment; None for a segment that is not resident."""
        return self._resident.get(content.identity)

    def differ(self, contents: Sequence[SlotContent]) -> bool:
        """Whether `keep` would free or add a slot for these resident segments."""
        return {content.identity for content in contents} != self._resident.keys()

    def keep(self, contents: Sequence[SlotContent], with_gradients: Collection[SlotContent]) -> None:
        """Have slots for these resident segments and for no others. Raises OutOfMemory.

        Those `with_gradients` have a region of their own for gradients. A segment that keeps its slot is not sent
        again.
        """
        wanted = {content.identity: content for content in contents}
        for identity, slot in list(self._resident.items()):
            content = wanted.get(identity)
            if content is None or (
                content.gradient_size
                and (content.gradient_size > slot.gradient_size or slot.keeps_gradients != (content in with_gradients))
            ):
                del self._resident[identity]
                slot.free()
        for identity, content in wanted.items():
            if identity not in self._resident:
                region = None if content in with_gradients else self.ring.slots[0].region
                self._resident[identity] = ResidentSlot(self._device, content, region)

    @property
    def size(self) -> int:
        """Bytes of device memory."""
        ring = len(self.ring.slots) * (self.ring.parameter_size + self.ring.gradient_size)
        return ring + self.resident_weights + self.resident_gradients

    @property
    def resident_weights(self) -> int:
        """Bytes of the weights of resident segments."""
        return sum(slot.parameter_size for slot in self._resident.values())

    @property
    def resident_gradients(self) -> int:
        """Bytes of the gradient regions that resident segments have to themselves."""
        return sum(self.held.values())

    def assign(self, visits: Sequence[SlotContent]) -> list[DeviceSlot]:
        """A slot for each visit in order."""
        resident = [self.resident_slot(content) for content in visits]
        ring = iter(self.ring.assign([content for content, own in zip(visits, resident, strict=True) if own is None]))
        return [next(ring) if own is None else own for own in resident]

    def regions(self, slots: Sequence[DeviceSlot], writes: Sequence[bool]) -> list[GradientRegion | None]:
        """For each visit that writes gradients the region for them: the slot's own if it is resident, else the ring's.

        Those of the ring are taken in turn over all visits, so that the drain of one visit hides behind the next.
        """
        pool = [slot.own_region for slot in self.ring.slots]
        taken = 0
        found: list[GradientRegion | None] = []
        for slot, needed in zip(slots, writes, strict=True):
            own = slot.own_region if isinstance(slot, ResidentSlot) else None
            found.append((own or pool[taken % len(pool)]) if needed else None)
            taken += needed and own is None
        return found

    def regions_of(self, contents: Sequence[SlotContent]) -> list[GradientRegion]:
        """Memory for gradients of each segment, outside of the backward: its own if it has some, else the ring's."""
        pool = [slot.own_region or slot.region for slot in self.ring.slots]
        own = [self.resident_slot(content) for content in contents]
        return [
            pool[number % len(pool)] if slot is None or slot.own_region is None else slot.own_region
            for number, slot in enumerate(own)
        ]

    def forget(self) -> None:
        """Discard what the slots hold, as after a failure."""
        for slot in self.all:
            slot.content = None
        for resident in self._resident.values():
            resident.versions = None

    def settle(self) -> None:
        """Forget the events of the slots. Everything submitted must have ended."""
        for slot in self.all:
            slot.settle()

    def free(self) -> None:
        """Free the device memory."""
        for resident in self._resident.values():
            resident.free()
        self._resident.clear()
        self.ring.free()
