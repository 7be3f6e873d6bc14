"""Small models and batches with nothing wrong in them, for tests that spoil one thing."""

import torch
from torch import Tensor, nn

from relay.models import GPT
from tests.support import reference
from tests.support.zoo import plain_models


def gpt() -> GPT:
    return plain_models.gpt(2, vocabulary=32)


def a_list() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)]


def list_batch(batch: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, 4), torch.randn(batch, 2)


def text(batch: int = 8) -> dict[str, Tensor]:
    return reference.text_batches(1, batch, vocabulary=32)[0]
