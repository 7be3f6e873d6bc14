"""Options that several commands share: what they are called, what they allow, what they say.

One text for `relay train`, `simulate` and `plan`, so that an option means the same in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from relay.cli.console import Size

AT_LEAST_ONE = click.IntRange(min=1)


class Recompute(click.ParamType):
    """`all`, `none`, or how many segments recompute; in run files also true and false."""

    name = "number, 'all' or 'none'"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> bool | int:
        if isinstance(value, (bool, int)):
            if value >= 0:
                return value
        else:
            known = {"all": True, "true": True, "none": False, "false": False}
            text = str(value).strip().lower()
            if text in known:
                return known[text]
            if text.isdecimal():
                return int(text)
        self.fail(f"{value!r} is neither a number of segments, nor 'all', nor 'none'.", param, context)


class LossScale(click.ParamType):
    """`dynamic`, `fixed` (at 65536, where a dynamic one begins), or the power of two to fix it at."""

    name = "number, 'dynamic' or 'fixed'"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> str | float:
        from relay.options import fixed_scale

        if value == "dynamic":
            return "dynamic"
        try:
            return fixed_scale(value if value == "fixed" else float(value))
        except ValueError:
            self.fail(f"{value!r} is neither 'dynamic', nor 'fixed', nor a power of two such as 65536.", param, context)


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator, listed by `--help` in this order."""

    def decorated(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


model_options = together(
    click.option("--model", help="A model by name, such as llama-3-8b."),
    click.option("--config", type=click.Path(), help="A Hugging Face config.json."),
    click.option("--layers", type=AT_LEAST_ONE, help="How many blocks."),
    click.option("--hidden", type=AT_LEAST_ONE, help="Width of the model."),
    click.option("--heads", type=AT_LEAST_ONE, help="Attention heads.  [default: hidden / 128]"),
    click.option("--ffn", type=click.IntRange(min=0), default=0, help="Feed-forward width.  [default: 4 x hidden]"),
    click.option(
        "--vocab",
        "vocabulary",
        default=50257,
        show_default=True,
        type=AT_LEAST_ONE,
        help="Size of the vocabulary. 256 is the model of relay train.",
    ),
    click.option(
        "--tied/--untied",
        default=None,
        help="Whether embedding and head are one matrix.  [default: with a vocabulary of 256, as in relay train]",
    ),
    click.option("--seq", default=1024, show_default=True, type=AT_LEAST_ONE, help="Tokens in a sequence."),
    click.option("--batch", default=8, show_default=True, type=AT_LEAST_ONE, help="Sequences in a step."),
)
"""A model by its shape, and what it is given in a step: for commands that train nothing."""
machine_options = together(
    click.option(
        "--device", default="generic", show_default=True, help="A preset, or a .toml or .json file of the same form."
    ),
    click.option("--link", help="A preset or file.  [default: the device's own]"),
    click.option("--host", help="A preset or file.  [default: the device's own]"),
    click.option("--software", default="eager", show_default=True, type=click.Choice(["eager", "compiled", "fused"])),
    click.option("--host-memory", type=Size(), help="Such as 512GB.  [default: the host preset's]"),
    click.option("--capacity", type=Size(), help="Device memory to keep within.  [default: all of it]"),
)
"""A machine that need not be here."""
precision_option = click.option(
    "--precision", type=click.Choice(["fp32", "bf16", "fp16"]), help="[default: bf16, else fp16]"
)
clip_option = click.option(
    "--clip",
    "clip_grad_norm",
    type=click.FloatRange(min=0, min_open=True),
    help="Clip the gradients' global norm. Holds all gradients on the host until it is known.",
)
layers_per_slot_option = click.option(
    "--layers-per-slot",
    default=1,
    show_default=True,
    type=AT_LEAST_ONE,
    help="Consecutive layers that share a slot: fewer, larger transfers, larger slots.",
)
recompute_option = click.option(
    "--recompute",
    default="all",
    show_default=True,
    type=Recompute(),
    help="How many segments run their forward again in the backward: all, none, or a number, of the first ones: the "
    "embedding counts as one, then each slot's layers; the head never runs again. The others keep what the backward "
    "needs in the stash.",
)
loss_scale_option = click.option(
    "--loss-scale",
    default="dynamic",
    show_default=True,
    type=LossScale(),
    help="Of fp16. A dynamic one holds all gradients on the host until they are known to be finite; a fixed one "
    "(a power of two, or 'fixed' for 65536) updates at once.",
)
