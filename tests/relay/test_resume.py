"""Going on with a run: the data goes on where it was, the newest whole checkpoint is found, and few are kept."""

import json
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.utils.data import DataLoader, TensorDataset

import relay
from relay.checkpoint.format import Checkpoint
from relay.checkpoint_manager import Checkpoints, Terminated, newest
from relay.cli import main
from relay.data.resumable import PositionError, ResumableBatches, ShuffleSampler
from relay.errors import CheckpointError, NonFiniteLoss
from relay.models import GPT, gpt_folder
from tests.support import reference
from tests.support.shared_captures import share

BATCHES = reference.text_batches(8, batch=2, vocabulary=32)


@pytest.fixture
def trainer() -> Iterator[relay.Trainer]:
    with share(relay.Trainer(gpt(), microbatches=1)) as made:
        yield made


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=32, layers=2, hidden=8, heads=1, sequence=12, tied=False)


def spoiled() -> dict[str, torch.Tensor]:
    """A batch that no embedding has."""
    return {name: tensor + 1000 for name, tensor in BATCHES[0].items()}


# **** data ****


class Counting:
    """A source that keeps its own position, as torchdata's loaders do."""

    def __init__(self, size: int) -> None:
        self.size, self.next, self.made = size, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.next < self.size:
            self.next += 1
            self.made += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def shuffled_loader() -> DataLoader:
    data = TensorDataset(torch.arange(10))
    return DataLoader(data, batch_size=3, sampler=ShuffleSampler(10, seed=4))


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: list(range(4)),
    "function of the epoch": lambda: lambda epoch: (100 * epoch + number for number in range(4)),
    "with a state of its own": lambda: Counting(4),
    "shuffled loader": shuffled_loader,
}


def take(batches: ResumableBatches, count: int) -> list[Any]:
    found = []
    for batch in batches:
        found.append(batch[0].tolist() if isinstance(batch, list) else batch)
        if len(found) == count:
            break
    return found


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("taken", range(1, 10))
def test_going_on_neither_repeats_nor_skips_a_batch(source: str, taken: int) -> None:
    unbroken = take(ResumableBatches(SOURCES[source]()), 12)
    first = ResumableBatches(SOURCES[source]())
    assert take(first, taken) == unbroken[:taken]
    state = json.loads(json.dumps(first.state_dict()))
    second = ResumableBatches(SOURCES[source]())
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert take(second, 12 - taken) == unbroken[taken:]


def test_a_source_with_a_state_of_its_own_is_not_read_from_the_start() -> None:
    source = Counting(1000)
    batches = ResumableBatches(source)
    batches.load_state_dict({"epoch": 0, "taken": 900, "source": {"next": 900}})
    assert take(batches, 1) == [900]
    assert source.made == 1


def test_epochs_have_orders_of_their_own_that_a_seed_decides() -> None:
    orders = []
    for seed in (0, 1):
        for epoch in range(3):
            shuffle = ShuffleSampler(50, seed)
            shuffle.set_epoch(epoch)
            orders.append(tuple(shuffle))
            assert sorted(shuffle) == list(range(50))
            assert tuple(shuffle) == orders[-1]
    assert len(set(orders)) == 6


def test_ranks_get_equal_parts_of_one_order() -> None:
    whole = list(ShuffleSampler(50, 3))
    parts = [ShuffleSampler(50, 3, rank, 4) for rank in range(4)]
    assert [len(part) for part in parts] == [12] * 4
    assert [index for row in zip(*parts, strict=True) for index in row] == whole[:48]
    with pytest.raises(ValueError, match="rank=4 and count=4"):
        ShuffleSampler(50, 3, 4, 4)


@pytest.mark.parametrize(
    "state",
    [None, {}, {"epoch": -1, "taken": 0, "source": None}, {"epoch": 0, "taken": "1", "source": None}, {"epoch": 0}],
)
def test_a_malformed_position_is_refused(state: Any) -> None:
    with pytest.raises(PositionError, match="position"):
        ResumableBatches([1]).load_state_dict(state)


