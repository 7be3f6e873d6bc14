"""Batches and options that the relay refuses: each a clear error that says what is wrong, with nothing half done."""

import functools
from typing import Any

import pytest
import reference
import torch
from plain_models import Build
from torch import nn
from unspoiled import a_list, gpt, list_batch, text

import relay
from hal.errors import Unavailable
from relay.errors import BatchError

# **** batches ****


@pytest.mark.parametrize("call", ["step", "evaluate", "predict"])
def test_an_empty_batch_is_refused(build: Build, call: str) -> None:
    with pytest.raises(BatchError, match="empty"):
        getattr(build(gpt()), call)({name: tensor[:0] for name, tensor in text().items()})
    batch = list_batch(0) if call != "predict" else list_batch(0)[0]
    with pytest.raises(BatchError, match="empty"):
        getattr(build(a_list(), loss=nn.functional.mse_loss), call)(batch)


def test_a_batch_without_tensors_is_refused(build: Build) -> None:
    with pytest.raises(BatchError, match="no tensors"):
        build(gpt()).step({})


def test_a_batch_of_scalars_is_refused(build: Build) -> None:
    with pytest.raises(BatchError, match="dimension"):
        build(gpt()).step({"input_ids": torch.tensor(3)})


def test_a_batch_smaller_than_the_number_of_micro_batches_is_refused_with_both_numbers(build: Build) -> None:
    with pytest.raises(BatchError, match=r"(?s)batch of 3 .* 4 micro-batches.*microbatches=3"):
        build(gpt(), microbatches=4).step(text(3))


@pytest.mark.parametrize("batch", [list(text().values()), text()["input_ids"], None, "text"])
def test_a_whole_model_wants_a_mapping(build: Build, batch: Any) -> None:
    with pytest.raises(BatchError, match="mapping"):
        build(gpt()).step(batch)


@pytest.mark.parametrize("batch", [{"inputs": 1}, list_batch()[0], (list_batch()[0],), None, (1, 2, 3)])
def test_a_list_of_modules_wants_a_pair(build: Build, batch: Any) -> None:
    with pytest.raises(BatchError, match="pair"):
        build(a_list(), loss=nn.functional.mse_loss).step(batch)


def test_inputs_and_targets_of_unequal_lengths_are_refused_with_their_shapes(build: Build) -> None:
    inputs, targets = list_batch()
    with pytest.raises(BatchError, match=r"\(8, 4\).*\(7, 2\)"):
        build(a_list(), loss=nn.functional.mse_loss).step((inputs, targets[:7]))


def test_labels_of_another_length_than_the_inputs_are_refused(build: Build) -> None:
    batch = text()
    batch["labels"] = batch["labels"][:7]
    with pytest.raises(relay.RelayError):
        build(gpt()).step(batch)


def test_a_batch_whose_targets_are_all_masked_is_refused(build: Build) -> None:
    batch = text()
    batch["labels"].fill_(reference.IGNORED)
    with pytest.raises(BatchError, match="masked"):
        build(gpt()).step(batch)


def test_a_refused_batch_changes_nothing_and_training_goes_on(build: Build) -> None:
    model, plain = gpt(), gpt()
    batches = reference.text_batches(2, 8, vocabulary=32)
    losses = reference.train(plain, batches)
    trainer = build(model)
    found = []
    for batch in batches:
        with pytest.raises(BatchError):
            trainer.step(text(3))
        with pytest.raises(BatchError):
            trainer.step({})
        found.append(trainer.step(batch).loss)
    assert found == losses
    reference.assert_same_state(model.state_dict(), plain.state_dict())


# **** how a trainer is made ****


@pytest.mark.parametrize("device", ["quantum:0", "cpu:7", ""])
def test_an_unknown_device_is_refused_with_those_there_are(device: str) -> None:
    with pytest.raises(Unavailable, match="cpu"):
        relay.Trainer(gpt(), device=device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "microbatches=0"),
        ({"microbatches": 2.5}, "microbatches=2.5"),
        ({"slots": 0}, "slots=0"),
        ({"slots": "two"}, "slots='two'"),
        ({"stash": "disk"}, "stash='disk'"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"state_dtype": "int4"}, "state_dtype='int4'"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm=0.0"),
        ({"clip_grad_value": -1.0}, "clip_grad_value=-1.0"),
        ({"parameter_groups": [{"params": ["nothing.*"], "lr": 0.1}]}, "nothing"),
        ({"parameter_groups": [{"params": ["*"], "momentum": 0.1}]}, "momentum"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"capacity": "much"}, "much"),
        ({"capacity": 0}, "0"),
        ({"loss": nn.functional.mse_loss}, "loss="),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_with_its_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        relay.Trainer(gpt(), **options)


@pytest.mark.parametrize(
    ("model", "loss", "error"),
    [
        ([], nn.functional.mse_loss, ValueError),
        ([nn.Linear(2, 2)], None, ValueError),
        ([nn.Linear(2, 2), torch.relu], nn.functional.mse_loss, TypeError),
        ("gpt", nn.functional.mse_loss, TypeError),
        (None, None, (TypeError, ValueError)),
    ],
    ids=["empty list", "list without loss", "a function in it", "a string", "None"],
)
def test_what_is_no_model_is_refused(model: Any, loss: Any, error: Any) -> None:
    with pytest.raises(error):
        relay.Trainer(model, loss=loss)


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.AdamW, functools.partial(dict, lr=1), 0.1])
def test_what_is_no_optimizer_is_refused_with_what_to_give(optimizer: Any) -> None:
    with pytest.raises(TypeError, match=r"relay\.AdamW.*functools\.partial"):
        relay.Trainer(gpt(), optimizer=optimizer)


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"eps": -1e-8}, {"weight_decay": -0.1}, {"betas": (1.0, 0.9)}])
def test_hyperparameters_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="betas" if "betas" in bad else "negative"):
        relay.AdamW(**bad)


def test_the_optimizer_is_not_stepped_by_hand(build: Build) -> None:
    with pytest.raises(RuntimeError, match=r"trainer\.step"):
        build(gpt()).optimizer.step()
