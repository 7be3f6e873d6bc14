"""The compiled models of a simulated step's micro-batches, with one head over the whole batch where a run has one.

The head is compiled by the code that trains (`relay.runtime.head`); shapes and other models are in
`relay.simulation.described`. Nothing is computed here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from relay.capture import Lowering
from relay.capture.fake_tensors import fake_mode
from relay.partition.merge_layers import merge_layers
from relay.partition.segments import Join, Partition, Segment, Value, WholeHead
from relay.runtime.compiling.capture_segments import CPU, Capturing
from relay.runtime.head.choose_chunks import HeadChunks
from relay.runtime.head.whole_batch import build_over_batch
from relay.runtime.stages import CompiledModel
from relay.simulation.described.meta_model import MetaModel
from relay.simulation.described.transformer_shape import ModelShape, captures_of, partition_of, templates_of


def compiled_models(
    shape: ModelShape | MetaModel,
    sizes: Sequence[int],
    sequence: int,
    compute: torch.dtype,
    layers_per_slot: int,
    recompute: bool | int,
    loss_over: str,
    head: HeadChunks,
) -> list[CompiledModel]:
    """The compiled model of each micro-batch, with its `head` in chunks; micro-batch j has `sizes[j]` sequences.

    A described transformer predicts each token by itself, so only "batch" gives it a head over the whole batch. Any
    other model is followed as the trainer follows it. Raises PartitionError where the trainer would.
    """
    if isinstance(shape, MetaModel):
        return shape.models(tuple(sizes), sequence, compute, layers_per_slot, recompute, loss_over, head)
    if loss_over == "batch" and len(sizes) > 1:
        repeats = str(recompute)  # 1 and True are the same key
        return _over_batch(shape, tuple(sizes), sequence, compute, min(layers_per_slot, shape.layers), repeats, head)
    return [shape.compiled(size, sequence, compute, layers_per_slot, recompute, head) for size in sizes]


@functools.lru_cache(maxsize=16)
def _over_batch(
    shape: ModelShape, sizes: tuple[int, ...], sequence: int, compute: torch.dtype, layers: int, recompute: str,
    head: HeadChunks,
) -> list[CompiledModel]:  # fmt: skip
    repeats = {"True": True, "False": False}.get(recompute)
    with fake_mode() as mode:
        templates = templates_of(shape, sequence, mode, layers)
        made: dict[int, Partition] = {}
        for size in sizes:
            if size not in made:
                made[size] = merge_layers(_with_head(partition_of(shape, size, sequence, templates), sizes), layers)
        head.over_batch(list(made.values()))
        capturing = Capturing(
            True, compute, None, Lowering.NATIVE, captures_of(shape, compute, Lowering.NATIVE, CPU),
            int(recompute) if repeats is None else repeats, CPU,
        )  # fmt: skip
        return build_over_batch([made[size] for size in sizes], sizes, capturing, False)


def _with_head(partition: Partition, sizes: Sequence[int]) -> Partition:
    """The partition of a transformer, with its head over the batch: it takes the last layer's output and the labels."""
    last = partition.segments[-1]
    stream, labels = last.inputs
    tokens = (sum(sizes), *partition.values[labels].shape[1:])
    values = [Value(0, tokens, torch.int64, None), Value(1, tokens, torch.int64, None, [0])]
    values.append(Value(2, (), torch.float32, 0))
    head = Segment(0, last.name, last.module, (1,), (2,), last.parameters, last.buffers, layer_index=last.layer_index)
    own = Partition([head], values, (0, 1), True, (), partition.result_tree)
    partition.head = WholeHead(own, (Join("rows"),), (0, 1), last.name)
    partition.values[labels].consumers.clear()
    last.inputs = (stream,)
    return partition
