"""Whether the last segment runs over chunks of positions, and how many positions a chunk has.

It decides by the option `head_chunk_tokens` and by the bytes that the logits take, and says in the log what it chose.
The split itself is `relay.partition.positions`. Invariant: nothing is chosen silently where an option asks for chunks,
and a number that would have no effect is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hal.spec.units import format_size
from relay.errors import PartitionError
from relay.partition.positions.labels import HasOwnChunks, NotByPosition
from relay.partition.positions.split import LastSegment, follow_positions, in_chunks
from relay.partition.segments import Partition

if TYPE_CHECKING:
    from relay.runtime.stages import CompiledModel

logger = logging.getLogger("relay")

LARGE_SHARE = 4
"""With "auto" the head is chunked where the logits would take more than one part in so many of what is free."""
CHUNK_SHARE = 16
"""Then the logits of a chunk take at most one part in so many."""
LEAST, MOST = 128, 8192
"""Bounds of the chunks that "auto" chooses. Each chunk adds to the weight's gradient, so smaller ones lose time."""


@dataclass(frozen=True)
class HeadChunks:
    """The options `head_chunk_tokens` and `mlp_chunk_tokens` (`layers`), and what "auto" needs to know.

    `memory` is the device memory in bytes, None if it is not known; `slots`, `stash` and `microbatches` are the
    trainer's options. `required` is True where a number of positions was given: a head that cannot run over chunks is
    then refused, and not left whole.
    """

    tokens: int | str | None = None
    memory: int | None = None
    slots: int = 2
    stash: str = "device"
    microbatches: int = 1
    layers: int | None = None
    required: bool = False

    def split(self, partition: Partition, compute: torch.dtype) -> Partition:
        """The partition, with its last segment over chunks where the option says so.

        What was chosen, or why the segment is left whole, is logged.
        """
        with_row_chunks(partition, self.layers)
        if self.tokens is None:
            return partition
        try:
            last = follow_positions(partition, compute)
            size = self.tokens if isinstance(self.tokens, int) else self.automatic(last, compute)
            chunked = partition if size is None else in_chunks(last, size)
        except NotByPosition as why:
            self.give_up(why)
            partition.left_whole = str(why)
            return partition
        return chunked

    def give_up(self, why: NotByPosition) -> None:
        """Log why the head is left whole. Raises PartitionError where a number of positions was given.

        A loss that has chunks of its own is left whole in any case.
        """
        if self.required and not isinstance(why, HasOwnChunks):
            raise PartitionError(
                f"head_chunk_tokens={self.tokens}: what follows the last layer cannot run over chunks of positions, "
                f"since {why}. Use head_chunk_tokens='auto' or None, which leave it whole; it then takes less memory "
                "with smaller batches or shorter sequences."
            )
        left_whole(self.tokens, str(why))

    def over_batch(self, partitions: Sequence[Partition]) -> None:
        """The same for the micro-batches of a head over the whole batch, which is left whole."""
        for partition in partitions:
            with_row_chunks(partition, self.layers)
        if self.tokens is not None:
            self.give_up(NotByPosition("the head runs over the whole batch"))

    def check_layers(self, partition: Partition) -> None:
        """Raise PartitionError for layers none of which has a piece that could run over chunks, as captured."""
        asked = [segment for segment in partition.segments if segment.row_chunk is not None]
        if self.layers is not None and all(segment.row_problem for segment in asked):
            why = f"{asked[0].name!r} is left whole, since {asked[0].row_problem}" if asked else "it has no layers"
            raise PartitionError(
                f"mlp_chunk_tokens={self.layers}: no layer of the model has a piece that could run over chunks of "
                f"positions: {why}. Leave mlp_chunk_tokens out; smaller micro-batches or shorter sequences take less "
                "memory."
            )

    def automatic(self, last: LastSegment, compute: torch.dtype) -> int | None:
        """The positions of a chunk that "auto" chooses, or None to leave the segment whole."""
        row = last.width * torch.float32.itemsize
        logits = last.positions * row
        if self.memory is None:
            logger.info("head_chunk_tokens='auto': the head is left whole, since the device's memory is not known")
            return None
        free = max(0, self.memory - self._taken(last.partition, compute))
        if logits * LARGE_SHARE <= free:
            logger.info(
                "head_chunk_tokens='auto': the head is left whole; its logits take %s of %s that are free",
                format_size(logits), format_size(free),
            )  # fmt: skip
            return None
        size = LEAST
        while size < MOST and 2 * size * row * CHUNK_SHARE <= free:
            size *= 2
        size = min(size, last.positions)
        logger.info(
            "head_chunk_tokens='auto' chose %d: the logits of a micro-batch would take %s of %s that are free",
            size, format_size(logits), format_size(free),
        )  # fmt: skip
        return size

    def _taken(self, partition: Partition, compute: torch.dtype) -> int:
        """Bytes that slots and stash take, before anything is captured."""
        largest = 0
        for segment in partition.segments:
            named = {id(tensor): tensor for tensor in segment.module.parameters()}
            weights = sum(tensor.numel() * min(compute.itemsize, tensor.element_size()) for tensor in named.values())
            trained = [tensor for tensor in named.values() if tensor.requires_grad]
            largest = max(largest, weights + sum(tensor.numel() * tensor.element_size() for tensor in trained))
        made = [value for value in partition.values if value.producer is not None and value.shape]
        bytes_made = [torch.Size(value.shape).numel() * min(compute.itemsize, value.dtype.itemsize) for value in made]
        boundaries = bytes_made[:-1] if self.stash == "device" else bytes_made[:4]
        return self.slots * largest + self.microbatches * sum(boundaries)


def alike(
    compiled: Sequence[CompiledModel], again: Callable[[int], Sequence[CompiledModel]]
) -> list[CompiledModel]:
    """The compiled models of a step's micro-batches, all with a head in chunks or all with a whole one.

    "auto" may choose chunks for the larger of them alone. `again` then gives all for chunks of that many positions.
    """
    found = [model.partition.segments[-1].chunks for model in compiled]
    sizes = [chunks.size for chunks in found if chunks is not None]
    return list(again(max(sizes)) if sizes and len(sizes) < len(found) else compiled)


def with_row_chunks(partition: Partition, tokens: int | None) -> None:
    """Let the wide pieces of a partition's layers run over chunks of so many positions, if a number is given."""
    for segment in partition.segments:
        segment.row_chunk = tokens if segment.kind is not None else None


def left_whole(tokens: int | str | None, why: str) -> None:
    """Log why the last segment is left whole."""
    logger.warning("head_chunk_tokens=%r: the head is left whole, since %s.", tokens, why)
