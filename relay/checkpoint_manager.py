"""The checkpoints of a run: when they are written, how many are kept, and which one a run resumes from.

    with relay.Checkpoints("runs/x/checkpoints", trainer, every=100, data=batches) as checkpoints:
        checkpoints.resume()
        for batch in batches:
            trainer.step(batch)
            checkpoints.after_step()

They are written in the background. SIGTERM, Ctrl-C and exceptions end the run with a last checkpoint, if the
last step is complete. Several processes that train together write together, after the same step, and SIGTERM on one of
them ends the run on all. The content of a checkpoint is not known here
(`relay.checkpoint.format`). Invariant: an old checkpoint is deleted only after a newer one has been verified, and the
newest whole one never.
"""

from __future__ import annotations

import re
import shutil
import signal
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import Any

from hal.errors import HalError
from relay.checkpoint.format import Checkpoint, find, remove
from relay.checkpoint.saving import Saving, states_of
from relay.distributed.together import Together
from relay.errors import CheckpointError, InconsistentState, RankLost, RanksDiffer
from relay.options import refuse_renamed
from relay.trainer import Trainer

_NAME = re.compile(r"step-(\d{9,19})")


class Terminated(SystemExit):
    """Raised after SIGTERM, when the current step has ended. Exit code 143."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class Checkpoints:
    """The checkpoints of one run in `folder`, each a folder `step-000000123`.

    Args:
        folder: where the checkpoints are.
        trainer: whose state is saved.
        every: save after every so many steps.
        minutes: save when so many minutes have passed since the last checkpoint.
        keep_last: how many of the newest checkpoints are kept.
        memory: the most bytes of copies that writing in the background may take, such as "1GB".
        metadata: plain values that are stored with each checkpoint and not restored.
        user: what else belongs to the run and has `state_dict` and `load_state_dict`, such as `data=`, `scheduler=`.
    """

    @refuse_renamed("Checkpoints")
    def __init__(
        self,
        folder: str | Path,
        trainer: Trainer,
        *,
        every: int | None = None,
        minutes: float | None = None,
        keep_last: int = 2,
        memory: int | str = "1GB",
        metadata: Mapping[str, Any] | None = None,
        **user: Any,
    ) -> None:
        for name, value in (("every", every), ("minutes", minutes), ("keep_last", keep_last)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value!r} must be above 0")
        self.folder = Path(folder)
        self._trainer = trainer
        self._every = every
        self._minutes = minutes
        self._keep_last = keep_last
        self._memory = memory
        self._metadata = dict(metadata or {})
        self._user = user
        self._saving: Saving | None = None
        self._last_time = monotonic()
        self._last_step = -1
        self._position: tuple[int, dict[str, Any]] | None = None
        self._terminated = threading.Event()
        self._previous_handler: Any = None
        self._handling = False

    # -- resuming ---------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that have a checkpoint (complete or not), newest first."""
        return sorted(_found(self.folder), reverse=True)

    def path_of(self, step: int) -> Path:
        """The folder of the checkpoint after that step, whether it exists or not."""
        return self.folder / f"step-{step:09}"

    def resume(self) -> int:
        """Load the newest whole checkpoint. Returns the number of steps that it had made, 0 without a checkpoint.

        A damaged checkpoint is skipped with a warning. Raises CheckpointError if there are checkpoints and all are
        damaged, or if one is of another model or optimizer.
        """
        together = self._trainer.together
        if together is not None:
            return self._resume_together(together)
        step = self._newest_whole()
        if step is not None:
            self._trainer.load(self.path_of(step), verify=False, **self._user)
            self._last_step = self._trainer.steps
        self._note_position()
        return self._trainer.steps if step is not None else 0

    def _resume_together(self, together: Together) -> int:
        """The same for one of several processes. Rank 0 finds the checkpoint."""
        found: dict[str, Any] = {"step": None, "problem": None}
        if together.is_first:
            try:
                found["step"] = self._newest_whole()
            except CheckpointError as damaged:
                found["problem"] = str(damaged)
        found = together.of_first(found)
        if found["problem"] is not None:
            raise CheckpointError(found["problem"])
        if found["step"] is not None:
            self._trainer.load(self.path_of(found["step"]), verify=False, **self._user)
            self._last_step = self._trainer.steps
        self._note_position()
        return self._trainer.steps if found["step"] is not None else 0

    def _newest_whole(self) -> int | None:
        """The step of the newest whole checkpoint; None without a checkpoint. What a killed process left is deleted."""
        for left_over in self.folder.glob(".step-*.partial"):
            shutil.rmtree(left_over, ignore_errors=True)
        problems = []
        for step, path in sorted(_found(self.folder).items(), reverse=True):
            try:
                Checkpoint(path).verify()
            except CheckpointError as problem:
                problems.append(str(problem))
                warnings.warn(f"The checkpoint of step {step} is skipped: {problem}", RuntimeWarning, stacklevel=3)
                continue
            return step
        if problems:
            raise CheckpointError(f"all checkpoints are damaged: {'; '.join(problems)}", file=str(self.folder))
        return None

    # -- saving -------------------------------------------------------------------------------------------

    def after_step(self) -> bool:
        """Call after every step. Starts a checkpoint if one is due, and returns whether it did.

        Raises CheckpointError if the previous checkpoint could not be written, and Terminated after SIGTERM.
        """
        self._note_position()
        together = self._trainer.together
        terminated = self._terminated.is_set()
        if together.any(terminated) if together is not None else terminated:
            raise Terminated
        self._finish(wait=False)
        steps = self._trainer.steps
        due = self._every is not None and steps % self._every == 0
        if self._minutes is not None and not due:
            due = monotonic() - self._last_time >= 60 * self._minutes
            due = due if together is None else bool(together.of_first(due))
        if not due or self._saving is not None or steps == self._last_step:
            return False
        self._saving = self._save(background=True)
        return True

    def save(self) -> Path:
        """Save now, and return the checkpoint's path when it is written. Raises CheckpointError."""
        self._note_position()
        return self._save_now()

    def _save_now(self) -> Path:
        self._finish(wait=True)
        if self._position is None or self._position[0] != self._trainer.steps:
            # A step was made without `after_step`: the present states of data and schedules belong to it.
            self._note_position()
        saving = self._save(background=False)
        self._prune()
        return saving.path

    def __enter__(self) -> Checkpoints:
        # Python runs and sets signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGTERM, self._on_terminate)
            self._handling = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if error is None:
                # A batch that was taken after the last step was not trained on: the position noted then holds.
                self._finish(wait=True)
                if self._trainer.steps != self._last_step:
                    self._save_now()
            else:
                self._save_what_is_whole(error)
        finally:
            if self._handling:
                signal.signal(signal.SIGTERM, self._previous_handler or signal.SIG_DFL)
                self._handling = False

    # -- inside -----------------------------------------------------------------------------------------------

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        self._terminated.set()
        if callable(self._previous_handler):
            self._previous_handler(number, frame)

    def _note_position(self) -> None:
        """Keep the states of data and schedules after this step: a batch taken later may not be trained on."""
        self._position = self._trainer.steps, states_of(self._user)

    def _save_what_is_whole(self, error: BaseException) -> None:
        """After an exception: save a last checkpoint, if the trainer holds the state of a complete step."""
        try:
            self._finish(wait=True)
        except CheckpointError as problem:
            warnings.warn(str(problem), RuntimeWarning, stacklevel=3)
        if isinstance(error, InconsistentState) or self._trainer.steps == self._last_step:
            return
        if self._trainer.together is not None and not isinstance(error, Terminated):
            return  # the other ranks may be elsewhere, or gone
        try:
            self._save_now()
        except (InconsistentState, HalError, CheckpointError, RankLost, RanksDiffer, ValueError) as problem:
            warnings.warn(f"No last checkpoint could be saved: {problem}", RuntimeWarning, stacklevel=3)

    def _save(self, background: bool) -> Saving:
        assert self._position is not None
        self._last_step, self._last_time = self._trainer.steps, monotonic()
        path = self.path_of(self._last_step)
        states = {**self._metadata, **self._position[1]}
        return self._trainer.save(path, background=background, memory=self._memory, **states)

    def _finish(self, wait: bool) -> None:
        """Check and prune after a background checkpoint has ended."""
        if self._saving is None:
            return
        if not wait:
            together, writing = self._trainer.together, not self._saving.done()
            if writing if together is None else together.any(writing):
                return
        saving, self._saving = self._saving, None
        self._trainer.wait_saved(quietly=True)
        saving.wait()
        self._prune()

    def _prune(self) -> None:
        together = self._trainer.together
        if together is not None and not together.is_first:
            return
        for step in self.steps()[self._keep_last :]:
            remove(_found(self.folder)[step])


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run, or None. Reads each until one is whole."""
    for _, path in sorted(_found(folder).items(), reverse=True):
        try:
            Checkpoint(path).verify()
        except CheckpointError:
            continue
        return path
    return None


def _found(folder: Path) -> dict[int, Path]:
    """The paths of checkpoints by step."""
    if not folder.is_dir():
        return {}
    found = {}
    for entry in folder.iterdir():
        match = _NAME.fullmatch(entry.name)
        if match is None and entry.name.startswith(".") and entry.name.endswith(".previous"):
            match = _NAME.fullmatch(entry.name[1 : -len(".previous")])
        if match is not None:
            found[int(match.group(1))] = folder / f"step-{match.group(1)}"
    return {step: path for step, path in found.items() if find(path).is_dir()}
