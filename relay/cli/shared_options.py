"""Options that several commands share: their names, types, defaults and help texts.

Options of a single command are in that command's file. Invariant: an option of this file means the same in `relay
train`, `relay simulate` and `relay plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from relay.cli.console import Size

AT_LEAST_ONE = click.IntRange(min=1)


class Recompute(click.ParamType):
    """`all`, `none`, or the number of segments that recompute. Run files may also hold true and false."""

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
        self.fail(f"{value!r} is not a number of segments, 'all' or 'none'.", param, context)


class LossScale(click.ParamType):
    """`dynamic`, `fixed` (at 65536, the value at which a dynamic one starts), or a power of two to fix it at."""

    name = "number, 'dynamic' or 'fixed'"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> str | float:
        from relay.options import fixed_scale

        if value == "dynamic":
            return "dynamic"
        try:
            return fixed_scale(value if value == "fixed" else float(value))
        except ValueError:
            self.fail(f"{value!r} is not 'dynamic', 'fixed' or a power of two such as 65536.", param, context)


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several options as one decorator. `--help` lists them in this order."""

    def decorated(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


model_options = together(
    click.option("--model", help="The name of a model, such as llama-3-8b; relay simulate --presets lists them."),
    click.option("--config", type=click.Path(), help="A Hugging Face config.json that describes the model."),
    click.option("--layers", type=AT_LEAST_ONE, help="Number of layers, for a model given by its sizes."),
    click.option("--hidden", type=AT_LEAST_ONE, help="Hidden size."),
    click.option("--heads", type=AT_LEAST_ONE, help="Attention heads.  [default: heads of about 128]"),
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
    click.option("--seq", default=1024, show_default=True, type=AT_LEAST_ONE, help="Tokens in a sequence."),
    click.option("--batch", default=8, show_default=True, type=AT_LEAST_ONE, help="Sequences in a step."),
)
"""The model and the batch of a step, for commands that train nothing."""
machine_options = together(
    click.option(
        "--device", default="generic", show_default=True, help="A device preset, or a .toml or .json file like one."
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
    click.option("--host-memory", type=Size(), help="Host memory to use at most, such as 512GB.  [default: all]"),
    click.option("--capacity", type=Size(), help="Device memory to use at most, such as 16GB.  [default: all]"),
)
"""A machine that need not be present."""
precision_option = click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="The dtype of the arithmetic on the device.  [default: the first of bf16, fp16, fp32 that the device has]",
)
clip_option = click.option(
    "--clip",
    "clip_grad_norm",
    type=click.FloatRange(min=0, min_open=True),
    help="Clip gradients to this global norm. All gradients wait on the host until the norm is known.",
)
layers_per_slot_option = click.option(
    "--layers-per-slot",
    default=1,
    show_default=True,
    type=AT_LEAST_ONE,
    help="Consecutive layers in one slot. More layers mean fewer and larger transfers, and larger slots.",
)
recompute_option = click.option(
    "--recompute",
    default="all",
    show_default=True,
    type=Recompute(),
    help="Segments that run their forward again in the backward: all, none, or the number of first segments. A segment "
    "is the embedding, the layers of one slot, or the head, which never recomputes. The other segments save the "
    "tensors that the backward needs in the stash.",
)
loss_scale_option = click.option(
    "--loss-scale",
    default="dynamic",
    show_default=True,
    type=LossScale(),
    help="Loss scale for fp16. With a dynamic one all gradients wait on the host until they are known to be finite. "
    "With a fixed one (a power of two, or 'fixed' for 65536) each layer is updated at once.",
)
