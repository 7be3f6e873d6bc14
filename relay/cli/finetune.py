"""The command `relay finetune`: tune a Hugging Face model on files of data.

This file holds the options, the progress bar and the summary. The work is `relay.finetuning.finetune.finetune`, which
any script may call. Invariant: options, their ranges and their defaults come from `relay.finetuning.options`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from relay.cli.console import RunStopped, json_option, print_json
from relay.cli.shared_options import option_of, together, training_option
from relay.finetuning.options import FINETUNE_OPTIONS, REPORTS, TRAINER_DEFAULTS, TRAINER_OPTIONS, settings_of

BECAUSE = {
    "clip_grad_norm": "1.0 here, as fine-tunings usually have.",
    "defer_updates": "On here, since relay finetune does not read the model between steps.",
    "device": "Here, the best device of this machine if not given.",
    "precision": "Here, bf16 for a model in half precision on an accelerator, else fp32, if not given.",
    "batch": "8 rows of --seq tokens at most.",
    "seq": "Longer rows are cut. Here, 1024 or what the model has positions for if not given.",
}


def _trainer_option(name: str) -> Any:
    if name not in TRAINER_DEFAULTS:
        return training_option(name)
    return training_option(name, default=TRAINER_DEFAULTS[name], because=BECAUSE[name])


@click.command()
@click.argument("model")
@click.option("--data", multiple=True, required=True, help="A file of data, or a saved dataset folder. Repeatable.")
@together(*[option_of(option) for option in FINETUNE_OPTIONS.values()])
@click.option(
    "--report-to", multiple=True, type=click.Choice(REPORTS), help="Where figures are written as well. Repeatable."
)
@together(*[_trainer_option(name) for name in ("batch", "seq", *TRAINER_OPTIONS)])
@json_option
@click.pass_context
def finetune(
    context: click.Context,
    /,
    model: str,
    data: tuple[str, ...],
    report_to: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Fine-tune the model in the folder MODEL on files of data, and write the result to --out.

    MODEL is a folder that save_pretrained wrote or that was downloaded, a folder of adapters from an earlier run, or a
    name on the hub. Data are JSONL, JSON, parquet, CSV or text files, or saved dataset folders.

    \b
    Examples:
      relay finetune my-model --data conversations.jsonl
      relay finetune my-model --data chats.jsonl --lora 16 --quantize-frozen nf4 --pack
      relay finetune my-encoder --data reviews.csv --text review --label stars --epochs 3
      relay finetune my-model --data chats.jsonl --dry-run
      relay finetune my-model --data chats.jsonl --checkpoint-every 100 --resume
    """
    default = click.core.ParameterSource.DEFAULT
    given = {name: value for name, value in options.items() if context.get_parameter_source(name) is not default}
    given.setdefault("out", options["out"])
    try:
        settings_of(given)
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from wrong
    _refuse_several_processes(context)
    result = _run(model, data, report_to, given)
    report = result.pop("report") if "report" in result else _summary(result)
    if as_json:
        print_json(result)
    else:
        click.echo(report)


def _refuse_several_processes(context: click.Context) -> None:
    """Raise UsageError, on the first process alone, where torchrun has started several: all would write one folder."""
    from relay.distributed.ranks import launched

    rank, count = launched()
    if count == 1:
        return
    if rank != 0:
        context.exit(2)
    raise click.UsageError(
        f"relay finetune trains in one process, and torchrun has started {count}. Start it without torchrun; "
        "--device cuda:0,cuda:1 takes several devices. For several processes, write a script with relay.Trainer.",
        context,
    )


def _run(model: str, data: tuple[str, ...], report_to: tuple[str, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Train with a progress bar. Raises RunStopped where Ctrl-C or SIGTERM ends the run."""
    from tqdm import tqdm

    from relay.checkpoint_manager import Terminated
    from relay.cli.compile_notice import compile_notices
    from relay.finetuning.finetune import CHECKPOINTS
    from relay.finetuning.finetune import finetune as run

    def log(text: str) -> None:
        click.echo(text, err=True)

    bar: Any = None
    with compile_notices(log) as notice:

        def show(figures: dict[str, Any], steps: int) -> None:
            nonlocal bar
            if bar is None:
                pause = 0.3 if sys.stderr.isatty() else 10.0
                begin = figures["step"] - ("loss" in figures)
                bar = tqdm(
                    total=steps, initial=begin, desc="training", unit="step", dynamic_ncols=True, mininterval=pause
                )
                notice.bar = bar
            if "loss" in figures:
                bar.set_postfix_str(
                    f"loss {figures['loss']:.3f}, {figures['tokens_per_second']:,.0f} tokens/s", refresh=False
                )
                bar.update()
                return
            right = f", accuracy {figures['accuracy']:.1%}" if "accuracy" in figures else ""
            bar.write(f"step {figures['step']}: held-out loss {figures['held_out_loss']:.4f}{right}", file=sys.stderr)
            for text in figures["samples"]:
                bar.write(f"  {text!r}", file=sys.stderr)

        try:
            return run(model, data, report_to=report_to, log=log, on_figures=show, **given)
        except (KeyboardInterrupt, Terminated) as stop:
            saved = sorted((Path(given["out"]) / CHECKPOINTS).glob("step-*"))
            where = (
                f"the run is saved in '{saved[-1]}'. The same command with --resume continues it."
                if saved
                else "nothing was saved. With --checkpoint-every a run is saved as it goes."
            )
            how = "ended by SIGTERM" if isinstance(stop, Terminated) else "interrupted"
            raise RunStopped(f"{how}: {where}", int(getattr(stop, "code", None) or 1)) from stop
        finally:
            notice.bar = None
            if bar is not None:
                bar.close()


def _summary(result: dict[str, Any]) -> str:
    """The summary at the end of a run."""
    from hal.spec.units import format_size

    lines = [""]
    if result["steps_now"]:
        lines += [
            f"training loss   {result['loss_first']:.4f} -> {result['loss_last']:.4f} in {result['steps']} steps",
            f"time            {result['seconds']:.1f} s; {result['targets_trained']:,} targets trained",
            f"device memory   {format_size(result['device_peak_bytes'])} at its peak",
        ]
    else:
        lines.append(f"steps           all {result['steps']} were done before; none was run")
    if result["held_out_before"] is not None:
        best = f", at best {result['held_out_best']:.4f}" if result["held_out_best"] < result["held_out_after"] else ""
        lines.append(f"held-out loss   {result['held_out_before']:.4f} -> {result['held_out_after']:.4f}{best}")
    if result["stopped_early"]:
        lines.append("stopped early   the held-out loss fell no further")
    for name, what in (("out", "result"), ("best", "best"), ("merged", "merged")):
        if result.get(name):
            lines.append(f"{what:<15} {result[name]}")
    return "\n".join(lines)
