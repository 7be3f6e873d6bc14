"""Plain PyTorch, as anyone would write it: what the relay is compared with. Nothing in here knows the relay.

Micro-batches are cut by `torch.Tensor.split`, each loss is weighted by its share of the batch, gradients add up in
`.grad`, and a torch optimizer makes one step. Importing it sets torch to one thread: the models of these tests are
tiny, and two processes of several spinning threads each on two cores take a hundred times as long.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

torch.set_num_threads(1)

IGNORED = -100

Piece = Any
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

adamw: MakeOptimizer = functools.partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.01, fused=True)


def cut(batch: Any, microbatches: int) -> list[Piece]:
    """A mapping of tensors, or a pair of them, cut along dimension 0; the last piece may be smaller.

    Each piece has memory of its own, as a data loader would give it: the last bit of a matrix product of floats
    depends on how its operands lie in memory, and a view into the middle of a batch lies anyhow.
    """
    if isinstance(batch, dict):
        names, tensors = list(batch), list(batch.values())
    else:
        names, tensors = [], list(batch)
    size = -(-len(tensors[0]) // microbatches)
    rows = zip(*([piece.clone() for piece in tensor.split(size)] for tensor in tensors), strict=True)
    return [dict(zip(names, row, strict=True)) if names else row for row in rows]


def by_samples(pieces: Sequence[Piece]) -> list[float]:
    """Each piece's share of the batch, in samples."""
    counts = [len(next(iter(piece.values())) if isinstance(piece, dict) else piece[0]) for piece in pieces]
    return [count / sum(counts) for count in counts]


def by_targets(pieces: Sequence[Piece]) -> list[float]:
    """Each piece's share of the batch, in targets that are not masked."""
    targets = [piece["labels"] if isinstance(piece, dict) else piece[1] for piece in pieces]
    counts = [int((target != IGNORED).sum()) for target in targets]
    return [count / sum(counts) for count in counts]


def call_list(modules: Sequence[nn.Module], loss: Callable[..., Tensor], piece: Piece) -> Tensor:
    """A list of modules, each fed the output of the one before, and the loss of the last."""
    value, target = piece
    for module in modules:
        value = module(value)
    return loss(value, target)


def gradients_of(call: Callable[[Piece], Tensor], pieces: Sequence[Piece], shares: Sequence[float]) -> float:
    """Add the gradients of a batch into `.grad`; returns its loss. A piece that weighs nothing is not run."""
    total = 0.0
    for piece, share in zip(pieces, shares, strict=True):
        if share:
            loss = call(piece) * share
            loss.backward()
            total += loss.item()
    return total


def train(
    model: nn.Module | Sequence[nn.Module],
    batches: Sequence[Any],
    microbatches: int = 4,
    *,
    loss: Callable[..., Tensor] | None = None,
    optimizer: MakeOptimizer = adamw,
    shares: Callable[[Sequence[Piece]], list[float]] = by_samples,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> list[float]:
    """One optimizer step a batch on a whole model, or on a list of modules with `loss`. Returns the losses."""
    stepper = optimizer([parameter for parameter in parameters_of(model) if parameter.requires_grad])
    scheduler = schedule(stepper) if schedule else None
    losses = []
    for batch in batches:
        stepper.zero_grad()
        pieces = cut(batch, microbatches)
        losses.append(gradients_of(caller(model, loss), pieces, shares(pieces)))
        stepper.step()
        if scheduler:
            scheduler.step()
    return losses


def gradient_norm(model: nn.Module, batch: Any, microbatches: int, loss: Callable[..., Tensor] | None = None) -> float:
    """The global norm of a batch's gradients. Leaves the model as it was."""
    pieces = cut(batch, microbatches)
    gradients_of(caller(model, loss), pieces, by_samples(pieces))
    gradients = [parameter.grad for parameter in parameters_of(model) if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    for parameter in parameters_of(model):
        parameter.grad = None
    return norm


def caller(model: nn.Module | Sequence[nn.Module], loss: Callable[..., Tensor] | None) -> Callable[[Piece], Tensor]:
    """How to get a piece's loss from a model."""
    if isinstance(model, nn.Module):
        return lambda piece: model(**piece).loss
    assert loss is not None
    return functools.partial(call_list, model, loss)


def parameters_of(model: nn.Module | Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Every parameter once."""
    return (model if isinstance(model, nn.Module) else nn.Sequential(*model)).parameters()


def state_of(model: nn.Module | Sequence[nn.Module]) -> dict[str, Tensor]:
    """Parameters and buffers by name; a list's under the names of `nn.Sequential`."""
    return (model if isinstance(model, nn.Module) else nn.Sequential(*model)).state_dict()


def copy_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state of its own, which later steps leave alone."""
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_same_state(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Both have the same names in the same order, and every tensor is equal to the last bit."""
    assert list(ours) == list(plain)
    different = [name for name in plain if not torch.equal(ours[name], plain[name])]
    assert not different, f"these differ: {different}"


def text_batches(
    steps: int, batch: int = 8, length: int = 12, vocabulary: int = 64, seed: int = 5
) -> list[dict[str, Tensor]]:
    """Batches of random bytes with the next byte at each position as label.

    8 sequences are four micro-batches of one shape; 10 are pieces of 3, 3, 3 and 1, which takes twice as many captures.
    """
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(steps):
        text = torch.randint(0, vocabulary, (batch, length + 1), generator=generator)
        result.append({"input_ids": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()})
    return result


def as_pairs(batches: Sequence[dict[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The same batches for a list of modules."""
    return [(batch["input_ids"], batch["labels"]) for batch in batches]
