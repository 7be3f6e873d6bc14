"""The options of `relay finetune` that no other command has: name, type, default, range and help, in one place.

The command line and `relay.finetuning.finetune` both read them from `FinetuneOptions`. Options of the trainer (device,
precision, memory, clipping) are in `relay.options`; here are only the defaults in which a fine-tuning differs.
Invariant: nothing that is given is ignored; what contradicts itself is a ValueError that names the options.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from relay.adapter_options import AdapterOptions, check_adapter_options
from relay.option_schema import Count, Positive, options_of
from relay.options import OPTIONS, STEP_OPTIONS, checked, refuse_unknown

TASKS = ("causal", "seq2seq", "classification", "regression", "token-classification")
REPORTS = ("tensorboard", "wandb", "jsonl")

Natural = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class FinetuneOptions(AdapterOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a fine-tuning takes besides the model, the data and the trainer's options; those of adapters first."""

    task: Annotated[
        Literal["causal", "seq2seq", "classification", "regression", "token-classification"] | None,
        Meta(description="What the model learns; found from its config.json and the fields of the data if not given."),
    ] = None
    messages: Annotated[
        str | None, Meta(description="Field with a conversation: a list of messages with role and content.")
    ] = None
    prompt: Annotated[str | None, Meta(description="Field with the text that is given (masked, or the source).")] = None
    completion: Annotated[str | None, Meta(description="Field with the text that is learned. Goes with --prompt.")] = (
        None
    )
    text: Annotated[str | None, Meta(description="Field with plain text, or with the words of a token classifier.")] = (
        None
    )
    label: Annotated[str | None, Meta(description="Field with a class, a number, or a list of classes of words.")] = (
        None
    )
    chat_template: Annotated[
        str | None,
        Meta(
            description="A file with a Jinja template for conversations, or 'chatml'; the tokenizer's own if not given."
        ),
    ] = None
    held_out: Annotated[
        Annotated[float, Meta(ge=0, lt=1)],
        Meta(description="Share of the rows that is not trained on and measures the held-out loss; 0 for none."),
    ] = 0.05
    pack: Annotated[
        bool,
        Meta(
            description="Put several documents in one row of --seq tokens. Each has positions of its own and attends "
            "to itself alone, so the loss is that of unpacked rows. Causal models only."
        ),
    ] = False
    length_buckets: Annotated[
        Count,
        Meta(
            description="Lengths to which rows are padded, chosen from the data. Each costs a compilation, and more of "
            "them less padding. Not used with --pack."
        ),
    ] = 3
    workers: Annotated[Natural, Meta(description="Processes that prepare batches; 0 prepares them between steps.")] = 0
    cache: Annotated[
        str | None,
        Meta(
            description="Folder for tokenised data, which a later run reads; that of the datasets library by default."
        ),
    ] = None
    epochs: Annotated[Positive, Meta(description="Passes over the data. Not used if --steps is given.")] = 1.0
    steps: Annotated[Count | None, Meta(description="Steps of the whole run, instead of --epochs.")] = None
    lr: Annotated[
        Positive | None, Meta(description="The highest learning rate; 2e-5 if not given, and 2e-4 with --lora.")
    ] = None
    schedule: Annotated[
        Literal["cosine", "linear", "constant"],
        Meta(description="How the learning rate goes on after warm-up: to 0 along a cosine or a line, or constant."),
    ] = "cosine"
    warmup: Annotated[Share, Meta(description="Share of the steps in which the learning rate rises from 0.")] = 0.03
    weight_decay: Annotated[
        Annotated[float, Meta(ge=0)], Meta(description="AdamW's weight decay. Norms and biases have none.")
    ] = 0.01
    merge: Annotated[
        bool,
        Meta(description="Also write the model with its adapters merged, to the folder `merged` in --out."),
    ] = False
    eval_every: Annotated[
        Count | None,
        Meta(description="Measure the held-out loss every so many steps; five times in a run if not given."),
    ] = None
    keep_best: Annotated[
        bool, Meta(description="Keep the model of the lowest held-out loss in the folder `best` in --out.")
    ] = False
    patience: Annotated[
        Count | None,
        Meta(
            description="Stop after so many evaluations in a row without a lower held-out loss. It keeps the best "
            "model too; never if not given."
        ),
    ] = None
    checkpoint_every: Annotated[
        Count | None, Meta(description="Save the state of the run every so many steps; never if not given.")
    ] = None
    keep_last: Annotated[Count, Meta(description="Newest checkpoints that are not deleted.")] = 2
    resume: Annotated[
        bool, Meta(description="Continue from the newest whole checkpoint in --out, if there is one.")
    ] = False
    samples: Annotated[
        Natural,
        Meta(description="Held-out prompts that the model continues at each evaluation; only for models of text."),
    ] = 1
    sample_tokens: Annotated[Count, Meta(description="Tokens of each continuation, at most.")] = 24
    plot: Annotated[
        str | None, Meta(description="A PNG file for loss, rate, gradient norm and throughput of the run's steps.")
    ] = None
    fit: Annotated[
        bool,
        Meta(
            description="Choose stash, slots, resident layers, recomputing and micro-batches for this machine, as far "
            "as they are not given. A resumed run keeps those of its checkpoint."
        ),
    ] = True
    dry_run: Annotated[
        bool, Meta(description="Show the data, memory, plan, time, energy and size of a checkpoint. Train nothing.")
    ] = False
    out: Annotated[str, Meta(description="The folder for the model that results.")] = "runs/finetuned"


