"""`finetune`: a model's folder and data files in, a tuned folder out. What `relay finetune` does, for any script.

    from relay.finetuning.finetune import finetune

    finetune("my-model", ["conversations.jsonl"], lora=16, out="tuned")

The parts (data, model, plan, steps, output) are modules of this package; nothing is printed here. Invariant: whatever
can be found wrong before the first step is raised before it.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from hal.spec.units import format_size
from relay.checkpoint.format import Checkpoint
from relay.checkpoint_manager import Checkpoints, newest
from relay.errors import CheckpointError, RelayError
from relay.finetuning.data.batches import Batches
from relay.finetuning.data.packing import check_separate
from relay.finetuning.data.prepare import (
    LABELLED,
    Labelling,
    PreparedData,
    find_labelling,
    prepare_data,
    read,
)
from relay.finetuning.model_folder import (
    ModelFolder,
    build_empty,
    load,
    longest_row,
    new_poolers,
    open_folder,
    open_tokenizer,
    quiet_transformers,
)
from relay.finetuning.options import Settings, settings_of
from relay.finetuning.output import check_out, save_merged, save_model, write_card
from relay.finetuning.plan_run import (
    CHOSEN,
    choose_device,
    choose_precision,
    chosen_options,
    dry_run,
    fit_options,
    is_described,
)
from relay.finetuning.reporting import Callback, reporters
from relay.finetuning.run_loop import Progress, RunLoop
from relay.finetuning.samples import Sampler
from relay.finetuning.schedule import LR, LR_OF_ADAPTERS, without_decay
from relay.models.adapters import add_adapters, load_adapters, merged
from relay.models.load_pretrained import weight_files
from relay.models.quantized import pack_frozen
from relay.optim.optimizers import AdamW
from relay.options import check_master_weights
from relay.trainer import Trainer

CHECKPOINTS = "checkpoints"
DECISIVE = (
    "epochs", "lr", "schedule", "warmup", "weight_decay", "pack", "length_buckets", "held_out", "lora", "lora_alpha",
    "lora_dropout", "lora_targets", "dora", "quantize_frozen", "eval_every", "patience",
)  # fmt: skip
"""Options that a resumed run must not change, since batches, rates or the model would be others."""


def finetune(
    model: str,
    data: Sequence[str],
    *,
    callbacks: Sequence[Callback] = (),
    report_to: Sequence[str] = (),
    log: Callable[[str], None] = lambda text: None,
    on_figures: Callable[[dict[str, Any], int], None] = lambda figures, steps: None,
    **options: Any,
) -> dict[str, Any]:
    """Fine-tune a model on data and write the result to a folder. Returns the figures of the run.

    Args:
        model: a folder that `save_pretrained` wrote, a folder of adapters, or a name where the hub can be reached.
        data: files (JSONL, JSON, parquet, CSV, text) or saved dataset folders.
        callbacks: called after steps, after evaluations and at the end.
        report_to: any of "tensorboard", "wandb" and "jsonl".
        log: receives lines for people.
        on_figures: receives the figures of each step and evaluation, and the number of steps of the run.
        options: `relay.finetuning.options.FinetuneOptions`, `batch`, `seq`, and the options of `relay.Trainer`.

    Raises DataError, RelayError or ValueError before the first step.
    """
    settings = settings_of(options)
    with quiet_transformers():
        return _Run(model, list(data), settings, log, on_figures).run([*callbacks], report_to)


class _Run:
    """One run, from its folder to its result."""

    def __init__(
        self, model: str, data: list[str], settings: Settings, log: Callable[[str], None],
        on_figures: Callable[[dict[str, Any], int], None],
    ) -> None:  # fmt: skip
        self.own = settings.own
        self.log = log
        self.on_figures = on_figures
        self.out = Path(self.own.out)
        self.source: ModelFolder = open_folder(model)
        self._check_adapters()
        self.adapted = self.own.lora is not None or self.source.adapter is not None
        if not self.own.dry_run:
            check_out(self.out, self.source, self.adapted, self.own.plot)
        if not self.own.dry_run or any(self.source.folder.glob("*.safetensors*")):
            weight_files(self.source.folder)  # what is missing is said before the data is read
        self.tokenizer = open_tokenizer(self.source)
        self.longest = longest_row(self.source, self.tokenizer, settings.seq)
        files = read(data, self.own.cache)
        self.found: Labelling = find_labelling(files, self.source, settings)
        pads = (
            self.tokenizer.pad_token_id,
            getattr(self.source.config, "pad_token_id", None),
            self.tokenizer.eos_token_id,
        )
        self.padding = next((int(pad) for pad in pads if isinstance(pad, int) and 0 <= pad < self.source.vocabulary), 0)
        self.data: PreparedData = prepare_data(
            files, self.found, self.tokenizer, self.longest, self.source.vocabulary, self.padding, settings
        )
        device, described = choose_device(settings.trainer["device"])
        if is_described(device) and not self.own.dry_run:
            raise RelayError(f"{device} is a described device, on which nothing can be trained. Give --dry-run too.")
        precision = choose_precision(settings.trainer["precision"], device, self.source.dtype)
        try:
            check_master_weights(settings.trainer["master_weights"], precision)
        except ValueError as wrong:
            raise RelayError(str(wrong)) from wrong
        self.settings = msgspec.structs.replace(
            settings, trainer=settings.trainer | {"device": device, "precision": precision}
        )
        self.device = f"{device} ({described}), the best device that is here" if described else device
        self.lr = self.own.lr or (LR_OF_ADAPTERS if self.adapted else LR)
        self.steps = self.own.steps or max(1, math.ceil(len(self.data.training) * self.own.epochs))

    def _check_adapters(self) -> None:
        own, adapter = self.own, self.source.adapter
        if adapter is not None and own.lora is not None:
            raise RelayError(f"{adapter} holds adapters already, which the run goes on with. Leave --lora out.")
        for name in ("merge", "quantize_frozen"):
            if getattr(own, name) and adapter is None and own.lora is None:
                flag = name.replace("_", "-")
                raise RelayError(f"--{flag} is for a model with adapters. Give --lora too, such as --lora 16.")

    # -- the model ----------------------------------------------------------------------------------------------

    @property
    def _dtype(self) -> torch.dtype:
        """What the weights are loaded in: float32 where they are trained or the device computes in it."""
        as_given = self.settings.trainer["master_weights"] == "as_given"
        half = self.settings.trainer["precision"] != "fp32"
        return self.source.dtype if as_given or (self.adapted and half) else torch.float32

    def build(self, empty: bool) -> nn.Module:
        """The model as it is trained, with its weights, or without memory for a plan."""
        torch.manual_seed(self.settings.trainer["seed"])
        source, own = self.source, self.own
        model = build_empty(source, self.found.task, self.found.classes, self._dtype, self.padding)
        if not empty:
            new = load(model, source, self.found.new_head)
            if new and source.adapter is None:
                self.log(f"new             {len(new)} tensors that the folder does not have: {', '.join(new[:4])}")
            if own.pack:
                check_separate(model, source.vocabulary)
        built = model
        if source.adapter is not None:
            built = load_adapters(model, source.adapter)
        elif own.lora is not None:
            new = new_poolers(model, source) if self.found.new_head else []
            built = add_adapters(model, own, self.found.task, str(source.folder.resolve()), new)
        if own.quantize_frozen is not None:
            packed = pack_frozen(built, own.quantize_frozen)
            if not packed.layers:
                raise RelayError(f"{type(model).__name__} has no frozen linear layer to pack by --quantize-frozen.")
            if not empty:
                self.log(
                    f"packed          {packed.layers} frozen layers to {own.quantize_frozen}: "
                    f"{format_size(packed.before)} to {format_size(packed.after)}"
                )
        return (built.to("meta") if empty else built).train()

    # -- the run ------------------------------------------------------------------------------------------------

    def run(self, callbacks: list[Callback], report_to: Sequence[str]) -> dict[str, Any]:
        for line in self.data.lines:
            self.log(line)
        self.log(f"device          {self.device}; {self.settings.trainer['precision']}")
        checkpoints = self.out / CHECKPOINTS
        facts = self._facts()
        _check_checkpoints(checkpoints, facts, self.own.resume)
        optimizer = AdamW(lr=self.lr, weight_decay=self.own.weight_decay)
        options = self.settings.trainer
        fits = self.own.fit and not isinstance(options["device"], tuple)  # relay.fit plans for one device
        if fits or self.own.dry_run:
            largest = self.data.training.largest()
            found = fit_options(self.build(empty=True), largest, self.settings, optimizer, checkpoints, self.own.fit)
            for reason in found.reasons:
                self.log(f"fit: {reason}")
            options = chosen_options(found, self.settings) if self.own.fit else options
            if self.own.dry_run:
                return dry_run(found, self.steps) | {"data": self.data.figures, "device": options["device"]}
        model = self.build(empty=False)
        self.out.mkdir(parents=True, exist_ok=True)
        trainer = Trainer(model, optimizer=optimizer, param_groups=without_decay(model), **options)
        with closing(trainer), ExitStack() as ended:
            figures = self._train(trainer, model, facts, checkpoints, callbacks, report_to, options, ended)
        if self.own.merge:
            save_merged(merged(model), self.tokenizer, self.out / "merged")
            figures["merged"] = str(self.out / "merged")
        return figures

    def _train(
        self, trainer: Trainer, model: nn.Module, facts: dict[str, Any], folder: Path,
        callbacks: list[Callback], report_to: Sequence[str], options: dict[str, Any], ended: ExitStack,
    ) -> dict[str, Any]:  # fmt: skip
        own, progress = self.own, Progress()
        trainer.prepare(self.data.training.largest())
        counts = _parameters(model)
        self.log(f"parameters      {counts[0]:,}, of which {counts[1]:,} are trained")
        self.log("Host memory:")
        self.log(str(trainer.ledger))
        checkpoints = Checkpoints(
            folder,
            trainer,
            every=own.checkpoint_every,
            keep_last=own.keep_last,
            metadata={"run": facts},
            progress=progress,
        )
        if own.resume and checkpoints.resume():
            self.log(f"Continuing after step {trainer.steps} of {self.steps}.")
        best = self.out / "best"
        keeps = own.keep_best or own.patience is not None
        if keeps and not trainer.steps and best.is_dir():
            shutil.rmtree(best)  # an earlier run's
        config = self._config_of_classes(model)
        begin = trainer.steps
        shown = {"model": self.source.given, "device": options["device"], **facts}
        reporting = reporters(report_to, own.plot, self.out, begin, shown)
        for reporter in reporting:
            ended.callback(reporter.close)
        callbacks = [*callbacks, *reporting]
        loop = RunLoop(
            trainer, self.data.training, self.data.held_out, own, self.steps, self.lr, progress, callbacks,
            self._sampler(self.data.held_out), lambda: save_model(trainer, self.tokenizer, best, config),
        )  # fmt: skip
        losses, tokens, start, peak = [], 0, time.perf_counter(), 0
        with checkpoints if own.checkpoint_every is not None else nullcontext():
            for found in loop.run(checkpoints if own.checkpoint_every is not None else None):
                if "loss" in found:
                    losses.append(found["loss"])
                    tokens += found["trained_targets"]
                    peak = max(peak, found["device_peak_bytes"])
                self.on_figures(found, self.steps)
        seconds = time.perf_counter() - start
        save_model(trainer, self.tokenizer, self.out, config)
        held = progress.evaluations
        figures: dict[str, Any] = {
            "steps": trainer.steps,
            "steps_now": trainer.steps - begin,
            "stopped_early": progress.stopped,
            "loss_first": losses[0] if losses else math.nan,
            "loss_last": losses[-1] if losses else math.nan,
            "held_out_before": held[0][1] if held else None,
            "held_out_after": held[-1][1] if held else None,
            "held_out_best": min((loss for _, loss in held), default=None),
            **{name: value for name, value in loop.latest.items() if name == "accuracy"},
            "targets_trained": tokens,
            "seconds": seconds,
            "device_peak_bytes": peak,
            "host_bytes": trainer.ledger.total,
            "parameters": counts[0],
            "parameters_trained": counts[1],
        }
        plan = {name: options[name] for name in ("device", "precision", *CHOSEN)}
        write_card(
            self.out, str(self.source.folder if self.adapted else self.source.given), self.adapted,
            {"Settings": {**facts, **plan}, "Figures": figures}, self.data.lines,
        )  # fmt: skip
        for callback in callbacks:
            callback.on_end({"step": trainer.steps, **figures})
        return figures | {
            "out": str(self.out), "task": self.found.task, "data": self.data.figures, "options": plan,
            "best": str(best) if keeps and best.is_dir() else None,
        }  # fmt: skip

    def _config_of_classes(self, model: Any) -> Any:
        """The configuration to write beside adapters for classes."""
        if not self.adapted or self.found.task not in LABELLED:
            return None
        base = model.get_base_model()
        base.config.architectures = [type(base).__name__]
        return base.config

    def _sampler(self, held_out: Batches | None) -> Sampler | None:
        if held_out is None or not self.own.samples or self.found.task not in ("causal", "seq2seq"):
            return None
        start = getattr(self.source.config, "decoder_start_token_id", None)
        return Sampler(
            held_out.rows, self.found.task, self.tokenizer, self.own.samples, self.own.sample_tokens, self.longest,
            self.padding, start,
        )  # fmt: skip

    def _facts(self) -> dict[str, Any]:
        """The settings that decide the run, as plain values."""
        own = {name: getattr(self.own, name) for name in DECISIVE}
        rows = self.data.figures
        checked = self.own.resume or self.own.checkpoint_every is not None
        return own | {
            "steps": self.steps, "lr": self.lr, "task": self.found.task, "batch": self.settings.batch,
            "seq": self.longest, "seed": self.settings.trainer["seed"], "rows": rows["rows"], "tokens": rows["tokens"],
            **({"data": self.data.training.digest()} if checked else {}),
        }  # fmt: skip


def _parameters(model: nn.Module) -> tuple[int, int]:
    """How many numbers the parameters hold, and how many of them are trained."""
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(count for count, _ in counts), sum(count for count, trains in counts if trains)


def _check_checkpoints(folder: Path, facts: dict[str, Any], resume: bool) -> None:
    """Raise CheckpointError for checkpoints of another run, or of this one that is not to be resumed."""
    path = newest(folder)
    if path is None:
        return
    if not resume:
        raise CheckpointError(
            "there are checkpoints of an earlier run. Continue that run with --resume, or give another --out.",
            file=str(folder),
        )
    saved = Checkpoint(path).manifest.user.get("run")
    if not isinstance(saved, dict):
        raise CheckpointError("this checkpoint was not written by `relay finetune`", file=str(path), field="user.run")
    for name, value in facts.items():
        if saved.get(name) != value and name == "data":
            raise CheckpointError(
                "the run was started with other rows, though as many: a file, their order, the template or the "
                "tokenizer is another one. Give the same data, or start another run with another --out.",
                file=str(path), field="user.run.data",
            )  # fmt: skip
        if saved.get(name) != value:
            raise CheckpointError(
                f"the run was started with {saved.get(name)!r}; received {value!r}. What decides the batches, the "
                "rates and the model must not change. Give the same value, or start another run with another --out.",
                file=str(path), field=f"user.run.{name}",
            )  # fmt: skip
