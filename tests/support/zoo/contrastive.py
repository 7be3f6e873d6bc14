"""Losses that compare the samples of a batch, with a small list of two-tower layers and a batch for them."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, WIDTH, OUT = 11, 6, 5
RATE = 2.0**20
"""So large a learning rate that a weight after a step of SGD is its gradient."""

Pair = tuple[Tensor, Tensor]
Batch = tuple[Pair, dict[str, Tensor]]


def drawn(size: int = BATCH) -> Batch:
    generator = torch.Generator().manual_seed(5)
    left, right, negatives = torch.randn(3, size, WIDTH, generator=generator)
    targets = {
        "label": torch.randint(0, 3, (size,), generator=generator),
        "relevance": torch.rand(size, generator=generator),
        "happened": (torch.rand(size, generator=generator) < 0.7).float(),
        "kept": (torch.rand(size, generator=generator) < 0.8).float(),
    }
    return (torch.cat([left, negatives], 1), torch.cat([right, negatives], 1)), targets


class Towers(nn.Module):
    """A layer of two towers: (left, right) -> (left, right)."""

    def __init__(self, into: int, out: int, last: bool) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(into, out), nn.Linear(into, out)
        self.last = last

    def forward(self, pair: Pair) -> Pair:
        left, right = self.left(pair[0]), self.right(pair[1])
        return (left, right) if self.last else (left.tanh(), right.tanh())


def towers() -> list[nn.Module]:
    torch.manual_seed(1)
    return [Towers(2 * WIDTH, 8, False), Towers(8, 8, False), Towers(8, OUT, True)]


def unit(value: Tensor) -> Tensor:
    return value / value.square().sum(-1, keepdim=True).sqrt()


def image_and_text(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    scores = unit(pair[0]) @ unit(pair[1]).T * math.exp(1.5)
    own = torch.arange(len(scores))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2


def pairwise_sigmoid(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    scores = unit(pair[0]) @ unit(pair[1]).T * 4 - 2
    return -F.logsigmoid(scores * (2 * torch.eye(len(scores)) - 1)).sum() / len(scores)


def in_batch_negatives(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(pair[0] @ pair[1].T, torch.arange(len(pair[0])))


def with_hard_negatives(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    hard = pair[1].flip(-1)  # another view of the right side stands for a mined negative
    documents = torch.cat([pair[1], hard])
    return F.cross_entropy(pair[0] @ documents.T, torch.arange(len(pair[0])))


def two_views(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    views = unit(torch.cat(pair))
    scores = views @ views.T / 0.5 - torch.eye(len(views)) * 1e9
    return F.cross_entropy(scores, torch.arange(len(views)).roll(len(pair[0])))


def supervised(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    scores, label = unit(pair[0]) @ unit(pair[0]).T / 0.3, targets["label"]
    other = 1 - torch.eye(len(scores))
    same = (label[:, None] == label[None, :]).float() * other
    likely = scores - (scores.exp() * other).sum(1, keepdim=True).log()
    return -((same * likely).sum(1) / same.sum(1).clamp(min=1)).mean()


def triplet_by_distances(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    norms = pair[0].square().sum(1)
    distances = (norms[:, None] + norms[None, :] - 2 * pair[0] @ pair[0].T + 1e-3).clamp(min=1e-6).sqrt()
    same = targets["label"][:, None] == targets["label"][None, :]
    furthest = distances.masked_fill(~same, -1.0).amax(1)
    nearest = distances.masked_fill(same, 1e4).amin(1)
    return F.relu(furthest - nearest + 0.5).mean()


def variance_and_covariance(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    found = 25 * (pair[0] - pair[1]).square().mean()
    for one in pair:
        centred = one - one.mean(0)
        deviation = (centred.square().sum(0) / (len(one) - 1) + 1e-4).sqrt()
        covariance = centred.T @ centred / (len(one) - 1)
        found = found + 25 * F.relu(1 - deviation).mean()
        found = found + (covariance * (1 - torch.eye(OUT))).square().sum() / OUT
    return found


def cross_correlation(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    left, right = ((one - one.mean(0)) / (one.square().mean(0) + 1e-3).sqrt() for one in pair)
    found = left.T @ right / len(left) - torch.eye(OUT)
    return (found.square() * (0.01 + 0.99 * torch.eye(OUT))).sum()


def pairwise_ranking(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    scores, relevance = pair[0].sum(1), targets["relevance"]
    before = (relevance[:, None] > relevance[None, :]).float()
    return (F.softplus(scores[None, :] - scores[:, None]) * before).sum() / before.sum()


def listwise_ranking(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    scores = (pair[0] * pair[1]).sum(1)
    return -((8 * targets["relevance"]).softmax(0) * scores.log_softmax(0)).sum()


def partial_likelihood(pair: Pair, targets: dict[str, Tensor]) -> Tensor:
    """Cox: each sample against those that were at risk when its event happened."""
    risk, time = pair[0].sum(1), targets["relevance"]
    at_risk = (time[None, :] >= time[:, None]).float()
    against = (risk.exp()[None, :] * at_risk).sum(1).log()
    return -((risk - against) * targets["happened"]).sum() / targets["happened"].sum()


LOSSES = (
    image_and_text, pairwise_sigmoid, in_batch_negatives, with_hard_negatives, two_views, supervised,
    triplet_by_distances, variance_and_covariance, cross_correlation, pairwise_ranking, listwise_ranking,
    partial_likelihood,
)  # fmt: skip
Loss = Callable[[Pair, dict[str, Tensor]], Tensor]
