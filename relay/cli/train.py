"""The command `relay train`: train a byte-level GPT on text.

This file holds the options, the run file and the summary at the end. The training is in `relay.cli.training_run`, which
uses `relay.Trainer` as any script could. Invariant: an option has the same meaning and the same limits in a run file as
on the command line.
"""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import UNSET, UnsetType

from hal import schema
from relay.cli.console import RunStopped, Size, json_option, print_json
from relay.cli.sample import DEFAULT_FOLDER
from relay.cli.shared_options import AT_LEAST_ONE, COMMAND_LINE, OptionType, together, training_option
from relay.options import RENAMED, check_master_weights

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SAMPLE_BYTES = 300
OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "defer_updates": {"default": True, "because": "On here, since relay train does not read the model between steps."},
    "stall_timeout": {
        "default": 120.0,
        "because": "On here, since a run that hangs has nobody who waits for its steps.",
    },
}
"""Defaults that differ from those of `relay.Trainer`, and why."""

_DEFAULT = " (the default)"
BY_DEFAULT = click.core.ParameterSource.DEFAULT


@click.command()
@click.argument("run_file", required=False, metavar="[RUN.TOML]", type=click.Path(path_type=Path))
@click.option(
    "--data",
    type=click.Path(),
    help="A text file, or a folder of text files.  [default: the sources of Python's standard library]",
)
@click.option("--layers", default=6, show_default=True, type=AT_LEAST_ONE, help="Number of layers.")
@click.option("--hidden", default=128, show_default=True, type=AT_LEAST_ONE, help="Hidden size.")
@click.option("--heads", default=4, show_default=True, type=AT_LEAST_ONE, help="Attention heads. Must divide --hidden.")
@training_option("seq", default=128, because="Tokens are bytes here; short sequences, so that a run takes minutes.")
@training_option("batch", default=16, because="relay simulate and plan have 8, of longer sequences.")
@click.option("--steps", default=300, show_default=True, type=AT_LEAST_ONE, help="Steps of the whole run.")
@click.option(
    "--lr",
    default=2e-3,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="The highest learning rate. The rate is warmed up to it, then falls to a tenth along a cosine.",
)
@click.option(
    "--dropout",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1, max_open=True),
    help="Probability of dropout.",
)
@together(*[training_option(name, **OWN_DEFAULTS.get(name, {})) for name in COMMAND_LINE])
@click.option("--out", default=DEFAULT_FOLDER, show_default=True, type=click.Path(), help="The folder of the run.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False),
    help="Write the timeline of a few steps to this file, for https://ui.perfetto.dev.",
)
@click.option(
    "--verify",
    type=AT_LEAST_ONE,
    help="Before training, run the next N steps in Relay and in plain PyTorch, compare every tensor, and undo the "
    "steps. If a difference exceeds what README promises, nothing is trained and the exit code is 1.  [default: none]",
)
@click.option(
    "--checkpoint-every",
    type=AT_LEAST_ONE,
    help="Save a checkpoint every so many steps, in the background.  [default: never]",
)
@click.option(
    "--keep-last",
    default=2,
    show_default=True,
    type=AT_LEAST_ONE,
    help="Newest checkpoints that are not deleted. Goes with --checkpoint-every.",
)
@click.option(
    "--resume/--no-resume", default=False, help="Continue from the newest whole checkpoint in --out, if there is one."
)
@click.option("--sample/--no-sample", default=True, show_default=True, help="Print text that the trained model writes.")
@click.option(
    "--fit",
    is_flag=True,
    help="Choose stash, slots, resident layers, recomputing, split masters and micro-batches for this machine, as far "
    "as they are not given. A resumed run keeps those of its checkpoint.",
)
@click.option("--plan", type=click.Path(path_type=Path), help="A run file that `relay plan --out` wrote.")
@json_option
@click.pass_context
def train(context: click.Context, /, run_file: Path | None, plan: Path | None, as_json: bool, **options: Any) -> None:
    """Train a byte-level GPT on text, relaying its layers through a device.

    RUN.TOML may hold any of the options by name, such as `layers = 12`. Options on the command line take precedence.
    Paths are relative to the current folder.

    \b
    Examples:
      relay train
      relay train --data ~/notes --layers 12 --hidden 256 --steps 1000
      relay train run.toml --device cpu --stash host --capacity 64MB
      relay train --steps 20 --no-sample --json
      relay train --out runs/long --checkpoint-every 100 --resume
      relay train --verify 3
      relay train --layers 48 --hidden 2048 --fit
      torchrun --standalone --nproc-per-node 2 -m relay train --batch 32
    """
    cautions: list[Callable[[dict[str, Any]], str | None]] = []
    by_default = [name for name in options if context.get_parameter_source(name) is BY_DEFAULT]
    origins = dict.fromkeys(options, "") | dict.fromkeys(by_default, _DEFAULT)
    for file in (plan, run_file):
        if file is not None:
            chosen = _from_file(context, file, cautions)
            options |= chosen
            origins |= dict.fromkeys(chosen, f" (from '{file}')")
    _check_together(options, origins)
    from relay.distributed.ranks import launched  # which imports torch: `--help` does without

    rank, count = launched()
    if count > 1 and (options["fit"] or options["verify"] is not None):
        raise click.UsageError(
            f"{'--fit' if options['fit'] else '--verify'} is not possible with several processes. Use it in one "
            "process first, and give torchrun the options that it finds."
        )
    if options.pop("fit"):
        from relay.cli.fitted_options import fitted
        from relay.cli.training_run import CHECKPOINTS

        given = [name for name, origin in origins.items() if origin != _DEFAULT]
        where = Path(options["out"]) / CHECKPOINTS
        options = fitted(options, given, where, lambda text: click.echo(text, err=True))
    for caution in cautions:
        text = caution(options)
        if text is not None:
            click.echo(text, err=True)
    from relay.cli.training_run import NotEqual

    try:
        result = _run(options)
    except NotEqual as different:
        if as_json:
            found = different.verification.as_dict()
            print_json({"error": str(different), "type": "NotEqual", "verification": found})
        click.echo(f"relay: {different}", err=True)
        context.exit(1)
    if rank != 0:
        return  # one summary for all processes
    if as_json:
        print_json(result)
    else:
        click.echo(_summary(result))


