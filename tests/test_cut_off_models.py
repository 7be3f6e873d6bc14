"""What no gradient comes back to is left alone, as plain PyTorch leaves it: no update, no decay, no states.

By `no_grad` around layers, `detach` between and within them, or for want of a use. The optimizer decays strongly, so
that a gradient of zeros in place of none shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mixed_reference
import pytest
import reference
import torch
from cut_off_models import LISTS, WHOLE, DetachesInput, NoGradLayers, Recurrent
from plain_models import WIDTH, Block, Build, Stack, batches
from torch import Tensor, nn

import relay
from relay.errors import PartitionError

pytestmark = pytest.mark.filterwarnings("ignore:layer", "ignore:None of the inputs")

SETTINGS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.5}
decaying = functools.partial(torch.optim.AdamW, **SETTINGS, fused=True)


def pairs(given: list[dict[str, Tensor]]) -> list[Any]:
    return [tuple(batch.values()) for batch in given]


def check(
    build: Build, make: Callable[[], Any], microbatches: int = 2, *, reached: bool = False, **options: Any
) -> relay.Trainer:
    """Both train, and every loss, norm, tensor and state is compared; some parameter is left alone."""
    torch.manual_seed(0)
    ours = make()
    torch.manual_seed(0)
    plain = make()
    loss = nn.functional.mse_loss if isinstance(plain, list) else None
    given: list[Any] = pairs(batches(3)) if loss else batches(3)
    stepper = decaying([one for one in reference.parameters_of(plain) if one.requires_grad])
    found = mixed_reference.train(
        plain, given, microbatches, loss=loss, optimizer=stepper, precision=options.get("precision", "fp32"),
        clip_norm=options.get("clip_grad_norm"),
    )  # fmt: skip
    if loss:
        options["loss"] = loss
    trainer = build(ours, optimizer=relay.AdamW(**SETTINGS), microbatches=microbatches, **options)
    metrics = [trainer.step(batch) for batch in given]
    assert [one.loss for one in metrics] == found.losses
    if "clip_grad_norm" in options:
        assert [one.grad_norm for one in metrics] == found.norms
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))
    whole = nn.Sequential(*plain) if loss else plain
    untouched = {name for name, parameter in whole.named_parameters() if not stepper.state[parameter]}
    optimizer = trainer._session.server.optimizer
    assert {name for name, _ in whole.named_parameters() if not optimizer.state(name)} == untouched
    assert bool(untouched) != reached
    return trainer


@pytest.mark.parametrize("name", WHOLE)
def test_what_no_gradient_reaches_in_a_model_is_left_alone(build: Build, name: str) -> None:
    check(build, WHOLE[name], reached=name.startswith("own target"))


@pytest.mark.parametrize("name", LISTS)
def test_what_no_gradient_reaches_in_a_list_is_left_alone(build: Build, name: str) -> None:
    check(build, LISTS[name])


OPTIONS: dict[str, dict[str, Any]] = {
    "a clipped norm": {"clip_grad_norm": 0.05},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "clip_grad_norm": 0.05},
    "two layers a slot": {"layers_per_slot": 2},
    "no recompute": {"recompute": False, "device": "cpu:discrete"},
    "a stash on the host": {"stash": "host", "device": "cpu:discrete"},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["no_grad", "detach between", "decorated", "detached branch"])
def test_whatever_the_options(build: Build, name: str, option: str) -> None:
    check(build, WHOLE[name], **OPTIONS[option])
