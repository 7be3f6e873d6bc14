"""What tests run on each rank: functions of its number, the number of ranks, and plain arguments."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import nn

import relay
from relay.cli import main
from tests.support.ranks.models import Batch, batch, gpt_share, layers, loss, shares, small_gpt


def train(rank: int, count: int, batches: Sequence[Sequence[Batch]], options: dict[str, Any]) -> dict[str, Any]:
    """Train this rank's shares. Returns losses, norms, parameters and the ledger."""
    with relay.Trainer(layers(), loss, **options) as trainer:
        metrics = [trainer.step(of_ranks[rank]) for of_ranks in batches]
        trainer.synchronize()
        return {
            "losses": [one.loss for one in metrics],
            "norms": [one.grad_norm for one in metrics],
            "skipped": [one.skipped for one in metrics],
            "parameters": {name: value.clone() for name, value in trainer.state_dict().items()},
            "ledger": {(state, dtype): size for state, dtype, size in trainer.ledger.rows()},
        }


def train_all(rank: int, count: int, jobs: Sequence[tuple[str, dict[str, Any]]]) -> list[Any]:
    """Train several models of the zoo one after the other, with other options each. An error is a result too."""
    found: list[Any] = []
    for name, options in jobs:
        try:
            found.append(train_model(rank, count, name, options))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def train_model(rank: int, count: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Three steps of a GPT: losses, norms, and the parameters on this rank."""
    model = small_gpt(name)
    with relay.Trainer(model, **options) as trainer:
        metrics = [trainer.step(gpt_share(step, rank, count)) for step in range(3)]
        trainer.synchronize()
        return {
            "losses": [one.loss for one in metrics],
            "norms": [one.grad_norm for one in metrics],
            "parameters": {name: value.clone() for name, value in trainer.state_dict().items()},
        }


def train_and_save(
    rank: int, count: int, batches: Sequence[Sequence[Batch]], options: dict[str, Any], folder: str, stop: int
) -> dict[str, Any]:
    """Resume from the newest checkpoint in `folder`, train up to step `stop`, and save after every second step."""
    with relay.Trainer(layers(), loss, **options) as trainer:
        with relay.Checkpoints(folder, trainer, every=2) as checkpoints:
            checkpoints.resume()
            losses = []
            for of_ranks in batches[trainer.steps : stop]:
                losses.append(trainer.step(of_ranks[rank]).loss)
                checkpoints.after_step()
        return {
            "losses": losses,
            "steps": trainer.steps,
            "parameters": {name: value.clone() for name, value in trainer.state_dict().items()},
        }


def save_each_step(
    rank: int, count: int, batches: Sequence[Sequence[Batch]], options: dict[str, Any], folder: str
) -> bool:
    """Save after every step, to "waiting" and in the background to "background", with room for one copy.

    Returns whether all of the latter were written by threads.
    """
    by_threads = True
    with relay.Trainer(layers(), loss, **options) as trainer:
        for of_ranks in batches:
            trainer.step(of_ranks[rank])
            trainer.save(Path(folder) / "waiting" / str(trainer.steps))
            saving = trainer.save(Path(folder) / "background" / str(trainer.steps), background=True, memory=1)
            by_threads = by_threads and saving.thread is not None
    return by_threads


def resume_by_state_dicts(
    rank: int, count: int, batches: Sequence[Sequence[Batch]], options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor], str]:
    """Train two steps, and two more in another trainer that loads the state of the optimizer and the weights.

    Returns that state, the weights of this run and of one without a break, and the error of a state that differs.
    """
    found: list[dict[str, torch.Tensor]] = []
    model = layers()
    with relay.Trainer(model, loss, **options) as trainer:
        for of_ranks in batches[:2]:
            trainer.step(of_ranks[rank])
        state = trainer.optimizer.state_dict()
        weights = {name: value.clone() for name, value in trainer.state_dict().items()}
        for of_ranks in batches[2:4]:
            trainer.step(of_ranks[rank])
        found.append({name: value.clone() for name, value in trainer.state_dict().items()})
    model = layers()
    nn.Sequential(*model).load_state_dict(weights)
    with relay.Trainer(model, loss, **options) as trainer:
        trainer.optimizer.load_state_dict(state)
        for of_ranks in batches[2:4]:
            trainer.step(of_ranks[rank])
        found.append({name: value.clone() for name, value in trainer.state_dict().items()})
        other = copy.deepcopy(state)
        if rank == 1:
            other["state"][0]["exp_avg"] += 1
        try:
            trainer.optimizer.load_state_dict(other)
        except Exception as failure:
            return state, found[1], found[0], str(failure)
    return state, found[1], found[0], "no error"


def load_state(rank: int, count: int, options: dict[str, Any], folder: str, copy: str) -> int:
    """Load a checkpoint and write it again to `copy`. Returns its step."""
    with relay.Trainer(layers(1) if count == 1 else layers(), loss, **options) as trainer:
        trainer.load(folder)
        trainer.save(copy)
        return trainer.steps


def misbehave(rank: int, count: int, what: str) -> str:
    """Do on rank 1 what the others do not. Returns the error that this rank gets."""
    options: dict[str, Any] = {"optimizer": relay.SGD(lr=0.1), "microbatches": 2}
    if what == "options" and rank == 1:
        options["microbatches"] = 1
    if what == "unknown option" and rank == 1:
        options["microbatch"] = 1
    share = shares(batch(0, 4 * count), [4] * count)[rank]
    try:
        with relay.Trainer(layers(int(what == "model" and rank == 1)), loss, **options) as trainer:
            if what == "learning rate" and rank == 1:
                trainer.optimizer.param_groups[0]["lr"] = 0.2
            if what == "batch" and rank == 1:
                share = (share[0], share[1][:-1])
            if what == "loss" and rank == 1:
                share[0][0, 0] = float("nan")
            if what == "device" and rank == 1:
                _fail_in_backward(trainer)
            if what == "calls" and rank == 1:
                trainer.save("nowhere")
            trainer.step(share)
            if what == "loss of all":
                trainer.step((share[0], torch.full_like(share[1], -100)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _fail_in_backward(trainer: relay.Trainer) -> None:
    """Let the arrival of the second segment's gradients fail."""
    server = trainer._session.server
    receive, seen = server._receive, []

    def fail(plan: Any, *rest: Any) -> None:
        seen.append(plan)
        if len(seen) == 2:
            raise RuntimeError("the network card is on fire")
        receive(plan, *rest)

    server._receive = fail  # type: ignore[method-assign]


def evaluate_unevenly(rank: int, count: int) -> list[float]:
    """Rank r evaluates r + 1 batches, then all train a step, then rank r evaluates count - r batches."""
    with relay.Trainer(layers(), loss, optimizer=relay.SGD(lr=0.1), microbatches=2) as trainer:
        found = [trainer.evaluate(batch(number, 4)).loss for number in range(rank + 1)]
        found.append(trainer.step(shares(batch(9, 2 * count), [2] * count)[rank]).loss)
        return found + [trainer.evaluate(batch(number, 4)).loss for number in range(count - rank)]


def train_until_killed(rank: int, count: int, folder: str) -> str:
    """Train for ever, with a file for each step. Returns the error that ends it."""
    options = {"optimizer": relay.AdamW(lr=1e-2), "microbatches": 2}
    try:
        with relay.Trainer(layers(), loss, **options) as trainer:
            while True:
                trainer.step(shares(batch(trainer.steps, 3 * count), [3] * count)[rank])
                if rank == 0:
                    Path(folder, f"{trainer.steps}").touch()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run_command(rank: int, count: int, words: list[str]) -> tuple[int, str, str]:
    """Run a command as torchrun would. Returns its exit code, output and errors."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main.main(words, prog_name="relay", standalone_mode=False)
        except SystemExit as end:
            return int(end.code or 0), out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()
