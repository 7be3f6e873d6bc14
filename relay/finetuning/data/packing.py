"""Several documents in one row: which go together, and the tensors of a packed row.

Each document has positions from 0 on, and no attention mask is given: transformers reads from the positions where
documents begin and lets each attend to itself alone. An all-ones mask would switch that off without an error. The first
label of each document is not trained, since it would be predicted from the document before. Invariant: loss and
gradients are those of the documents in rows of their own.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
from torch import nn

from relay.errors import RelayError
from relay.finetuning.data.tokenise import IGNORED


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Which documents share a row of `size` tokens: the longest first, each into the fullest row that has room."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # free tokens and number of each row, sorted
    for document in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        at = bisect.bisect_left(room, (lengths[document], -1))
        if at == len(room):
            bins.append([document])
            free, number = size, len(bins) - 1
        else:
            free, number = room.pop(at)
            bins[number].append(document)
        bisect.insort(room, (free - lengths[document], number))
    return bins


def packed_row(
    documents: Sequence[tuple[Sequence[int], Sequence[int]]], length: int, padding: int
) -> dict[str, torch.Tensor]:
    """The tensors of a row of documents, each given as tokens and labels. The rest of it is a document of padding."""
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    for ids, marks in documents:
        tokens += ids
        labels += [IGNORED, *marks[1:]]
        positions += range(len(ids))
    rest = length - len(tokens)
    return {
        "input_ids": torch.tensor([*tokens, *[padding] * rest]),
        "position_ids": torch.tensor([*positions, *range(rest)]),
        "labels": torch.tensor([*labels, *[IGNORED] * rest]),
    }


@torch.no_grad()
def check_separate(model: nn.Module, vocabulary: int) -> None:
    """Raise RelayError for a model in which packed documents are not separate.

    A second document is computed behind two different first ones. Its logits must be the same.
    """
    size = 6
    first = torch.arange(size) % vocabulary
    other = (first + 1) % vocabulary
    second = (first + 2) % vocabulary
    row = torch.stack([torch.cat([first, second]), torch.cat([other, second])])
    positions = torch.arange(size).repeat(2).expand(2, -1).contiguous()
    was = model.training
    model.eval()
    try:
        logits = model(input_ids=row, position_ids=positions, use_cache=False).logits[:, size:]
    except TypeError as wrong:
        raise RelayError(f"{type(model).__name__} takes no position_ids, so its documents cannot be packed.") from wrong
    finally:
        model.train(was)
    if not torch.equal(logits[0], logits[1]):
        raise RelayError(
            f"{type(model).__name__} does not keep packed documents apart: what a document computes depends on the one "
            "before it in the row. Leave --pack out."
        )
