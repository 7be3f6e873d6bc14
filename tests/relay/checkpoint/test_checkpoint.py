"""A run that was saved and resumed is the run that was never interrupted, to the last bit."""

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import relay
from relay.checkpoint.format import Checkpoint
from relay.errors import CheckpointError
from relay.models import GPT
from tests.support import reference
from tests.support.zoo import plain_models
from tests.support.zoo.plain_models import Build, everything

STEPS = 6
BATCHES = reference.text_batches(STEPS, batch=6, vocabulary=32)

gpt = functools.partial(plain_models.gpt, layers=2, vocabulary=32)


@pytest.fixture
def build(build: Build) -> Build:
    """Makes trainers, of a small GPT where no model is given, and closes them after the test."""
    return lambda model=None, **options: build(gpt() if model is None else model, **{"microbatches": 2, **options})


def stranger() -> GPT:
    """The same architecture with other weights: what is equal after loading came out of the checkpoint."""
    model = gpt()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert sorted(left) == sorted(right)
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different, f"these differ: {different}"


RUNS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD with momentum": {"optimizer": relay.SGD(lr=0.1, momentum=0.9)},
    "LAMB": {"optimizer": relay.LAMB(lr=0.01)},
    "AMSGrad": {"optimizer": relay.AdamW(amsgrad=True)},
    "torch's Adagrad": {"optimizer": functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5)},
    "torch's NAdam": {"optimizer": functools.partial(torch.optim.NAdam, lr=0.01)},
    "torch's SGD": {"optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)},
    "clipping": {"clip_grad_norm": 0.1},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16", "clip_grad_norm": 0.5},
    "8-bit states": {"state_dtype": "int8"},
    "bf16 states": {"state_dtype": "bf16"},
    "discrete device": {"device": "cpu:discrete", "stash": "host"},
    "groups": {"param_groups": [{"params": "*.bias", "weight_decay": 0.0, "lr": 0.01}]},
}


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.sample("AMSGrad", "torch's Adagrad", "fp16", "8-bit states")
def test_resuming_from_any_step_is_equal_to_not_having_stopped(build: Build, tmp_path: Path, kind: str) -> None:
    unbroken = build(gpt(dropout=0.1), seed=7, **RUNS[kind])
    losses = []
    for number, batch in enumerate(BATCHES):
        unbroken.save(tmp_path / str(number))
        losses.append(unbroken.step(batch).loss)
    final = everything(unbroken)
    resumed = build(gpt(dropout=0.1), **RUNS[kind])  # new at first, and then one that has been used
    for number in (3, 4, 2, 5, 0, 1):
        assert resumed.load(tmp_path / str(number)) == number
        assert [resumed.step(batch).loss for batch in BATCHES[number:]] == losses[number:]
        assert_same(everything(resumed), final)


def test_layout_devices_slots_and_stash_do_not_matter(build: Build, tmp_path: Path) -> None:
    first = build(device="cpu", slots=2)
    for batch in BATCHES[:3]:
        first.step(batch)
    first.save(tmp_path / "c", shard_bytes=2000)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) > 5
    for batch in BATCHES[3:]:
        first.step(batch)
    other = build(stranger(), device="cpu:discrete", slots=3, stash="host")
    other.load(tmp_path / "c")
    for batch in BATCHES[3:]:
        other.step(batch)
    assert_same(everything(other), everything(first))


def test_loading_and_saving_again_changes_nothing(build: Build, tmp_path: Path) -> None:
    trainer = build(state_dtype="int8")
    trainer.step(BATCHES[0])
    trainer.save(tmp_path / "one")
    other = build(stranger(), state_dtype="int8")
    other.load(tmp_path / "one")
    other.save(tmp_path / "two")
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "two").iterdir())
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


KEPT = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("int8", "int8"), ("int8", "bf16"), ("int8", "fp32")]


@pytest.mark.parametrize(("was", "becomes"), KEPT)
@pytest.mark.sample(2)
def test_states_change_their_dtype_where_no_bit_is_lost(build: Build, tmp_path: Path, was: str, becomes: str) -> None:
    trainer = build(state_dtype=was)
    trainer.step(BATCHES[0])
    trainer.save(tmp_path / "c")
    name = "blocks.0.feed_in.weight"
    before = trainer._session.server.optimizer.state(name)["exp_avg"]
    before = before.to_float() if was == "int8" else before.float().view(-1)
    other = build(stranger(), state_dtype=becomes)
    other.prepare(BATCHES[0])
    other.load(tmp_path / "c")
    after = other._session.server.optimizer.state(name)["exp_avg"]
    after = after.to_float() if becomes == "int8" else after.float().view(-1)
    assert torch.equal(after, before)


@pytest.mark.parametrize(("was", "becomes"), [("fp32", "bf16"), ("fp32", "int8"), ("bf16", "int8")])
def test_states_that_would_be_rounded_are_refused(build: Build, tmp_path: Path, was: str, becomes: str) -> None:
    trainer = build(state_dtype=was)
    trainer.step(BATCHES[0])
    trainer.save(tmp_path / "c")
    other = build(stranger(), state_dtype=becomes)
    before = reference.copy_of(other.state_dict())
    match = rf"is {was} in the checkpoint and {becomes} here.*state_dtype='{was}', or load with weights_only=True"
    with pytest.raises(CheckpointError, match=match):
        other.load(tmp_path / "c")
    reference.assert_same_state(other.state_dict(), before)
    assert other.load(tmp_path / "c", weights_only=True) == 0