def _from_file(
    context: click.Context, run_file: Path, cautions: list[Callable[[dict[str, Any]], str | None]]
) -> dict[str, Any]:
    """The options in the file that are not on the command line, checked like options on the command line.

    For a file with a planned model, a function that compares options with that model is added to `cautions`.
    """
    with run_file.open("rb") as file:
        try:
            given = tomllib.load(file)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as wrong:
            raise click.UsageError(f"'{run_file}' is not valid TOML: {wrong}", context) from wrong
    if "planned" in given:
        cautions.append(_caution_of(context, run_file, given.pop("planned")))
    known = {
        parameter.name: parameter
        for parameter in context.command.params
        if isinstance(parameter, click.Option) and parameter.name not in ("as_json", "plan")
    }
    for key in given:
        if RENAMED.get(key) in known:
            raise click.UsageError(f"'{run_file}': the key '{key}' is called '{RENAMED[key]}' now.", context)

    def refuse(field: str, message: str) -> click.UsageError:
        return click.UsageError(f"'{run_file}': {schema.located(field, message)}.", context)

    fields = [(str(name), _written(option) | UnsetType, UNSET) for name, option in known.items()]
    read = schema.read(given, msgspec.defstruct("RunFile", fields, forbid_unknown_fields=True), refuse)
    chosen: dict[str, Any] = {}
    for key, value in msgspec.to_builtins(read).items():
        try:
            converted = known[key].process_value(context, value)
        except click.BadParameter as wrong:
            raise click.UsageError(f"'{run_file}': {key}: {wrong.message}", context) from wrong
        if context.get_parameter_source(key) is BY_DEFAULT:
            chosen[key] = converted
    return chosen


def _caution_of(context: click.Context, run_file: Path, table: Any) -> Callable[[dict[str, Any]], str | None]:
    from relay.simulation.plan_file import caution, from_table

    try:
        planned = from_table(table)
    except ValueError as wrong:
        raise click.UsageError(f"'{run_file}': {wrong}", context) from wrong
    return lambda options: caution(planned, options["layers"], options["hidden"], options["heads"])


def _written(option: click.Option) -> Any:
    """The type that an option has in a run file. Click then checks its range, but alone would turn 4.5 into 4."""
    kind = option.type
    if isinstance(kind, OptionType):
        flag = kind.option.kind in ("recompute", "auto or flag")
        return int | float | str | bool if flag else int | float | str
    types = {
        click.types.BoolParamType: bool,
        Size: int | str,
        click.types.FloatParamType: float,
        click.types.IntParamType: int,
    }
    return next((written for each, written in types.items() if isinstance(kind, each)), str)