def test_a_position_beyond_the_data_is_refused() -> None:
    batches = ResumableBatches([1, 2])
    batches.load_state_dict({"epoch": 0, "taken": 3, "source": None})
    with pytest.raises(PositionError, match="only 2"):
        next(iter(batches))


# **** a run's checkpoints ****


def run(trainer: relay.Trainer, batches: Iterable[Any], checkpoints: Checkpoints) -> None:
    """Train as the documentation shows it."""
    with checkpoints:
        for batch in batches:
            trainer.step(batch)
            checkpoints.after_step()


def test_they_are_written_as_often_as_asked_and_the_newest_are_kept(trainer: relay.Trainer, tmp_path: Path) -> None:
    batches = ResumableBatches(BATCHES, epochs=1)
    with Checkpoints(tmp_path, trainer, every=2, keep_last=2, data=batches) as checkpoints:
        for batch in batches:
            trainer.step(batch)
            if checkpoints.after_step():
                trainer._saving.wait()  # type: ignore[union-attr]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000006", "step-000000008"]


def test_a_damaged_one_is_passed_over_and_never_the_only_whole_one_deleted(
    trainer: relay.Trainer, tmp_path: Path
) -> None:
    batches = ResumableBatches(BATCHES)
    checkpoints = Checkpoints(tmp_path, trainer, data=batches)
    stream = iter(batches)
    for _ in range(2):
        trainer.step(next(stream))
        checkpoints.save()
    weights = reference.copy_of(trainer.state_dict())
    trainer.step(next(stream))
    path = checkpoints.save()
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match="skipped.*cut off"):
        assert checkpoints.resume() == 2
    assert batches.state_dict()["taken"] == 2
    reference.assert_same_state(trainer.state_dict(), weights)
    assert newest(tmp_path) == tmp_path / "step-000000002"


def test_none_whole_is_an_error_that_says_why(trainer: relay.Trainer, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, trainer)
    assert checkpoints.resume() == 0
    trainer.step(BATCHES[0])
    (checkpoints.save() / "manifest.json").write_text("{}")
    with pytest.warns(RuntimeWarning), pytest.raises(CheckpointError, match=r"all checkpoints are damaged.*manifest"):
        checkpoints.resume()


def test_an_exception_leaves_a_checkpoint_of_the_last_whole_step(trainer: relay.Trainer, tmp_path: Path) -> None:
    batches = ResumableBatches([*BATCHES[:2], spoiled(), *BATCHES[3:]])
    with pytest.raises(Exception, match=r".") as caught:
        run(trainer, batches, Checkpoints(tmp_path, trainer, data=batches))
    assert not isinstance(caught.value, NonFiniteLoss)
    found = newest(tmp_path)
    assert found is not None
    manifest = Checkpoint(found).manifest
    assert manifest.step == 2
    assert manifest.user["data"]["taken"] == 2, "the batch that failed was not trained on"


def test_a_batch_taken_after_the_last_step_is_not_skipped_later(trainer: relay.Trainer, tmp_path: Path) -> None:
    batches = ResumableBatches(BATCHES)
    with Checkpoints(tmp_path, trainer, data=batches) as checkpoints:
        for batch in batches:
            if trainer.steps == 3:
                break
            trainer.step(batch)
            checkpoints.after_step()
    assert Checkpoint(newest(tmp_path) or tmp_path).manifest.user["data"]["taken"] == 3


