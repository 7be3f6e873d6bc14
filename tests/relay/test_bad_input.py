"""Batches and options that the relay refuses: each a clear error that says what is wrong, with nothing half done."""

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relay
from hal.errors import Unavailable
from relay.checkpoint.format import Checkpoint
from relay.errors import BatchError, CaptureError
from tests.support import reference
from tests.support.zoo.plain_models import Build
from tests.support.zoo.unspoiled import a_list, gpt, list_batch, text

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


@pytest.mark.parametrize("batch", [list(text().values()), text()["input_ids"], None, "text"])
def test_a_whole_model_wants_a_mapping(build: Build, batch: Any) -> None:
    with pytest.raises(BatchError, match="mapping"):
        build(gpt()).step(batch)


@pytest.mark.parametrize("batch", [{"inputs": 1}, list_batch()[0], (list_batch()[0],), None, (1, 2, 3)])
def test_a_list_of_modules_wants_a_pair(build: Build, batch: Any) -> None:
    with pytest.raises(BatchError, match="pair"):
        build(a_list(), loss=nn.functional.mse_loss).step(batch)


def test_inputs_and_targets_of_unequal_lengths_are_refused_with_shape_and_length(build: Build) -> None:
    inputs, targets = list_batch()
    with pytest.raises(BatchError, match=r"targets .*\(7, 2\).* 8 samples"):
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
            trainer.step(text(0))
        with pytest.raises(BatchError):
            trainer.step({})
        found.append(trainer.step(batch).loss)
    assert found == losses
    reference.assert_same_state(model.state_dict(), plain.state_dict())


def linears() -> list[nn.Module]:
    return [nn.Linear(4, 8), nn.Linear(8, 3)]


def class_batch(inputs: torch.dtype = torch.float32, targets: torch.dtype = torch.int64) -> tuple[torch.Tensor, ...]:
    return torch.ones(8, 4).to(inputs), torch.ones(8).to(targets)


@pytest.mark.parametrize(
    ("make", "batch", "parts"),
    [
        (linears, class_batch(torch.float64), ["layer '0'", "float64", "float32"]),
        (linears, class_batch(torch.float16), ["layer '0'", "float16", "float32"]),
        (linears, class_batch(torch.int64), ["layer '0'", "int64", "float32"]),
        (linears, class_batch(targets=torch.int32), ["layer '1'", "loss", "int32", "int64"]),
        (linears, class_batch(targets=torch.float32), ["loss", "int64", "float32"]),
        (lambda: [nn.Sequential(nn.BatchNorm1d(4)), *linears()], class_batch(torch.float64), ["layer '0'", "float64"]),
    ],
    ids=["double", "half", "int", "int32 targets", "float targets", "norm of double"],
)
@pytest.mark.sample(3)
def test_what_no_kernel_takes_is_refused_before_anything_runs_with_layer_and_dtypes(
    build: Build, caplog: pytest.LogCaptureFixture, make: Any, batch: Any, parts: list[str]
) -> None:
    modules = make()
    with pytest.raises(RuntimeError):  # PyTorch takes it no more than we do
        nn.functional.cross_entropy(nn.Sequential(*modules)(batch[0]), batch[1])
    trainer = build(modules, loss=nn.functional.cross_entropy, device="cpu:discrete")
    with pytest.raises(CaptureError) as refused:
        trainer.step(batch)
    for part in parts:
        assert part in str(refused.value)
    assert not [
        record for record in caplog.records if record.name.startswith("torch") and record.levelno >= logging.WARNING
    ]
    trainer.step(class_batch())


def test_labels_of_bytes_and_of_other_dtypes_that_pytorch_takes_train_as_there(build: Build) -> None:
    batch = class_batch(targets=torch.uint8)
    torch.manual_seed(0)
    plain = nn.Sequential(*linears())
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="eagerly"):
        found = build(linears(), loss=nn.functional.cross_entropy, microbatches=1).step(batch).loss
    assert found == nn.functional.cross_entropy(plain(batch[0]), batch[1]).item()


def test_a_label_out_of_range_is_an_error_that_names_the_layer_as_one(build: Build) -> None:
    inputs, targets = class_batch()
    with pytest.raises(IndexError, match=r"Layer '\d' indexes with \d+ in micro-batch 0"):
        build(linears(), loss=nn.functional.cross_entropy).step((inputs, targets + 7))


@pytest.mark.parametrize(
    ("active", "message"),
    [([], "every module"), ("0", r"active_layers='0' must be a list"), (1, r"active_layers=1 must be a list")],
)
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_active_layers_of_a_list_are_a_list_with_at_least_one(
    build: Build, call: str, active: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(build(linears(), loss=nn.functional.cross_entropy), call)(class_batch(), active_layers=active)


# **** how a trainer is made ****


@pytest.mark.parametrize(("model", "names"), [(a_list, "x"), (a_list, ["x"]), (gpt, "mask")])
def test_shared_inputs_are_a_list_of_names_for_a_whole_model(model: Any, names: Any) -> None:
    made = model()
    with pytest.raises(ValueError, match="shared_inputs"):
        relay.Trainer(made, loss=nn.functional.mse_loss if isinstance(made, list) else None, shared_inputs=names)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_scale_that_has_no_effect_is_said(build: Build, precision: str) -> None:
    with pytest.warns(UserWarning, match=rf"loss_scale=1024.0 has no effect with precision='{precision}'") as caught:
        build(gpt(), precision=precision, loss_scale=1024.0)
    assert caught[0].filename != relay.trainer.__file__


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
        ({"param_groups": [{"params": ["nothing.*"], "lr": 0.1}]}, "nothing"),
        ({"param_groups": [{"params": ["*"], "momentum": 0.1}]}, "momentum"),
        ({"loss_scale": True}, "loss_scale=True"),
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
    ("former", "present"),
    [
        ("programs", "max_cached_programs"),
        ("stall_seconds", "stall_timeout"),
        ("parameter_groups", "param_groups"),
    ],
)
def test_a_former_name_of_an_option_is_refused_with_the_new_name(former: str, present: str) -> None:
    with pytest.raises(TypeError, match=rf"Trainer\(\) takes no '{former}'\. It is called '{present}' now\."):
        relay.Trainer(gpt(), **{former: None})  # type: ignore[arg-type]


def test_a_former_value_of_an_option_is_refused_with_the_new_value() -> None:
    with pytest.raises(ValueError, match="'repeat' is called 'retry' now"):
        relay.Trainer(gpt(), on_device_lost="repeat")


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_former_name_of_an_argument_of_a_step_is_refused_with_the_new_name(build: Build, call: str) -> None:
    with pytest.raises(TypeError, match=rf"Trainer\.{call}\(\) takes no 'active'\. It is called 'active_layers' now"):
        getattr(build(gpt()), call)(text(), active=[0])


def test_a_former_name_of_an_argument_of_checkpoints_is_refused_and_not_taken_as_an_object_of_the_run(
    build: Build, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=r"Checkpoints\(\) takes no 'facts'\. It is called 'metadata' now"):
        relay.Checkpoints(tmp_path, build(gpt()), facts={"run": 1})
    with relay.Checkpoints(tmp_path, build(gpt()), metadata={"run": 1}) as checkpoints:
        path = checkpoints.save()
    assert Checkpoint(path).manifest.user == {"run": 1}


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


def test_a_model_that_was_built_empty_and_never_loaded_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = gpt()
    with pytest.raises(ValueError, match=r"'\S+' has no memory: .*load_weights"):
        relay.Trainer(model)
