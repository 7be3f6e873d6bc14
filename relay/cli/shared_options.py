"""Options that several commands share: their names, types, defaults and help texts.

Options of a single command are in that command's file. Invariant: an option of this file means the same in `relay
train`, `relay simulate` and `relay plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from hal.spec.units import BYTE_RATE, parse_quantity
from relay.adapter_options import ADAPTER_OPTIONS
from relay.cli.console import Size
from relay.option_schema import Option
from relay.options import OPTIONS, STEP_OPTIONS

AT_LEAST_ONE = click.IntRange(min=1)


class OptionType(click.ParamType):
    """Values of an option that click has no type for, read and checked by the option itself."""

    def __init__(self, option: Option) -> None:
        self.option = option
        self.name = {
            "recompute": "number, 'all' or 'none'",
            "loss scale": "number, 'dynamic' or 'fixed'",
            "resident layers": "number or 'auto'",
            "auto or flag": "'auto', 'true' or 'false'",
            "chunk": "number or 'auto'",
            "visits": "number, 'auto', or numbers of the forward and the backward",
            "speeds": "numbers joined by commas",
            "devices": "device, or several joined by commas",
        }.get(option.kind, option.kind)

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        try:
            return self.option.read(value) if isinstance(value, str) else self.option.check(value)
        except ValueError as wrong:
            self.fail(str(wrong), param, context)


def type_of(option: Option) -> click.ParamType:
    """What a command line takes for an option."""
    if option.kind == "choice":
        return click.Choice(option.choices)
    if option.kind == "count":
        return click.IntRange(min=option.least, max=option.most)
    if option.kind == "number":
        least = option.least if option.above is None else option.above
        return click.FLOAT if least is None else click.FloatRange(min=least, min_open=option.above is not None)
    if option.kind == "seed":
        return click.IntRange(0, 2**63 - 1)
    if option.kind == "flag":
        return click.BOOL
    if option.kind == "size":
        return Size()
    return click.STRING if option.kind == "text" else OptionType(option)


def training_option(name: str, default: Any = ..., because: str = "", **settings: Any) -> Callable[[Any], Any]:
    """The click option of an option of training, with its name, type, default and help.

    A command that needs another default gives it, or None and what `because` says of it: why it differs.
    """
    return option_of(OPTIONS[name] if name in OPTIONS else STEP_OPTIONS[name], default, because, **settings)


def option_of(option: Option, default: Any = ..., because: str = "", **settings: Any) -> Callable[[Any], Any]:
    """The click option of an option; see `training_option`."""
    default = option.default if default is ... else default
    if option.kind == "recompute" and isinstance(default, bool):
        default = "all" if default else "none"
    text = f"{option.help} {because}".rstrip()
    shown = {"default": default, "show_default": True} if default is not None else {}
    flag = f"--{option.name.replace('_', '-')}"
    if option.kind == "flag":
        flag = f"{flag}/--no-{flag.removeprefix('--')}"
    return click.option(flag, type=type_of(option), help=text, **{**shown, **settings})


COMMAND_LINE = tuple(name for name, option in OPTIONS.items() if option.kind not in ("object", "names"))
"""The options of training that a command line can give."""


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator. `--help` lists them in this order."""

    def decorated(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


ADAPTERS = tuple(name for name in ADAPTER_OPTIONS if name != "lora_alpha")
"""The options of adapters that change what a step costs."""

model_options = together(
    click.option("--model", help="The name of a model, such as llama-3-8b; relay simulate --presets lists them."),
    click.option("--config", type=click.Path(), help="A Hugging Face config.json. transformers builds its model."),
    click.option("--layers", type=AT_LEAST_ONE, help="Number of layers, for a model given by its sizes."),
    click.option("--hidden", type=AT_LEAST_ONE, help="Hidden size."),
    click.option("--heads", type=AT_LEAST_ONE, help="Attention heads.  [default: hidden / 128, about]"),
    click.option("--ffn", type=AT_LEAST_ONE, help="Width of the feed-forward network.  [default: 4 x hidden]"),
    click.option(
        "--vocab",
        "vocabulary",
        type=AT_LEAST_ONE,
        help="Size of the vocabulary. relay train trains models with 256.  [default: 50257]",
    ),
    click.option(
        "--tied/--untied",
        default=None,
        help="Whether embedding and head share one matrix.  [default: tied with a vocabulary of 256, else untied]",
    ),
    training_option(
        "seq",
        because="Of a config.json, at most what its model has positions for if not given; of a diffusion transformer "
        "the patches of a sample, those of its usual size if not given.",
    ),
    click.option(
        "--seconds",
        type=click.FloatRange(min=0, min_open=True),
        help="Seconds of audio in a sample, for a config.json whose model takes audio.  [default: 10, or the model's]",
    ),
    training_option("batch"),
    *[option_of(ADAPTER_OPTIONS[name], because="With --config.") for name in ADAPTERS],
)
"""The model and the batch of a step, for commands that train nothing."""
machine_options = together(
    click.option(
        "--device",
        default="generic",
        show_default=True,
        help="A device preset, or a .toml or .json file like one. Several, joined by commas, work together.",
    ),
    click.option("--count", default=1, show_default=True, type=AT_LEAST_ONE, help="So many of the device together."),
    click.option(
        "--one-link/--own-links",
        default=False,
        show_default=True,
        help="Several devices behind one link, that of the first, or each behind its own.",
    ),
    click.option("--link", help="A link preset or file.  [default: that of the device]"),
    click.option("--host", help="A host preset or file.  [default: that of the device]"),
    click.option(
        "--software",
        default="eager",
        show_default=True,
        type=click.Choice(["eager", "compiled", "fused"]),
        help="How ops run on the device: one kernel each, fused by a compiler, or whole layers fused by hand.",
    ),
    click.option(
        "--calibration",
        type=click.Path(),
        help="The file that relay calibrate wrote for the device: its rates replace those of the preset, and the range "
        "narrows. Without --device the machine is the one that was measured.",
    ),
    training_option("host_memory", because="Here, that of the host preset if not given."),
    training_option("capacity"),
)
"""A machine that need not be present."""


class Rate(click.ParamType):
    """Bytes a second, such as `25GB/s`."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> float:
        try:
            rate = parse_quantity(value, BYTE_RATE)
        except ValueError as wrong:
            self.fail(str(wrong), param, context)
        if rate <= 0:
            self.fail(f"{value!r} is not a rate above zero, such as 25GB/s.", param, context)
        return rate


hosts_options = together(
    click.option(
        "--hosts",
        type=AT_LEAST_ONE,
        help="Report the speed on 1, 2, 4, ... up to so many such hosts, one process each; --batch is each host's.",
    ),
    click.option("--network", type=Rate(), help="With --hosts: what each host sends and receives, such as 25GB/s."),
)
"""Several hosts, for commands that train nothing."""


def check_hosts(context: click.Context) -> None:
    """Raise UsageError where one of the options of several hosts is given without the other."""
    if (context.params["hosts"] is None) != (context.params["network"] is None):
        raise click.UsageError("--hosts and --network go together: how many hosts, and the rate of each.", context)


precision_option = training_option(
    "precision",
    default=None,
    because="Here, the first of bf16, fp16 and fp32 that the described device has if not given; relay train has fp32.",
)
longest_option = click.option(
    "--longest", is_flag=True, help="Find also the longest sequence that fits with the other options, by simulation."
)
"""Whether to look for the longest sequence."""


def longest_with(found: Any, head_chunk_tokens: int | str | None) -> int:
    """The longest sequence that fits with the options of a simulation, in which chunks were given as they are here."""
    from relay.simulation.limits.longest_sequence import longest_sequence

    return longest_sequence(found, head_chunk_tokens=head_chunk_tokens)


def forget_usual_length(context: click.Context, options: dict[str, Any]) -> None:
    """Leave the length of sequences to the model, unless --seq was given."""
    if context.get_parameter_source("seq") is not click.core.ParameterSource.COMMANDLINE:
        options["seq"] = None


def sample_options(options: dict[str, Any]) -> dict[str, Any]:
    """The lengths of a sample and the adapters, as far as they were given, as `relay.simulate` takes them."""
    lengths = {name: options[name] for name in ("seq", "seconds") if options[name] is not None}
    adapters = {name: options[name] for name in ADAPTERS if options[name] != ADAPTER_OPTIONS[name].default}
    return lengths | adapters