def test_sigterm_ends_the_run_after_the_step_with_a_checkpoint(trainer: relay.Trainer, tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for number, batch in enumerate(BATCHES):
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    with pytest.raises(Terminated) as caught:
        run(trainer, batches(), Checkpoints(tmp_path, trainer))
    assert caught.value.code == 143
    assert Checkpoint(newest(tmp_path) or tmp_path).manifest.step == 4
    assert signal.getsignal(signal.SIGTERM) is before


# **** the command line ****

TINY = ["--layers", "2", "--hidden", "8", "--heads", "1", "--seq", "8", "--batch", "4", "--microbatches", "2"]
TINY += ["--no-sample", "--json", "--dropout", "0.1"]


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def train(out: Path, text: Path, steps: int, *more: object) -> Result:
    return command("train", *TINY, "--data", text, "--out", out, "--steps", steps, *more)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    return file


def test_a_run_on_the_command_line_goes_on_where_it_was_stopped(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tmp_path / "whole", text, 6)
    assert whole.exit_code == 0, whole.output
    steps = relay.Trainer.step

    def stops(self: relay.Trainer, batch: Any) -> Any:
        if self.steps == 4:
            raise OSError("the power went")
        return steps(self, batch)

    monkeypatch.setattr(relay.Trainer, "step", stops)
    assert train(tmp_path / "cut", text, 6, "--checkpoint-every", 2).exit_code == 1
    monkeypatch.undo()
    refused = train(tmp_path / "cut", text, 6, "--checkpoint-every", 2)
    assert refused.exit_code == 1
    assert "--resume" in json.loads(refused.stdout)["error"]
    other = train(tmp_path / "cut", text, 7, "--checkpoint-every", 2, "--resume")
    assert other.exit_code == 1
    assert "user.run.steps" in json.loads(other.stdout)["error"]
    resumed = train(tmp_path / "cut", text, 6, "--checkpoint-every", 2, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert json.loads(resumed.stdout)["steps_now"] == 2
    assert json.loads(resumed.stdout)["loss_last"] == json.loads(whole.stdout)["loss_last"]
    for name in (gpt_folder.WEIGHTS, gpt_folder.CONFIGURATION):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()

    seen = command("inspect", tmp_path / "cut", "--json")
    assert seen.exit_code == 0
    answer = json.loads(seen.stdout)
    assert (answer["step"], answer["optimizer"], answer["verified"]) == (6, "AdamW", True)
    assert "after step 6" in command("inspect", tmp_path / "cut").stdout

    exported = command("export", tmp_path / "cut", tmp_path / "model")
    assert exported.exit_code == 0, exported.output
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference.assert_same_state(
            dict(gpt_folder.load(tmp_path / "model").state_dict()),
            dict(gpt_folder.load(tmp_path / "whole").state_dict()),
        )


@pytest.mark.parametrize(
    ("number", "options", "exit_code", "parts"),
    [
        (signal.SIGINT, ["--checkpoint-every", 2], 1, ["interrupted after step 4", "step-000000004", "--resume"]),
        (signal.SIGTERM, ["--checkpoint-every", 3], 143, ["SIGTERM after step 4", "step-000000004", "--resume"]),
        (signal.SIGINT, [], 1, ["interrupted after step 4: nothing was saved", "--checkpoint-every"]),
    ],
)
@pytest.mark.sample("2-options2-1-parts2")
def test_a_run_that_is_stopped_says_what_is_saved_and_how_to_go_on(
    number: int, options: list[object], exit_code: int, parts: list[str], tmp_path: Path, text: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    steps = relay.Trainer.step

    def stopped_in_the_fourth(self: relay.Trainer, batch: Any) -> Any:
        if self.steps == 3:
            # By hand, as pytest has its own ideas of a Ctrl-C, and the one before may be ignored in the background.
            monkeypatch.setattr(self._session.guard, "deliver_interrupts", lambda: os.kill(os.getpid(), number))
        return steps(self, batch)

    monkeypatch.setattr(relay.Trainer, "step", stopped_in_the_fourth)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        result = train(tmp_path / "cut", text, 6, *options)
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == exit_code
    answer = json.loads(result.stdout)
    assert answer["type"] == "Interrupted"
    for part in parts:
        assert part in answer["error"]
    if not options:
        return
    saved = Path(answer["error"].split("'")[1])
    assert Checkpoint(saved).manifest.step == 4
    monkeypatch.undo()
    resumed = train(tmp_path / "cut", text, 6, *options, "--resume")
    assert json.loads(resumed.stdout)["steps_now"] == 2


def test_inspecting_what_is_no_checkpoint_is_exit_code_1(tmp_path: Path) -> None:
    for arguments in (["inspect", tmp_path], ["export", tmp_path / "none", tmp_path / "model"]):
        result = command(*arguments, "--json")
        assert result.exit_code == 1
        assert json.loads(result.stdout)["type"] == "CheckpointError"
