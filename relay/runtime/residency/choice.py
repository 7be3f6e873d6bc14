"""Which segments stay on the device: those whose weights save the most bytes over the link, as many as fit.

A segment that is resident is not sent at each visit. It still gets what each step changes, so a frozen layer saves all
of its visits, a trained one all but one, and a trained last segment, which is visited once a step, nothing. Equals are
spread evenly over the model, from the turn between forward and backward on: while a resident segment computes, the link
brings the next one, which it could not do in a row of residents that is longer than the ring.

Bytes are counted here and nothing is allocated. Invariant: a choice for a limit needs no more bytes than the limit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from hal.slot.layout import SlotContent
from relay.runtime.stages import CompiledModel, changing_buffers

MARGIN = 0.05
"""The share of the device's memory that "auto" leaves free, for drivers, libraries and fragmentation."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A segment that may be resident.

    Attributes:
        content: what its slot would hold.
        visits: how often a pass sends its weights if it is not resident.
        changed: the bytes of it that each pass changes on the host.
    """

    content: SlotContent
    visits: int
    changed: int

    @property
    def saved(self) -> int:
        """The bytes that do not cross the link in a pass if it is resident."""
        return self.visits * self.content.size - self.changed


@dataclass(eq=False)
class Residents:
    """The segments that are resident, and those of them that have a gradient region of their own.

    `most` is how many could be resident, where they are fewer.
    """

    contents: list[SlotContent] = field(default_factory=list)
    with_gradients: list[SlotContent] = field(default_factory=list)
    most: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of their weights."""
        return sum(content.size for content in self.contents)


def refuse_more_than(segments: int, wanted: int | str) -> None:
    """Raise ValueError where more segments are wanted on the device than a model has."""
    if isinstance(wanted, int) and wanted > segments:
        raise ValueError(
            f"resident_layers={wanted} is more than the model has: {segments} segments (the embedding, the layers of "
            f"each slot, and the head count as one each). Give at most {segments}, or 'auto' for as many as fit."
        )


def candidates(
    compiled: CompiledModel,
    contents: Sequence[SlotContent],
    training: bool,
    held: Collection[object],
    visited: Mapping[int, int],
) -> list[Candidate]:
    """The segments that may be resident, the best first.

    `contents` are those of all segments, `held` the identities of those that are resident now, and `visited` tells how
    often the device visits each segment in a pass.
    """
    stages = compiled.stages
    trained = {name for stage in stages for name in stage.gradients} if training else set()
    changing = trained.union(changing_buffers(compiled) if training else (), (table.key for table in compiled.tables))
    found: dict[tuple[object, ...], Candidate] = {}
    for number, visits in sorted(visited.items()):
        stage, content = stages[number], contents[number]
        if not content.size:
            continue
        names = (*stage.parameters, *stage.buffers)
        changed = sum(one.size for name, one in zip(names, content.fields, strict=True) if name in changing)
        before = found.pop(content.identity, None)  # segments may share all of their weights
        found[content.identity] = Candidate(content, visits + (before.visits if before is not None else 0), changed)
    worth: dict[float, list[Candidate]] = {}
    for candidate in reversed(found.values()):
        worth.setdefault(round(candidate.saved / candidate.content.size, 1), []).append(candidate)
    order: list[Candidate] = []
    for _, equals in sorted(worth.items(), reverse=True):
        order += sorted(_spread(equals), key=lambda each: each.content.identity not in held)
    return order


def _spread(row: Sequence[Candidate]) -> list[Candidate]:
    """The row in an order whose every beginning is spread evenly: the first, the middle, the quarters, the eighths."""
    bits = (len(row) - 1).bit_length()
    turned = (int(f"{number:0{bits}b}"[::-1], 2) if bits else 0 for number in range(1 << bits))
    return [row[index] for index in dict.fromkeys(number * len(row) >> bits for number in turned)]


@dataclass(frozen=True, eq=False)
class SlotBytes:
    """The bytes of all slots, for any choice of residents.

    Attributes:
        contents: what the slots hold, segment by segment.
        count: the slots of the ring.
        least: bytes that a slot of the ring has at least, for weights and for gradients.
        other: all other bytes of device memory that the pass needs.
        held: bytes of the gradient regions that resident segments have now, by the identities of their contents. Those
            that stay resident keep them, in passes without gradients too.
    """

    contents: Sequence[SlotContent]
    count: int
    least: tuple[int, int]
    other: int
    held: Mapping[object, int]

    def ring(self, residents: Residents) -> tuple[int, int]:
        """Bytes of a slot of the ring, for weights and for gradients: those of the largest segment that uses it."""
        away = {content.identity for content in residents.contents}
        own = {content.identity for content in residents.with_gradients}
        weights = [content.size for content in self.contents if content.identity not in away]
        gradients = [content.gradient_size for content in self.contents if content.identity not in own]
        return max(self.least[0], *weights, 0), max(self.least[1], *gradients, 0)

    def has(self, residents: Residents) -> bool:
        """Whether these residents are among the segments."""
        return set(residents.contents) <= set(self.contents)

    def gradients(self, residents: Residents) -> int:
        """Bytes of the residents' own gradient regions."""
        new = {content.identity: content.gradient_size for content in residents.with_gradients}
        kept = (content.identity for content in residents.contents if content.identity in self.held)
        return sum((new | {identity: max(self.held[identity], new.get(identity, 0)) for identity in kept}).values())

    def total(self, residents: Residents) -> int:
        """All bytes of device memory that the pass needs."""
        return self.other + self.count * sum(self.ring(residents)) + residents.weight_bytes + self.gradients(residents)


def choose(wanted: int | str, order: Sequence[Candidate], slots: SlotBytes, limit: int | None) -> Residents:
    """The residents of a pass.

    Args:
        wanted: how many segments; "auto" for as many as save bytes and fit beside a margin.
        order: the segments that may be resident, the best first.
        slots: the bytes that a choice needs.
        limit: the device memory that may be used; None where there is no limit.
    """
    spare = None if limit is None else int(limit * (1 - MARGIN))
    if wanted == "auto":
        chosen = _as_many_as_fit([candidate for candidate in order if candidate.saved > 0], slots, spare)
    else:
        assert isinstance(wanted, int)
        chosen = _with([candidate.content for candidate in order[:wanted]], slots)
    chosen.most = len(_as_many_as_fit(order, slots, limit).contents)
    for content in chosen.contents:
        if content.gradient_size and content not in chosen.with_gradients:
            more = Residents(chosen.contents, [*chosen.with_gradients, content])
            if spare is None or slots.total(more) <= spare:
                chosen.with_gradients.append(content)
    return chosen


def _with(contents: list[SlotContent], slots: SlotBytes) -> Residents:
    return Residents(contents, [content for content in contents if content.identity in slots.held])


def _as_many_as_fit(order: Sequence[Candidate], slots: SlotBytes, limit: int | None) -> Residents:
    """The first segments that fit together; one that is too large is left out."""
    if limit is None:
        return _with([candidate.content for candidate in order], slots)
    chosen = Residents()
    refused = None
    for candidate in order:
        if refused is None or candidate.content.size < refused:
            more = _with([*chosen.contents, candidate.content], slots)
            if slots.total(more) <= limit:
                chosen = more
            else:
                refused = candidate.content.size
    return chosen
