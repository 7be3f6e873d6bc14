"""Figures of a run as it goes: callbacks of three methods, and those that write to TensorBoard, W&B, JSON or a plot.

Each library is imported when it is used. Invariant: a callback sees numbers and never changes the run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relay.checkpoint.atomic_file import write_whole
from relay.errors import RelayError

Figures = Mapping[str, Any]


class Callback:
    """What is called as a run goes. Override what you need; `figures["step"]` counts the steps that were made."""

    def on_step(self, figures: Figures) -> None:
        """After each step: `loss`, `lr`, `grad_norm`, `tokens_per_second`, `device_peak_bytes`."""

    def on_evaluation(self, figures: Figures) -> None:
        """After each evaluation: `held_out_loss`, `best`, and `samples`, a list of texts."""

    def on_end(self, figures: Figures) -> None:
        """After the last step, with the figures of the run."""


class Reporter(Callback):
    """A callback that writes. It is closed at the end of a run, and where a run is interrupted or fails."""

    def close(self) -> None:
        """Write what has not been written."""


class JsonLines(Reporter):
    """One JSON object a line. Lines of steps after `begin`, which a resumed run makes again, are removed."""

    def __init__(self, path: Path, begin: int) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if begin and json.loads(line)["step"] <= begin:
                        kept.append(line + "\n")
                except (ValueError, KeyError, TypeError):
                    continue  # a line that a kill left unfinished
        write_whole(path, "".join(kept))

    def _write(self, event: str, figures: Figures) -> None:
        row = {"event": event} | {name: _plain(value) for name, value in figures.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, allow_nan=False) + "\n")

    def on_step(self, figures: Figures) -> None:
        self._write("step", figures)

    def on_evaluation(self, figures: Figures) -> None:
        self._write("evaluation", figures)

    def on_end(self, figures: Figures) -> None:
        self._write("end", {name: value for name, value in figures.items() if not isinstance(value, Mapping)})


class TensorBoard(Reporter):
    """Scalars and samples for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path, begin: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as absent:
            raise RelayError(
                "--report-to tensorboard needs the package 'tensorboard': pip install tensorboard"
            ) from absent
        self._writer = SummaryWriter(str(folder), purge_step=begin + 1 if begin else None)

    def _write(self, group: str, figures: Figures) -> None:
        for name, value in figures.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(f"{group}/{name}", value, figures["step"])

    def on_step(self, figures: Figures) -> None:
        self._write("train", figures)

    def on_evaluation(self, figures: Figures) -> None:
        self._write("held out", figures)
        for number, text in enumerate(figures.get("samples", ())):
            self._writer.add_text(f"sample {number + 1}", text, figures["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Reporter):
    """A run of Weights & Biases; offline where WANDB_MODE=offline is set or nobody is logged in."""

    def __init__(self, folder: Path, settings: Figures) -> None:
        try:
            import wandb
        except ImportError as absent:
            raise RelayError("--report-to wandb needs the package 'wandb': pip install wandb") from absent
        import os

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.api.api_key else "offline")
        folder.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT", "relay")
        self._run = wandb.init(project=project, dir=str(folder), config=dict(settings), mode=mode)

    def _write(self, group: str, figures: Figures) -> None:
        numbers = {f"{group}/{name}": value for name, value in figures.items() if isinstance(value, (int, float))}
        self._run.log(numbers, step=figures["step"])

    def on_step(self, figures: Figures) -> None:
        self._write("train", figures)

    def on_evaluation(self, figures: Figures) -> None:
        self._write("held out", figures)

    def close(self) -> None:
        self._run.finish()


class Plot(Reporter):
    """A PNG of loss, rate, gradient norm and throughput of the steps of this process, drawn when it is closed."""

    def __init__(self, path: Path) -> None:
        try:
            import matplotlib  # noqa: F401  # whether it is there is to be known before the first step
        except ImportError as absent:
            raise RelayError("--plot needs the package 'matplotlib': pip install matplotlib") from absent
        self._path = path
        self._steps: list[Figures] = []
        self._evaluations: list[Figures] = []

    def on_step(self, figures: Figures) -> None:
        self._steps.append(dict(figures))

    def on_evaluation(self, figures: Figures) -> None:
        self._evaluations.append(dict(figures))

    def close(self) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        drawing = Figure(figsize=(10, 6), layout="constrained")
        FigureCanvasAgg(drawing)
        numbers = [one["step"] for one in self._steps]
        panels = (
            ("loss", "loss"),
            ("lr", "learning rate"),
            ("grad_norm", "gradient norm"),
            ("tokens_per_second", "tokens/s"),
        )
        for axis, (name, title) in zip(drawing.subplots(2, 2).flat, panels, strict=True):
            axis.plot(numbers, [one[name] for one in self._steps], linewidth=1, label="training")
            axis.set_title(title)
            axis.set_xlabel("step")
            if name == "loss" and self._evaluations:
                found = [(one["step"], one["held_out_loss"]) for one in self._evaluations]
                axis.plot(*zip(*found, strict=True), marker="o", label="held out")
                axis.legend()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        drawing.savefig(self._path, dpi=120)


def reporters(names: Sequence[str], plot: str | None, out: Path, begin: int, settings: Figures) -> list[Reporter]:
    """The callbacks of the names of --report-to and of --plot. `begin` is the number of steps made before."""
    found: list[Reporter] = []
    for name in dict.fromkeys(names):
        if name == "jsonl":
            found.append(JsonLines(out / "metrics.jsonl", begin))
        elif name == "tensorboard":
            found.append(TensorBoard(out / "tensorboard", begin))
        else:
            found.append(WeightsAndBiases(out / "wandb", settings))
    if plot is not None:
        found.append(Plot(Path(plot)))
    return found


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
