"""One run of `relay train`: the model, the data, the trainer, the progress bar and the checkpoints.

Options are parsed in `relay.cli.train`. Nothing is printed here but the progress bar; lines go to `log`. Invariants:
the losses of a run depend on its options and the text alone; and every error that can be found before the first step is
raised before it, also for a folder that cannot be written.
"""

import math
import sys
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import relay
from hal.errors import DeviceLost
from hal.spec.units import format_size
from relay.checkpoint.format import Checkpoint
from relay.checkpoint_manager import Terminated, newest
from relay.cli.compile_notice import CompileNotice, compile_notices
from relay.cli.console import RunStopped
from relay.cli.shared_options import COMMAND_LINE
from relay.cli.text_data import TextData, load_text
from relay.distributed.ranks import joined_group, launched, restarted
from relay.errors import CheckpointError
from relay.interrupts import CountedInterrupts
from relay.models import GPT, gpt_folder

HELD_OUT_BATCHES = 8
CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints inside the folder of a run."""

TRACE_FROM = 3  # the steps before it compile and allocate
TRACED_STEPS = 4
_NO_SECONDS = dict.fromkeys(("seconds", "compute_seconds", "transfer_seconds", "optimizer_seconds"), 0.0)


class NotEqual(Exception):
    """The first steps differ from plain PyTorch's. Nothing was trained."""

    def __init__(self, verification: "relay.Verification") -> None:
        super().__init__(str(verification))
        self.verification = verification


