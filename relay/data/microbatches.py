"""Batches cut into micro-batches, and the weight of each micro-batch in the loss.

Tensors are cut along dimension 0 as `torch.chunk` cuts them: into equal sizes, of which the last may be smaller.
Tensors of another length are passed whole to every micro-batch. Micro-batches are views of the batch; only tensors made
under torch.inference_mode are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from relay.capture.memory_order import order_of
from relay.data.loss_weight import LossWeight
from relay.errors import BatchError
from relay.graph.pytree import TensorTree, tensor_leaves


@dataclass(eq=False)
class Batch:
    """A batch in micro-batches. `pieces[j]` are the tensors of micro-batch j: `input_count` inputs, then the targets.

    `sizes[j]` is its number of samples. `tree` nests the inputs, `target_tree` the targets; it is None if the model
    takes them among its inputs.
    """

    pieces: list[list[torch.Tensor]]
    sizes: list[int]
    input_count: int
    tree: TensorTree
    target_tree: TensorTree | None

    def signature(self, piece: int) -> Any:
        """A key that is equal for micro-batches which need the same programs."""
        shapes = tuple((tuple(tensor.shape), tensor.dtype, order_of(tensor)) for tensor in self.pieces[piece])
        constants = repr((self.tree.constants, self.target_tree.constants if self.target_tree else None))
        specs = (str(self.tree.spec), str(self.target_tree.spec) if self.target_tree else None)
        return shapes, specs, constants


def take_apart(
    batch: Any, whole_model: bool, microbatches: int, needs_targets: bool, shared: Sequence[str] = ()
) -> Batch:
    """Cut a batch into `microbatches` pieces, or fewer if its size is not a multiple.

    For a `whole_model` the batch is a mapping, whose entries named in `shared` are not cut. For a list of modules it is
    a pair (inputs, targets), or the inputs alone if no targets are needed. The size of the batch is the most frequent
    length of its tensors along dimension 0; among equally frequent ones, the first.

    Raises BatchError if the batch has another form, is empty or too small, or its lengths do not agree.
    """
    target_tree: TensorTree | None = None
    targets: list[torch.Tensor] = []
    if whole_model:
        if not isinstance(batch, Mapping):
            raise BatchError(
                f"A whole model takes a mapping, called as model(**batch); got {type(batch).__name__}. "
                "For (inputs, targets), pass the model as a list of modules with loss=."
            )
        inputs, tree = tensor_leaves(dict(batch))
    elif needs_targets:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise BatchError(f"A list of modules takes a pair (inputs, targets); got {_describe(batch)}.")
        inputs, tree = tensor_leaves(batch[0])
        targets, target_tree = tensor_leaves(batch[1])
    else:
        inputs, tree = tensor_leaves(batch)
    tensors = [*inputs, *targets]
    if not tensors:
        raise BatchError(
            f"The batch holds no tensors: {_describe(batch)}. Convert its arrays or lists to tensors, for example with "
            "torch.as_tensor."
        )
    kept_whole = {id(tensor) for name in shared for tensor in tensor_leaves(batch.get(name))[0]} if shared else set()
    size = _batch_size([tensor for tensor in tensors if id(tensor) not in kept_whole])
    if size == 0:
        raise BatchError("The batch is empty: its tensors have length 0.")
    if size < microbatches:
        raise BatchError(
            f"A batch of {size} cannot be cut into {microbatches} micro-batches. Use a larger batch, or "
            f"microbatches={size} or fewer."
        )
    if target_tree is not None:
        for tensor in tensors:
            if tensor.dim() == 0 or tensor.shape[0] != size:
                raise BatchError(
                    f"Inputs and targets must have the same length along dimension 0; got "
                    f"{[tuple(tensor.shape) for tensor in tensors]}."
                )
    step = -(-size // microbatches)
    starts = range(0, size, step)
    cut = [tensor.dim() > 0 and tensor.shape[0] == size and id(tensor) not in kept_whole for tensor in tensors]
    # Autograd refuses tensors made under torch.inference_mode, but not copies of them.
    detached = [tensor.clone() if tensor.is_inference() else tensor.detach() for tensor in tensors]
    pieces = [
        [tensor[start : start + step] if is_cut else tensor for tensor, is_cut in zip(detached, cut, strict=True)]
        for start in starts
    ]
    sizes = [min(step, size - start) for start in starts]
    return Batch(pieces, sizes, len(inputs), tree, target_tree)


def weigh(batch: Batch, weight: LossWeight | None) -> list[float]:
    """The weight of each micro-batch in the loss of the batch: its share of what counts, or 1 if the loss is a sum.

    The share of a micro-batch whose targets are all masked is 0. Raises BatchError if all targets of the batch are.
    """
    if weight is not None and weight.is_sum:
        return [1.0] * len(batch.pieces)
    counts = batch.sizes if weight is None else [weight.count(piece) for piece in batch.pieces]
    total = sum(counts)
    if total == 0:
        raise BatchError("Every target of the batch is masked, so it has no loss.")
    return [count / total for count in counts]


def without_empty(batch: Batch, weights: Sequence[float]) -> tuple[Batch, list[float]]:
    """The batch and the weights without micro-batches of weight 0, whose mean loss is undefined."""
    counting = [number for number, weight in enumerate(weights) if weight > 0]
    if len(counting) == len(weights):
        return batch, list(weights)
    pieces = [batch.pieces[number] for number in counting]
    sizes = [batch.sizes[number] for number in counting]
    rest = Batch(pieces, sizes, batch.input_count, batch.tree, batch.target_tree)
    return rest, [weights[number] for number in counting]


def count_tokens(batch: Batch) -> int:
    """The number of elements of the first integer input of shape (batch, sequence), or of samples if there is none."""
    for number, tensor in enumerate(batch.pieces[0][: batch.input_count]):
        rows = sum(piece[number].shape[0] for piece in batch.pieces) if tensor.dim() >= 2 else 0
        if tensor.dtype in (torch.int64, torch.int32) and rows == sum(batch.sizes):
            return rows * tensor.shape[1]
    return sum(batch.sizes)


def _batch_size(tensors: Sequence[torch.Tensor]) -> int:
    lengths = [int(tensor.shape[0]) for tensor in tensors if tensor.dim() > 0]
    if not lengths:
        raise BatchError(
            "The batch holds only scalar tensors, which have no dimension to cut. Tensors need a batch dimension."
        )
    return max(dict.fromkeys(lengths), key=lengths.count)


def _describe(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return f"{type(batch).__name__} of {len(batch)}"
    return type(batch).__name__
