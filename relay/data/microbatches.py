"""Batches in micro-batches, and the weight of each micro-batch in the loss of the whole batch.

A batch is cut along the samples as `torch.chunk` cuts: into equal sizes, of which the last may be smaller, and into
fewer than asked if it has fewer samples. Tensors are cut along dimension 0, lists with one entry for each sample by
entries. Or a batch is given in pieces, each a batch of its own shapes. Invariant: where there are several
micro-batches, a tensor goes to all of them whole only if it has no dimensions or is named as shared; other tensors of
another length raise BatchError.

Micro-batches are views of the batch; only tensors made under torch.inference_mode are copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from relay.capture.memory_order import order_of
from relay.data.check_values import check_values
from relay.data.loss_weight import SUM, LossPlan, Share, StatedCount, TargetCount
from relay.data.samples import Content, are_cut, cut, has_lists, holds_tensors, length_of
from relay.errors import BatchError
from relay.graph.pytree import TensorTree, tensor_leaves

MASKED_TERM = "Every target of one of the loss's terms is masked, so the batch has no loss."


@dataclass(frozen=True, eq=False)
class Piece:
    """One micro-batch: its tensors (`input_count` inputs, then the targets), and its number of samples.

    `tree` nests the inputs, `target_tree` the targets; it is None if the model takes them among its inputs. `sources`
    are, by number, the tensors that require a gradient, as autograd knows them; `tensors` are detached.
    """

    tensors: list[torch.Tensor]
    size: int
    input_count: int
    tree: TensorTree
    target_tree: TensorTree | None
    sources: dict[int, torch.Tensor] = field(default_factory=dict)

    def nested(self) -> Any:
        """The micro-batch in the form of the batch."""
        inputs = self.tree.fill(self.tensors[: self.input_count])
        return inputs if self.target_tree is None else (inputs, self.target_tree.fill(self.tensors[self.input_count :]))

    def doubled(self) -> Piece:
        """A batch with every sample twice, of which this is a half."""
        twice = [
            torch.cat([tensor, tensor]) if tensor.dim() and len(tensor) == self.size else tensor.detach()
            for tensor in self.tensors
        ]
        return replace(self, tensors=twice, size=2 * self.size)

    def signature(self) -> Any:
        """A key that is equal for micro-batches which need the same programs."""
        shapes = tuple((tuple(tensor.shape), tensor.dtype, order_of(tensor)) for tensor in self.tensors)
        constants = repr((self.tree.constants, self.target_tree.constants if self.target_tree else None))
        specs = (str(self.tree.spec), str(self.target_tree.spec) if self.target_tree else None)
        return shapes, specs, constants, tuple(self.sources)


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch in micro-batches, and the `whole` that they are cut from: None if it is not cut, or given in pieces."""

    pieces: list[Piece]
    whole: Piece | None = None

    @property
    def sizes(self) -> list[int]:
        """The number of samples of each micro-batch."""
        return [piece.size for piece in self.pieces]

    @property
    def tensors(self) -> list[list[torch.Tensor]]:
        """The tensors of each micro-batch."""
        return [piece.tensors for piece in self.pieces]