def _check_together(options: dict[str, Any], origins: dict[str, str]) -> None:
    """Raise UsageError for options that contradict each other. `origins` names where each value came from."""
    for name in ("lr", "dropout", "clip_grad_norm", "clip_grad_value", "stall_timeout"):
        if options[name] is not None and not math.isfinite(options[name]):
            flag = name.replace("_", "-")
            raise click.UsageError(f"--{flag} must be a finite number; received {options[name]}.")
    if options["data"] is not None and not str(options["data"]).strip():
        raise click.UsageError("--data is empty. Name a file or a folder, or leave it out for Python's own library.")
    if options["checkpoint_every"] is None and origins["keep_last"] != _DEFAULT:
        raise click.UsageError("--keep-last goes with --checkpoint-every, which is not given. Add it, or leave it out.")
    try:
        check_master_weights(options["master_weights"], options["precision"])
    except ValueError as wrong:
        raise click.UsageError(str(wrong)) from wrong
    if options["hidden"] % options["heads"]:
        raise click.UsageError(
            f"--hidden must be a multiple of --heads; received {options['hidden']}{origins['hidden']} and "
            f"{options['heads']}{origins['heads']}."
        )
    if options["batch"] < options["microbatches"]:
        raise click.UsageError(
            f"--batch {options['batch']}{origins['batch']} cannot be cut into --microbatches "
            f"{options['microbatches']}{origins['microbatches']}: every micro-batch needs at least one sequence. Give "
            "a larger batch or fewer micro-batches."
        )


def _run(options: dict[str, Any]) -> dict[str, Any]:
    """Train, and sample from the model. Returns the result as `--json` prints it."""
    from relay.cli.sample import DEFAULT_PROMPT, generate
    from relay.cli.training_run import train_gpt
    from relay.distributed.ranks import launched
    from relay.models import gpt_folder

    result = train_gpt(options, log=lambda text: click.echo(text, err=True))
    if options["sample"] and launched()[0] == 0:
        try:
            model = gpt_folder.load(Path(options["out"]))
            written = generate(model, DEFAULT_PROMPT.encode(), SAMPLE_BYTES, seed=options["seed"])
        except KeyboardInterrupt as stop:
            raise RunStopped(
                f"interrupted while sampling: the training is done, and the model is saved in '{result['weights']}'"
            ) from stop
        result["sample"] = DEFAULT_PROMPT + written.decode(errors="replace")
    return result


def _summary(result: dict[str, Any]) -> str:
    """The summary at the end of a run. Lines about the steps are left out where no step was run."""
    from hal.spec.units import format_size

    lines = [""]
    before, after = f"{result['held_out_before']:.3f}", f"{result['held_out_after']:.3f}"
    if result["steps_now"]:
        lines += [
            f"training loss   {result['loss_first']:.3f} -> {result['loss_last']:.3f} nats a byte",
            f"held-out loss   {before} -> {after} nats a byte",
            f"device memory   {_device_memory(result['device_peak_bytes'], result['baseline_device_bytes'])}",
            f"host memory     {format_size(result['host_bytes'])}",
            f"time            {result['seconds']:.1f} s, {result['tokens_per_second']:,.0f} tokens/s; busy:"
            f" compute {result['compute_seconds']:.1f} s, transfer {result['transfer_seconds']:.1f} s,"
            f" optimizer {result['optimizer_seconds']:.1f} s",
        ]
    else:
        lines += [
            f"steps           all {result['steps']} were done before; none was run",
            f"held-out loss   {after} nats a byte",
        ]
    lines.append(f"weights         {result['weights']} ({result['parameters']:,} parameters)")
    if "sample" in result:
        lines += ["", "The model now writes (`relay sample` writes more):", "", result["sample"]]
    return "\n".join(lines)


def _device_memory(peak: int, plain: int) -> str:
    """The peak of the device as a share of what plain training would need there."""
    from hal.spec.units import format_size

    if peak <= 0 or plain <= 0:
        used = format_size(peak) if peak > 0 else "not reported by the device"
        return f"{used}; plain training would have needed {format_size(plain)}"
    share = f"1/{plain / peak:.0f}" if plain >= 2 * peak else f"{peak / plain:.0%}"
    return f"{format_size(peak)} at its peak, {share} of the {format_size(plain)} that plain training would have needed"
