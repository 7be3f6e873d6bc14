"""A trainer and processes: forked children, spawned ones, copies and pickles, and launchers that start several."""

import copy
import functools
import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import relay
from tests.support.zoo.plain_models import Build
from tests.support.zoo.unspoiled import a_list, list_batch

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def in_child(work: Callable[[], Any]) -> Any:
    """What `work()` returns in a forked child, or the name and the message of what it raises."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if not child:
        try:
            found = work()
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(found).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = json.loads(pipe.read())
    assert os.waitpid(child, 0)[1] == 0
    return found


def trained(build: Build) -> relay.Trainer:
    trainer = build(a_list(), loss=nn.functional.mse_loss, clip_grad_norm=1.0)
    trainer.step(list_batch())
    return trainer


USES: dict[str, Callable[[relay.Trainer, str], Any]] = {
    "step": lambda trainer, _: trainer.step(list_batch()),
    "evaluate": lambda trainer, _: trainer.evaluate(list_batch()),
    "predict": lambda trainer, _: trainer.predict(list_batch()[0]),
    "prepare": lambda trainer, _: trainer.prepare(list_batch()),
    "synchronize": lambda trainer, _: trainer.synchronize(),
    "state_dict": lambda trainer, _: trainer.state_dict(),
    "save": lambda trainer, folder: trainer.save(folder),
    "load": lambda trainer, folder: trainer.load(folder),
    "remove": lambda trainer, _: trainer.remove(0),
    "reopen": lambda trainer, _: trainer.reopen(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_trainer_used_in_a_forked_child_raises_at_once_and_names_the_ways_out(
    build: Build, tmp_path: Path, use: Callable[[relay.Trainer, str], Any]
) -> None:
    trainer = trained(build)
    found = in_child(lambda: use(trainer, str(tmp_path / "checkpoint")))
    assert found.startswith("RelayError")
    for part in (str(os.getpid()), "Create the trainer in the child", "spawn"):
        assert part in found
    trainer.step(list_batch())


def test_a_forked_child_closes_and_drops_a_trainer_without_waiting_and_reads_its_model(build: Build) -> None:
    trainer = trained(build)
    trainer.synchronize()
    expected = [parameter.sum().item() for parameter in trainer.state_dict().values()]
    model = trainer._model

    def end() -> Any:
        nonlocal trainer
        with trainer:
            pass
        del trainer
        return [parameter.sum().item() for parameter in model.state_dict().values()]

    assert in_child(end) == expected


def test_a_trainer_made_in_a_forked_child_trains_as_one_made_here(build: Build) -> None:
    def losses() -> list[float]:
        with relay.Trainer(a_list(), loss=nn.functional.mse_loss) as trainer:
            return [trainer.step(list_batch()).loss for _ in range(2)]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of OpenMP do not exist in a child either
    try:
        assert in_child(losses) == losses()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("reproduce", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_copies_and_pickles_of_a_trainer_and_its_optimizer_name_what_to_use(
    build: Build, reproduce: Callable[[Any], Any]
) -> None:
    trainer = trained(build)
    with pytest.raises(TypeError, match=r"(?s)trainer cannot be copied.*state_dict.*save.*load"):
        reproduce(trainer)
    with pytest.raises(TypeError, match=r"optimizer cannot be copied.*optimizer\.state_dict"):
        reproduce(trainer.optimizer)


@pytest.mark.parametrize("reproduce", [copy.copy, copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec))])
@pytest.mark.parametrize("made", [relay.AdamW(lr=0.5), relay.SGD(lr=0.1, momentum=0.9), relay.Lion()], ids=type)
def test_an_optimizer_that_is_not_a_trainers_yet_is_copied_and_pickled(made: Any, reproduce: Any) -> None:
    assert reproduce(made) == made


def warnings_of_trainers(count: str | None, group: str | None = None) -> list[str]:
    """The warnings of two trainers made where WORLD_SIZE is `count`, with a process group in file `group`."""
    if count is not None:
        os.environ["WORLD_SIZE"] = count
    if group is not None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{group}", rank=0, world_size=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            relay.Trainer(a_list(), loss=nn.functional.mse_loss).close()
    return [str(warning.message) for warning in seen]


def test_under_torchrun_without_a_process_group_it_is_said_once_that_a_trainer_trains_alone() -> None:
    (message,) = in_child(functools.partial(warnings_of_trainers, "4"))
    assert "WORLD_SIZE=4" in message
    assert "trains alone" in message


def test_with_one_process_or_with_a_group_there_is_no_such_warning(tmp_path: Path) -> None:
    for count in (None, "1", ""):
        assert in_child(functools.partial(warnings_of_trainers, count)) == []
    if torch.distributed.is_available():
        assert in_child(functools.partial(warnings_of_trainers, "4", str(tmp_path / "group"))) == []