def take_apart(
    batch: Any, whole_model: bool, microbatches: int, needs_targets: bool, shared: Sequence[str] = ()
) -> Batch:
    """Cut a batch into `microbatches` pieces, or fewer if its size is smaller or not a multiple.

    For a `whole_model` the batch is a mapping, whose entries named in `shared` are not cut. For a list of modules it is
    a pair (inputs, targets), or the inputs alone if no targets are needed. The size of the batch is the most frequent
    length of its tensors along dimension 0; among equally frequent ones, the first. Tensors in lists count only if
    there are no others.

    Raises BatchError if the batch has another form, is empty, or has tensors that cannot be cut.
    """
    content = _content_of(batch, whole_model, needs_targets)
    check_values(content["inputs"] if whole_model else content)
    if not holds_tensors(content, whole_model):
        raise BatchError(
            f"The batch holds no tensors: {_describe(batch)}. Convert its arrays or lists to tensors, for example with "
            "torch.as_tensor."
        )
    size = length_of(content, shared, whole_model)
    if size == 0:
        raise BatchError("The batch is empty: its tensors have length 0.")
    step = -(-size // min(microbatches, size))
    ranges = [slice(start, min(start + step, size)) for start in range(0, size, step)]
    if len(ranges) > 1 and has_lists(content, size, shared, whole_model):
        contents = cut(content, size, ranges, shared, whole_model)
        made = [_whole(each, rows.stop - rows.start) for each, rows in zip(contents, ranges, strict=True)]
        return Batch(made, _whole(content, size))
    whole = _whole(content, size)
    if len(ranges) == 1:
        return Batch([whole])
    cuts = are_cut(content, size, len(ranges), shared, whole_model)
    pieces = []
    for rows in ranges:
        tensors = [tensor[rows] if is_cut else tensor for tensor, is_cut in zip(whole.tensors, cuts, strict=True)]
        sources = {number: source[rows] if cuts[number] else source for number, source in whole.sources.items()}
        pieces.append(replace(whole, tensors=tensors, size=rows.stop - rows.start, sources=sources))
    return Batch(pieces, whole)


def first_of(batch: Batch, count: int) -> Batch:
    """A batch of the first `count` micro-batches of one that was cut along its samples."""
    whole, pieces = batch.whole, batch.pieces[:count]
    assert whole is not None
    size = sum(piece.size for piece in pieces)
    tensors = [
        tensor[:size] if tensor.dim() and len(tensor) == whole.size != len(part) else tensor
        for tensor, part in zip(whole.tensors, batch.pieces[0].tensors, strict=True)
    ]
    return Batch(pieces, replace(whole, tensors=tensors, size=size))


def holds_lists(piece: Piece) -> bool:
    """Whether a batch has lists that may have one entry for each sample."""
    content: Content = {"inputs": piece.tree.fill(piece.tensors[: piece.input_count])}
    if piece.target_tree is not None:
        content["targets"] = piece.target_tree.fill(piece.tensors[piece.input_count :])
    return has_lists(content, piece.size, (), piece.target_tree is None)


def join(batches: Sequence[Batch]) -> Batch:
    """The micro-batches of several batches as those of one."""
    return Batch([piece for batch in batches for piece in batch.pieces])


def check_weights(weights: Sequence[float], count: int) -> list[float]:
    """Weights that a caller gives for `count` micro-batches. Raises ValueError."""
    found = [float(weight) for weight in weights]
    if len(found) != count:
        raise ValueError(f"weights= has {len(found)} entries for {count} pieces. Give one for each piece.")
    if not all(math.isfinite(weight) for weight in found):
        raise ValueError(f"weights={found!r} must be finite numbers.")
    return found


def _content_of(batch: Any, whole_model: bool, needs_targets: bool) -> Content:
    """The parts of a batch by name: the entries of a whole model's, or `inputs` and `targets`."""
    if whole_model:
        if not isinstance(batch, Mapping):
            raise BatchError(
                f"A whole model takes a mapping, called as model(**batch); got {type(batch).__name__}. "
                "For (inputs, targets), pass the model as a list of modules with loss=."
            )
        return {"inputs": dict(batch)}
    if not needs_targets:
        return {"inputs": batch}
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise BatchError(f"A list of modules takes a pair (inputs, targets); got {_describe(batch)}.")
    return {"inputs": batch[0], "targets": batch[1]}


def _whole(content: Content, size: int) -> Piece:
    """A content as one micro-batch."""
    inputs, tree = tensor_leaves(content["inputs"])
    targets: list[torch.Tensor] = []
    target_tree: TensorTree | None = None
    if "targets" in content:
        targets, target_tree = tensor_leaves(content["targets"])
    # Autograd refuses tensors made under torch.inference_mode, but not copies of them.
    given = [*inputs, *targets]
    tensors = [tensor.clone() if tensor.is_inference() else tensor.detach() for tensor in given]
    sources = {number: tensor for number, tensor in enumerate(given) if tensor.requires_grad}
    return Piece(tensors, size, len(inputs), tree, target_tree, sources)


def weigh(batch: Batch, plans: Sequence[LossPlan]) -> list[float]:
    """The weight of each micro-batch in the loss of the batch: its share of what counts, or 1 if the loss is a sum.

    `plans` has one for each micro-batch. The share of a micro-batch whose targets are all masked is 0. Raises
    BatchError if all targets of the batch are.
    """
    shares = [plan.share for plan in plans]
    if len(shares) == 1 or shares[0] == SUM:
        return [1.0] * len(shares)
    counts = [_count(piece, share) for piece, share in zip(batch.pieces, shares, strict=True)]
    total = sum(counts)
    if total == 0:
        raise BatchError("Every target of the batch is masked, so it has no loss.")
    return [count / total for count in counts]


def counts_of(batch: Batch, plans: Sequence[LossPlan]) -> list[float] | None:
    """What each micro-batch counts in the loss of the batch; None if the loss is a sum, of which each counts fully."""
    shares = [plan.share for plan in plans]
    if shares[0] == SUM:
        return None
    return [_count(piece, share) for piece, share in zip(batch.pieces, shares, strict=True)]


def _count(piece: Piece, share: Share) -> float:
    if isinstance(share, TargetCount):
        return share.count(piece.tensors)
    if isinstance(share, StatedCount):
        count = float(share.function(piece.nested()))
        if not 0 <= count < float("inf"):
            raise BatchError(f"loss_weight= must give a count that is finite and not negative; it gave {count}.")
        return count
    return piece.size


def with_whole_values(batch: Batch, plans: Sequence[LossPlan]) -> Batch:
    """The batch with each micro-batch followed by what its program is given of the whole batch.

    Raises BatchError if all targets of a term are masked, or if there is no whole batch to compute a value from.
    """
    if not any(plan.is_rewritten for plan in plans):
        return batch
    extended = with_values(batch, plans)
    counts = term_counts(extended, plans)
    return with_term_shares(extended, plans, counts, term_totals(counts))


def with_values(batch: Batch, plans: Sequence[LossPlan]) -> Batch:
    """The batch with each micro-batch followed by the values of the whole batch that its program is given.

    Raises BatchError if there is no whole batch to compute a value from.
    """
    known: dict[int, tuple[torch.Tensor, ...]] = {}
    pieces = []
    for piece, plan in zip(batch.pieces, plans, strict=True):
        if plan.whole_values is not None and id(plan) not in known:
            if batch.whole is None:
                refuse_without_whole()
            with torch.no_grad():
                known[id(plan)] = plan.whole_values(*batch.whole.tensors)
        values = [value.contiguous() for value in known.get(id(plan), ())]
        pieces.append(replace(piece, tensors=[*piece.tensors, *values]))
    return replace(batch, pieces=pieces)


def refuse_without_whole() -> NoReturn:
    """Raise BatchError for a loss that takes a value of the whole batch, where there is none."""
    raise BatchError(
        "The loss takes a value of the whole batch, such as the number of its targets, and the batch is "
        "given in pieces. Give it as one batch, or say by weights= or loss_weight= what each piece counts."
    )


def term_counts(batch: Batch, plans: Sequence[LossPlan]) -> list[list[float]]:
    """What each micro-batch counts in each term of the loss that is multiplied by a share of its own.

    The micro-batches are followed by the values of the whole batch.
    """
    return [
        [_count(piece, share) for share in plan.term_shares] for piece, plan in zip(batch.pieces, plans, strict=True)
    ]


def term_totals(counts: Sequence[Sequence[float]]) -> list[float]:
    """What all micro-batches count in each term. Raises BatchError if all targets of a term are masked."""
    totals = [sum(column) for column in zip(*counts, strict=True)]
    if not all(totals):
        raise BatchError(MASKED_TERM)
    return totals


def with_term_shares(
    batch: Batch, plans: Sequence[LossPlan], counts: Sequence[Sequence[float]], totals: Sequence[float]
) -> Batch:
    """The batch with each micro-batch followed by its share in each term, of which the whole batch counts `totals`."""
    pieces = []
    for piece, plan, own in zip(batch.pieces, plans, counts, strict=True):
        shares = [
            torch.tensor(count / total, dtype=dtype)
            for count, total, dtype in zip(own, totals, plan.term_dtypes, strict=True)
        ]
        pieces.append(replace(piece, tensors=[*piece.tensors, *shares]))
    return replace(batch, pieces=pieces)


def count_tokens(batch: Batch) -> int:
    """The number of elements of the first integer input of shape (batch, sequence), or of samples if there is none."""
    tokens = 0
    for piece in batch.pieces:
        for tensor in piece.tensors[: piece.input_count]:
            if tensor.dtype in (torch.int64, torch.int32) and tensor.dim() >= 2 and tensor.shape[0] == piece.size:
                tokens += tensor.shape[0] * tensor.shape[1]
                break
        else:
            return sum(batch.sizes)
    return tokens


def _describe(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return f"{type(batch).__name__} of {len(batch)}"
    return type(batch).__name__