def test_batch_statistics_are_part_of_it(build: Build, tmp_path: Path) -> None:
    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [
            nn.Linear(4, 4),
            *(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)),
            nn.Linear(4, 2),
        ]

    batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(4)]
    trainer = build(layers(), loss=nn.functional.mse_loss)
    trainer.step(batches[0])
    trainer.save(tmp_path / "c")
    for batch in batches[1:]:
        trainer.step(batch)
    other = build(layers(), loss=nn.functional.mse_loss)
    other.load(tmp_path / "c")
    for batch in batches[1:]:
        other.step(batch)
    assert_same(everything(other), everything(trainer))


def test_the_files_can_be_read_without_us(build: Build, tmp_path: Path) -> None:
    trainer = build()
    trainer.step(BATCHES[0])
    trainer.save(tmp_path / "c")
    found: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "c").glob("*.safetensors"):
        found |= safetensors.torch.load_file(file)
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(found[f"weights/{name}"], tensor)
    assert json.loads((tmp_path / "c" / "manifest.json").read_text())["step"] == 1


def test_a_schedule_and_the_data_go_with_it(build: Build, tmp_path: Path) -> None:
    def scheduled(trainer: relay.Trainer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.SequentialLR(
            trainer.optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(trainer.optimizer, 0.1, total_iters=2),
                torch.optim.lr_scheduler.MultiStepLR(trainer.optimizer, [1, 3], gamma=0.5),
            ],
            [2],
        )

    trainer = build()
    schedule = scheduled(trainer)
    for batch in BATCHES[:3]:
        trainer.step(batch)
        schedule.step()
    trainer.save(tmp_path / "c", schedule=schedule, note={"corpus": "ours", "places": (1, 2)})
    other = build(stranger())
    other_schedule = scheduled(other)
    other.load(tmp_path / "c", schedule=other_schedule)
    assert Checkpoint(tmp_path / "c").manifest.user["note"] == {"corpus": "ours", "places": (1, 2)}
    for batch in BATCHES[3:]:
        for trained, its_schedule in ((trainer, schedule), (other, other_schedule)):
            trained.step(batch)
            its_schedule.step()
        assert other.param_groups[0]["lr"] == trainer.param_groups[0]["lr"]
    assert_same(everything(other), everything(trainer))


def test_weights_alone_can_begin_another_run(build: Build, tmp_path: Path) -> None:
    trainer = build()
    trainer.step(BATCHES[0])
    trainer.save(tmp_path / "c")
    other = build(stranger(), optimizer=relay.SGD(lr=0.1))
    with pytest.raises(CheckpointError, match="saved with AdamW, the trainer has SGD"):
        other.load(tmp_path / "c")
    assert other.load(tmp_path / "c", weights_only=True) == 0
    reference.assert_same_state(other.state_dict(), trainer.state_dict())


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(build: Build, tmp_path: Path) -> None:
    build().save(tmp_path / "c")
    for model in (gpt(layers=3), gpt(hidden=32), gpt().double()):
        before = reference.copy_of(model.state_dict())
        other = build(model)
        with pytest.raises(CheckpointError, match="parameters"):
            other.load(tmp_path / "c")
        reference.assert_same_state(other.state_dict(), before)


# **** behind the training ****


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}, {"device": "cpu:discrete"}, {"state_dtype": "int8"}])
@pytest.mark.parametrize("memory", ["1GB", "1B"])
@pytest.mark.sample(3)
def test_a_checkpoint_written_behind_the_training_is_that_of_one_moment(
    build: Build, tmp_path: Path, options: dict[str, Any], memory: str
) -> None:
    trainer = build(**options)
    trainer.step(BATCHES[0])
    trainer.save(tmp_path / "standing", shard_bytes=3000)
    saving = trainer.save(tmp_path / "moving", background=True, memory=memory, shard_bytes=3000)
    for batch in BATCHES[1:]:
        trainer.step(batch)
    saving.wait()
    for file in sorted((tmp_path / "standing").iterdir()):
        assert (tmp_path / "moving" / file.name).read_bytes() == file.read_bytes(), file.name
    plain = build(**options)
    for batch in BATCHES:
        plain.step(batch)
    assert_same(everything(trainer), everything(plain))
    assert not [row for row in trainer.ledger.rows() if row[0] == "copies for a checkpoint"]


def test_a_failure_behind_the_training_comes_up_and_training_goes_on(build: Build, tmp_path: Path) -> None:
    trainer = build()
    trainer.step(BATCHES[0])
    (tmp_path / "file").write_text("in the way")
    saving = trainer.save(tmp_path / "file" / "c", background=True)
    with pytest.raises(CheckpointError):
        saving.wait()
    trainer.step(BATCHES[1])
    with pytest.raises(CheckpointError):
        trainer.wait_saved()
    trainer.save(tmp_path / "c")


# **** replacing ****


def test_a_checkpoint_takes_the_place_of_the_one_before(build: Build, tmp_path: Path) -> None:
    trainer = build()
    for batch in BATCHES[:2]:
        trainer.step(batch)
        trainer.save(tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert Checkpoint(tmp_path / "c").manifest.step == 2


def test_other_peoples_folders_and_files_are_left_alone(build: Build, tmp_path: Path) -> None:
    trainer = build()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for name in ("folder", "file"):
        with pytest.raises(CheckpointError, match="give"):
            trainer.save(tmp_path / name)
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "years of work"


def test_one_cut_short_between_two_renames_is_found(build: Build, tmp_path: Path) -> None:
    trainer = build()
    trainer.save(tmp_path / "c")
    os.rename(tmp_path / "c", tmp_path / ".c.previous")
    assert Checkpoint(tmp_path / "c").manifest.step == 0
    trainer.step(BATCHES[0])
    trainer.save(tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"] or Checkpoint(tmp_path / "c").manifest.step == 1