def learning_rate(step: int, steps: int, highest: float) -> float:
    """The learning rate of a step: linear warm-up over the first tenth (at most 100 steps), then a cosine.

    The cosine falls from `highest` to a tenth of it.
    """
    warm_up = max(1, min(100, steps // 10))
    if step < warm_up:
        return highest * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return highest * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def train_gpt(options: dict[str, Any], log: Callable[[str], None]) -> dict[str, Any]:
    """Train a GPT with the options of `relay train` and save it in the folder `out`.

    Returns the figures of the run. `log` receives lines for the user. If torchrun has started several processes, each
    trains with its share of every batch, and rank 0 alone logs, shows progress and saves the model. Resuming a run that
    has ended trains nothing and saves the model again. Raises RunStopped where Ctrl-C or SIGTERM ends the run, after
    the last checkpoint is written, and NotEqual where steps that are to be verified differ from plain PyTorch's.
    """
    with joined_group():
        return _train_gpt(options, log if launched()[0] == 0 else _log_nothing)


def _log_nothing(text: str) -> None:
    """What the other ranks do with lines for the user."""


def _train_gpt(options: dict[str, Any], log: Callable[[str], None]) -> dict[str, Any]:
    rank, _ = share = launched()
    data = TextData(load_text(options["data"]), options["seq"], options["batch"], options["seed"], share)
    configuration = {"vocabulary": 256, "sequence": options["seq"], "tied": True}
    configuration |= {name: options[name] for name in ("layers", "hidden", "heads", "dropout")}
    torch.manual_seed(options["seed"])
    model = GPT(**configuration)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trainer = relay.Trainer(
        model,
        optimizer=relay.AdamW(lr=options["lr"], weight_decay=0.01),
        **{name: options[name] for name in COMMAND_LINE},
    )
    run = {name: options[name] for name in ("seq", "batch", "seed", "steps", "lr")} | {"text_bytes": len(data.text)}
    nothing_saved = "ended at once: nothing was saved"
    with CountedInterrupts(log, lambda: nothing_saved) as presses, closing(trainer), compile_notices(log) as notice:
        trainer.prepare(data.batch(0))
        log(f"{parameters:,} parameters in {options['layers']} layers; {len(data.text):,} bytes of text")
        log("Host memory:")
        log(str(trainer.ledger))
        folder = Path(options["out"])
        gpt_folder.prepare(folder)
        checkpoints = relay.Checkpoints(
            folder / CHECKPOINTS,
            trainer,
            every=options["checkpoint_every"],
            keep_last=options["keep_last"],
            metadata={"run": run, "model": configuration},
        )
        presses.at_the_end = lambda: _stopped("ended at once", trainer.steps, checkpoints)
        trace = options["trace"] if rank == 0 else None
        _begin(checkpoints, run, options["resume"] or (restarted() and bool(checkpoints.steps())))
        ended = trainer.steps >= options["steps"]
        if ended:
            log(f"This run has ended: all of its {options['steps']} steps are done. No step is run.")
            if options["trace"] is not None:
                log(f"No trace is written to '{options['trace']}', because no step is run.")
        elif trainer.steps:
            log(f"Continuing after step {trainer.steps}.")
        verification = None
        if options["verify"] is not None and not ended:
            verification = _verify(trainer, data, options)
            log(str(verification))
        held_out = data.held_out(HELD_OUT_BATCHES)
        saving = checkpoints if options["checkpoint_every"] is not None else None
        try:
            before = after = _mean_loss(trainer, held_out)
            if ended:
                figures = _figures(options["steps"], [], _NO_SECONDS, 0, 0, 0)
            else:
                with saving or nullcontext():
                    figures = _train(trainer, data, options["steps"], options["lr"], saving, trace, notice)
                after = _mean_loss(trainer, held_out)
            state = trainer.state_dict()
            if rank == 0:
                gpt_folder.save(folder, state, configuration)
        except KeyboardInterrupt as stop:
            raise RunStopped(_stopped("interrupted", trainer.steps, checkpoints)) from stop
        except DeviceLost as lost:
            raise DeviceLost(f"{lost} {_stopped('The run ended', trainer.steps, checkpoints)}") from lost
        except Terminated as stop:
            raise RunStopped(_stopped("ended by SIGTERM", trainer.steps, checkpoints), int(stop.code or 143)) from stop
        baseline_device_bytes = trainer.baseline_device_bytes
    return figures | {
        "held_out_before": before,
        "held_out_after": after,
        "parameters": parameters,
        "baseline_device_bytes": baseline_device_bytes,
        "weights": str(folder / gpt_folder.WEIGHTS),
        "verification": None if verification is None else verification.as_dict(),
        "options": dict(options),
    }


def _verify(trainer: "relay.Trainer", data: TextData, options: dict[str, Any]) -> "relay.Verification":
    """Compare the next steps of the run, as many as asked for and left, with plain PyTorch. Raises NotEqual."""
    steps, highest = options["steps"], options["lr"]
    numbers = range(trainer.steps, min(trainer.steps + options["verify"], steps))
    batches = [data.batch(number) for number in numbers]
    found = trainer.verify(batches, learning_rate=lambda step: learning_rate(step, steps, highest))
    if not found.equal:
        raise NotEqual(found)
    return found


def _stopped(how: str, steps: int, checkpoints: "relay.Checkpoints") -> str:
    """The message for a run that was stopped after `steps`: what is saved, where, and how to continue."""
    saved = checkpoints.steps()
    if not saved:
        return (
            f"{how} after step {steps}: nothing was saved. With --checkpoint-every a run is saved as it goes, and "
            "--resume continues it."
        )
    where = f"'{checkpoints.path_of(saved[0])}'"
    lost = f"; the {steps - saved[0]} steps after it are lost" if steps > saved[0] else ""
    return f"{how} after step {steps}: the run is saved in {where}{lost}. The same command with --resume continues it."


def _begin(checkpoints: "relay.Checkpoints", run: dict[str, Any], resume: bool) -> None:
    """Load the newest whole checkpoint if `resume` is set. Raises CheckpointError where it belongs to another run."""
    if not resume:
        if checkpoints.steps():
            raise CheckpointError(
                f"there are checkpoints of an earlier run, the last after step {checkpoints.steps()[0]}. Continue that "
                "run with --resume, or give another --out.",
                file=str(checkpoints.folder),
            )
        return
    path = newest(checkpoints.folder)
    saved = Checkpoint(path).manifest.user.get("run") if path is not None else run
    if not isinstance(saved, dict):
        raise CheckpointError("this checkpoint was not written by `relay train`", file=str(path), field="user.run")
    for name, value in run.items():
        if saved.get(name) != value:
            raise CheckpointError(
                f"the run was started with {saved.get(name)!r}; received {value!r}. Options that decide the batches "
                "and the schedule must not change. Give the same value, or start another run with another --out.",
                file=str(path),
                field=f"user.run.{name}",
            )
    checkpoints.resume()


def _train(
    trainer: "relay.Trainer",
    data: TextData,
    steps: int,
    highest: float,
    checkpoints: "relay.Checkpoints | None",
    trace_file: str | None,
    notice: CompileNotice,
) -> dict[str, Any]:
    losses: list[float] = []
    seconds = dict(_NO_SECONDS)
    device_peak = host_bytes = 0
    # A terminal is redrawn often; a log file gets a line every ten seconds.
    pause = 0.3 if sys.stderr.isatty() else 10.0
    begin = trainer.steps
    look = {"desc": "training", "unit": "step", "dynamic_ncols": True, "mininterval": pause}
    with tqdm(total=steps, initial=begin, disable=launched()[0] != 0, **look) as bar:
        notice.bar = bar
        for step in range(begin, steps):
            for group in trainer.optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, highest)
            if trace_file is not None and step == min(begin + TRACE_FROM, steps - 1):
                trace = trainer.start_trace()
            elif trace_file is not None and step == begin + TRACE_FROM + TRACED_STEPS:
                trainer.stop_trace()
            metrics = trainer.step(data.batch(step))
            losses.append(metrics.loss)
            for name in seconds:
                seconds[name] += getattr(metrics, name)
            device_peak = max(device_peak, metrics.device_peak_bytes)
            host_bytes = max(host_bytes, metrics.host_bytes)
            bar.set_postfix_str(
                f"loss {metrics.loss:.3f}, {metrics.tokens_per_second:,.0f} tokens/s, "
                f"device {format_size(device_peak)}, host {format_size(host_bytes)}",
                refresh=False,
            )
            bar.update()
            if checkpoints is not None:
                checkpoints.after_step()
    notice.bar = None
    if trace_file is not None and losses:
        trace.write(trace_file)
    tokens = len(losses) * data.batch_size * (data.window - 1)
    return _figures(steps, losses, seconds, tokens, device_peak, host_bytes)


def _figures(
    steps: int, losses: list[float], seconds: dict[str, float], tokens: int, device_peak: int, host_bytes: int
) -> dict[str, Any]:
    """The figures of the steps that were run. Losses are NaN where no step was run."""
    return {
        "steps": steps,
        "steps_now": len(losses),
        "loss_first": losses[0] if losses else math.nan,
        "loss_last": losses[-1] if losses else math.nan,
        "tokens_per_second": tokens / seconds["seconds"] if seconds["seconds"] > 0 else 0.0,
        "device_peak_bytes": device_peak,
        "host_bytes": host_bytes,
        **seconds,
    }


def _mean_loss(trainer: "relay.Trainer", batches: list[dict[str, torch.Tensor]]) -> float:
    """The mean loss over all tokens: batches have equal numbers of tokens, so it is the mean of their losses."""
    return sum(float(trainer.evaluate(batch).loss) for batch in batches) / len(batches)
