"""Options that several commands share: what they are called, what they allow, what they say.

One text for `relay train`, `simulate` and `plan`, so that an option means the same in all of them.
"""

from __future__ import annotations

from typing import Any

import click

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


ffn_option = click.option(
    "--ffn", type=click.IntRange(min=0), default=0, help="Feed-forward width.  [default: 4 x hidden]"
)
vocabulary_option = click.option(
    "--vocab",
    "vocabulary",
    default=50257,
    show_default=True,
    type=AT_LEAST_ONE,
    help="Size of the vocabulary. 256 is the model of relay train.",
)
tied_option = click.option(
    "--tied/--untied",
    default=None,
    help="Whether embedding and head are one matrix.  [default: with a vocabulary of 256, as in relay train]",
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
    help="How many segments run their forward again in the backward: all, none, or a number (the first ones). "
    "The others keep what the backward needs in the stash.",
)
loss_scale_option = click.option(
    "--loss-scale",
    default="dynamic",
    show_default=True,
    type=LossScale(),
    help="Of fp16. A dynamic one holds all gradients on the host until they are known to be finite; a fixed one "
    "(a power of two, or 'fixed' for 65536) updates at once.",
)