FINETUNE_OPTIONS = options_of(FinetuneOptions)
"""The options of a fine-tuning, by name."""

TRAINER_DEFAULTS: dict[str, Any] = {
    "clip_grad_norm": 1.0,
    "defer_updates": True,
    "device": None,
    "precision": None,
    "batch": 8,
    "seq": None,
}
"""Defaults of options of the trainer and of a step that differ here. None: chosen from the machine or the model."""

TRAINER_OPTIONS = tuple(name for name, option in OPTIONS.items() if option.kind not in ("object", "names"))
"""The options of the trainer that a fine-tuning takes."""


class Settings(msgspec.Struct, frozen=True):
    """All options of a run: its own, those of a step, and those of the trainer.

    `given` names the options of the trainer that were given; the others may be chosen for the machine. `own_given`
    names those of the fine-tuning that were given.
    """

    own: FinetuneOptions
    batch: int
    seq: int | None
    trainer: dict[str, Any]
    given: frozenset[str]
    own_given: frozenset[str] = frozenset()


def settings_of(options: dict[str, Any]) -> Settings:
    """The settings that these options stand for. Raises ValueError or TypeError, with nothing done."""
    known = {**FINETUNE_OPTIONS, **STEP_OPTIONS, **{name: OPTIONS[name] for name in TRAINER_OPTIONS}}
    refuse_unknown("finetuning.finetune", options, known)
    given = {name: value for name, value in options.items() if not (value is None and name in TRAINER_DEFAULTS)}
    values = checked(given, known)
    own = FinetuneOptions(**{name: value for name, value in values.items() if name in FINETUNE_OPTIONS})
    _check_together(own, values)
    trainer = {name: TRAINER_DEFAULTS.get(name, OPTIONS[name].default) for name in TRAINER_OPTIONS}
    trainer |= {name: value for name, value in values.items() if name in OPTIONS}
    batch = values.get("batch", TRAINER_DEFAULTS["batch"])
    if "microbatches" in values and values["microbatches"] > batch:
        raise ValueError(
            f"batch={batch} cannot be cut into microbatches={values['microbatches']}: every micro-batch needs at least "
            "one row. Give a larger batch or fewer micro-batches."
        )
    if isinstance(trainer["device"], tuple) and (own.dry_run or values.get("fit")):
        asked = "dry_run" if own.dry_run else "fit"
        raise ValueError(
            f"{asked} plans for one device, and {len(trainer['device'])} are given. Leave one of them out."
        )
    trainer["microbatches"] = min(trainer["microbatches"], batch)
    of_trainer, of_own = frozenset(values) & set(OPTIONS), frozenset(values) & set(FINETUNE_OPTIONS)
    return Settings(own, batch, values.get("seq"), trainer, of_trainer, of_own)


def _check_together(own: FinetuneOptions, values: dict[str, Any]) -> None:
    """Raise ValueError for options that contradict each other."""
    check_adapter_options(own)
    if (own.prompt is None) != (own.completion is None):
        raise ValueError("prompt and completion go together: name both fields, or none.")
    named = [name for name in ("messages", "prompt", "text") if getattr(own, name) is not None]
    if len(named) > 1:
        raise ValueError(f"{' and '.join(named)} name two kinds of data. Give the fields of one.")
    if own.steps is not None and "epochs" in values:
        raise ValueError("steps and epochs both set the length of the run. Give one of them.")
    if own.patience is not None and own.held_out == 0:
        raise ValueError("patience compares held-out losses, and held_out=0 holds no rows out. Leave one of them out.")
    if own.keep_best and own.held_out == 0:
        raise ValueError("keep_best compares held-out losses, and held_out=0 holds no rows out. Leave one of them out.")
    if own.eval_every is not None and own.held_out == 0:
        raise ValueError(
            "eval_every measures held-out losses, and held_out=0 holds no rows out. Leave one of them out."
        )
    if own.pack and "length_buckets" in values:
        raise ValueError(
            "length_buckets are lengths to pad to, and packed rows have one length. Leave one of them out."
        )
    if own.checkpoint_every is None and "keep_last" in values:
        raise ValueError("keep_last goes with checkpoint_every, which is not given. Add it, or leave it out.")
    for name in ("samples", "sample_tokens"):
        if name not in values or values["samples" if "samples" in values else name] == 0:
            continue
        if own.held_out == 0:
            raise ValueError(f"{name} is of held-out prompts, and held_out=0 holds no rows out. Leave one of them out.")
        if own.task not in (None, "causal", "seq2seq"):
            raise ValueError(f"{name} is of models that write text, and task={own.task!r}. Leave one of them out.")
    if own.samples == 0 and "sample_tokens" in values:
        raise ValueError("sample_tokens is the length of samples, and samples=0 writes none. Leave one of them out.")
    if own.plot is not None and not own.plot.lower().endswith(".png"):
        raise ValueError(f"plot={own.plot!r} must be the name of a PNG file, such as 'loss.png'.")
    if own.task not in (None, "causal") and own.pack:
        raise ValueError(f"pack is for causal models, and task={own.task!r}. Leave one of them out.")
