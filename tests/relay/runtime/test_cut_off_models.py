"""What no gradient comes back to is left alone, as plain PyTorch leaves it: no update, no decay, no states.

By `no_grad` around layers, `detach` between and within them, or for want of a use. The optimizer decays strongly, so
that a gradient of zeros in place of none shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from relay.errors import PartitionError
from tests.support import mixed_reference, reference
from tests.support.zoo.cut_off_models import InTheMiddle, NoLoss, SometimesDetached, TiedBefore
from tests.support.zoo.plain_models import Build, batches
from tests.support.zoo.table import Entry, Group, cases, entries

pytestmark = pytest.mark.filterwarnings("ignore:layer", "ignore:None of the inputs")

SETTINGS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.5}
decaying = functools.partial(torch.optim.AdamW, **SETTINGS, fused=True)


def pairs(given: list[dict[str, Tensor]]) -> list[Any]:
    return [tuple(batch.values()) for batch in given]


def check(
    build: Build,
    make: Callable[[], Any],
    microbatches: int = 2,
    *,
    steps: int = 3,
    untouched: bool = True,
    **options: Any,
) -> None:
    """Both train, and every loss, norm, tensor and state is compared; some parameters are left alone to the end."""
    torch.manual_seed(0)
    ours = make()
    torch.manual_seed(0)
    plain = make()
    loss = nn.functional.mse_loss if isinstance(plain, list) else None
    given: list[Any] = pairs(batches(steps)) if loss else batches(steps)
    stepper = decaying([parameter for parameter in reference.parameters_of(plain) if parameter.requires_grad])
    found = mixed_reference.train(
        plain, given, microbatches, loss=loss, optimizer=stepper, precision=options.get("precision", "fp32"),
        clip_norm=options.get("clip_grad_norm"),
    )  # fmt: skip
    if loss:
        options["loss"] = loss
    trainer = build(ours, optimizer=relay.AdamW(**SETTINGS), microbatches=microbatches, **options)
    metrics = [trainer.step(batch) for batch in given]
    assert [step.loss for step in metrics] == found.losses
    if "clip_grad_norm" in options:
        assert [step.grad_norm for step in metrics] == found.norms
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))
    whole = nn.Sequential(*plain) if loss else plain
    without = {name for name, parameter in whole.named_parameters() if not stepper.state[parameter]}
    states = {name: trainer._session.server.optimizer.state(name) for name, _ in whole.named_parameters()}
    # Where data decide there is room for states beforehand; nothing is in it.
    assert {name for name, state in states.items() if not state or not state["step"]} == without
    assert bool(without) == untouched


MODELS = entries(Group.CUT_OFF)


@pytest.mark.parametrize("entry", cases(Group.CUT_OFF))
@pytest.mark.sample(2)
def test_what_no_gradient_reaches_in_a_model_is_left_alone(build: Build, entry: Entry) -> None:
    check(build, entry.make, entry.microbatches, untouched=entry.untouched)


@pytest.mark.parametrize("entry", cases(Group.CUT_OFF_LIST))
@pytest.mark.sample(2)
def test_what_no_gradient_reaches_in_a_list_is_left_alone(build: Build, entry: Entry) -> None:
    check(build, entry.make, entry.microbatches, untouched=entry.untouched)


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
@pytest.mark.sample(5)
def test_what_no_gradient_reaches_is_left_alone_whatever_the_options(build: Build, name: str, option: str) -> None:
    check(build, MODELS[name].make, **OPTIONS[option])


def test_what_data_cut_off_in_some_micro_batches_alone_is_updated(build: Build) -> None:
    """A parameter has a gradient where one micro-batch reaches it, and in steps without any it is left alone."""
    cuts = []

    class Looking(SometimesDetached):
        def forward(self, value: Tensor) -> Tensor:
            cuts[-1].append(bool(value[0, 0, 0] > 0))
            return super().forward(value)

    model = InTheMiddle(Looking)
    torch.manual_seed(0)
    given = batches(6)
    for batch in given:
        cuts.append([])
        for piece in reference.cut(batch, 2):
            model(**piece)
    assert {frozenset(cut) for cut in cuts} == {frozenset([True]), frozenset([False]), frozenset([True, False])}
    check(build, lambda: InTheMiddle(SometimesDetached), steps=6, untouched=False)


def test_a_tied_parameter_that_data_cut_off_in_some_steps_is_left_alone_in_those(build: Build) -> None:
    """With one micro-batch, where there is one order of summation."""
    check(build, TiedBefore, 1, steps=6, untouched=False)


@pytest.mark.parametrize("name", ["no_grad", "inference_mode", "detach between", "detaches its input"])
def test_on_a_device_that_takes_graphs_of_core_ops(build: Build, name: str) -> None:
    """To rounding; what is left alone is left alone to the bit."""
    torch.manual_seed(0)
    ours = MODELS[name].make()
    torch.manual_seed(0)
    plain = MODELS[name].make()
    before = reference.copy_of(plain.state_dict())
    losses = reference.train(plain, batches(3), 2, optimizer=decaying)
    trainer = build(ours, optimizer=relay.AdamW(**SETTINGS), microbatches=2, device="numpy")
    assert [trainer.step(batch).loss for batch in batches(3)] == pytest.approx(losses, rel=1e-4)
    same = {key for key, tensor in plain.state_dict().items() if torch.equal(tensor, before[key])}
    assert same
    assert {key for key, tensor in trainer.state_dict().items() if torch.equal(tensor, before[key])} == same


@pytest.mark.parametrize("device", ["cpu", "numpy"])
def test_a_loss_that_nothing_trained_is_in_is_refused(build: Build, device: str) -> None:
    trainer = build(NoLoss(), microbatches=2, device=device)
    with pytest.raises(PartitionError, match="depends on no parameter that is trained"):
        trainer.step(batches(1)[0])
