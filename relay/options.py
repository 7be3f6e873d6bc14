"""The options of a training run: name, type, default, range and help of each, in one place.

`TrainOptions` is the definition. The trainer checks its arguments against it; `relay train`, `simulate` and `plan`, run
files and plan files take names, defaults and help from it. An option is added by one field here and by its use.

It opens nothing, imports no torch and knows no model. Errors are ValueError or TypeError and name the option.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import msgspec
from msgspec import Meta

from relay.option_schema import (
    AutoFlag,
    Chunk,
    Count,
    Devices,
    Option,
    Positive,
    PythonObject,
    Residents,
    Scale,
    Segments,
    Size,
    Speeds,
    Visits,
    options_of,
)

P = ParamSpec("P")
R = TypeVar("R")


RENAMED = {
    "active": "active_layers",
    "clip": "clip_grad_norm",
    "facts": "metadata",
    "parameter_groups": "param_groups",
    "programs": "max_cached_programs",
    "sequence": "seq",
    "stall_seconds": "stall_timeout",
}
"""Former names of arguments, each with the present one. A former name is refused."""


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a `relay.Trainer` takes besides the model and its loss."""

    device: Annotated[
        Devices,
        Meta(
            description="The device, by a name that `relay devices` lists; or several that work together, as a list or "
            "joined by commas. They take groups of layers in turn, and no result changes. Devices that work in host "
            "memory ('cpu') work alone."
        ),
    ] = "cpu"
    layers_per_visit: Annotated[
        Visits,
        Meta(
            description="With several devices, the consecutive segments that a device takes at a time; two numbers are "
            "for the forward and the backward. Each needs `slots` slots. 'auto' takes as many as end the step first, "
            "up to 8, and as the memory allows. No result changes."
        ),
    ] = "auto"
    device_speeds: Annotated[
        Speeds | None,
        Meta(
            description="How fast several devices are beside each other, such as 1 and 0.6: slower ones take fewer "
            "layers at a time. All alike if not given. No result of devices of one kind changes."
        ),
    ] = None
    optimizer: Annotated[
        PythonObject,
        Meta(
            description="`relay.AdamW`, `Adam`, `SGD`, `LAMB`, `Lion`, `Adafactor` or `Muon` with its hyperparameters, "
            "or `functools.partial(torch.optim.X, ...)`. None is `relay.AdamW()`."
        ),
    ] = None
    microbatches: Annotated[Count, Meta(description="Pieces that a batch is cut into along its first dimension.")] = 4
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"],
        Meta(
            description="What the device computes in. bf16 and fp16 compute as PyTorch's autocast does, with master "
            "weights and optimizer states in fp32 on the host; fp16 has a loss scale."
        ),
    ] = "fp32"
    loss_scale: Annotated[
        Scale,
        Meta(
            description="Used with fp16 only. 'dynamic' keeps all gradients of a step on the host, checks them, and "
            "skips the step if one is not finite. A power of two ('fixed' is 65536) updates each layer at once and "
            "raises an error on overflow."
        ),
    ] = "dynamic"
    stash: Annotated[
        Literal["device", "host"],
        Meta(
            description="Where the inputs of layers wait for the backward pass. With 'host' the peak of device memory "
            "does not depend on the number of layers."
        ),
    ] = "device"
    slots: Annotated[
        Annotated[int, Meta(ge=1, le=1024)],
        Meta(
            description="Slots on the device, each for as many layers as share a slot. With 1, loading and computing "
            "do not overlap."
        ),
    ] = 2
    layers_per_slot: Annotated[
        Count,
        Meta(description="Consecutive layers that share a slot: fewer and larger transfers, larger slots."),
    ] = 1
    resident_layers: Annotated[
        Residents,
        Meta(
            description="Segments whose weights stay on the device from step to step, so that fewer bytes cross the "
            "link: none (0), so many, or as many as fit ('auto', which leaves 5 % of the device free). The embedding "
            "is one segment, and so are the layers of each slot, and the head. No result changes."
        ),
    ] = 0
    sparse_rows: Annotated[
        AutoFlag,
        Meta(
            description="Send only those rows of an embedding to the device that the batch looks up, and their "
            "gradients back. 'auto' does so where that is at most half of the embedding; True wherever it is less than "
            "all. An embedding that is tied to the head is sent whole. No result changes."
        ),
    ] = "auto"
    recompute: Annotated[
        Segments,
        Meta(
            description="Segments that run their forward again in the backward pass: all (True), none (False, which "
            "saves their activations instead), or the first so many. The embedding is one segment, and so are the "
            "layers of each slot. No result changes."
        ),
    ] = True
    head_chunk_tokens: Annotated[
        Chunk,
        Meta(
            description="Run what follows the last layer (norm, head, loss) over chunks of so many positions of a "
            "micro-batch, so that the logits of one chunk exist at a time; 'auto' does so where they would take more "
            "than a quarter of the free memory. A loss that reads positions across chunks is refused, and with 'auto' "
            "left whole, with the reason in the log."
        ),
    ] = None
    mlp_chunk_tokens: Annotated[
        Count | None,
        Meta(
            description="Run the wide pieces of a layer that work position by position (feed-forward networks, norms) "
            "over chunks of so many positions of a micro-batch, for sequences whose layers need more memory than there "
            "is. A layer without such pieces is left whole; a model without any is refused."
        ),
    ] = None
    clip_grad_norm: Annotated[
        Positive | None,
        Meta(
            description="Clip the gradients' global norm to this value, as torch.nn.utils.clip_grad_norm_ does. All "
            "gradients of a step are stored on the host until the norm is known."
        ),
    ] = None
    clip_grad_value: Annotated[
        Positive | None, Meta(description="Clip each gradient element to this absolute value.")
    ] = None
    defer_updates: Annotated[
        bool,
        Meta(
            description="With clip_grad_norm or a dynamic loss scale, run the optimizer during the next step's forward "
            "pass. No result changes. In Python, call `trainer.synchronize()` before reading the weights."
        ),
    ] = False
    param_groups: Annotated[
        PythonObject,
        Meta(
            description="Mappings with `params` (name patterns such as '*.bias', or the parameters themselves) and the "
            "hyperparameters in which they differ from the optimizer's."
        ),
    ] = ()
    state_dtype: Annotated[
        Literal["fp32", "bf16", "int8"], Meta(description="What the optimizer's moments are stored in on the host.")
    ] = "fp32"
    master_weights: Annotated[
        Literal["fp32", "split", "as_given"],
        Meta(
            description="What the weights are stored in on the host. 'fp32' converts a model in half precision to "
            "float32, with a warning. 'split', with precision='bf16', stores float32 as the bfloat16 that the device "
            "takes and a remainder of 16 bits: 2 bytes a parameter less, and no result changes. 'as_given' keeps "
            "weights, gradients and optimizer states in the model's own dtype, as torch.optim does."
        ),
    ] = "fp32"
    capacity: Annotated[
        Size | None,
        Meta(description="Device memory to use at most, in bytes or such as '16GB'; all of it if not given."),
    ] = None
    host_memory: Annotated[
        Size | None,
        Meta(description="Host memory to use at most, in bytes or such as '512GB'; no limit if not given."),
    ] = None
    pinned_memory: Annotated[
        Size | None,
        Meta(description="Page-locked host memory to use at most, in bytes or such as '64GB'; no limit if not given."),
    ] = None
    shared_inputs: Annotated[
        tuple[str, ...],
        Meta(description="Names of inputs of a whole model that every micro-batch gets whole."),
    ] = ()
    exact_ties: Annotated[
        AutoFlag,
        Meta(
            description="Add the gradients of tied weights in plain PyTorch's order: for each micro-batch over all "
            "uses, then over micro-batches. They are kept for each micro-batch from use to use, in device memory or, "
            "with stash='host', in host memory. 'auto' does so on devices that run PyTorch's kernels, if they take no "
            "more than all else on the device; if they do, a message says that they are equal to rounding only. True "
            "always keeps them, False never."
        ),
    ] = "auto"
    loss_over: Annotated[
        Literal["auto", "microbatch", "batch"],
        Meta(
            description="What the head (all that comes after the last layer) runs over. 'batch' runs it once a step, "
            "over the whole batch, which a loss that compares samples needs; the layers still run micro-batch by "
            "micro-batch. 'auto' chooses that for a loss that mixes samples."
        ),
    ] = "auto"
    loss_weight: Annotated[
        PythonObject,
        Meta(
            description="What a micro-batch counts in the loss of the batch: a function of the micro-batch that "
            "returns a number, or 'sum' if the losses of micro-batches add up. None reads it from the model, and a "
            "loss that mixes samples runs over the whole batch (see loss_over)."
        ),
    ] = None
    buckets: Annotated[PythonObject, Meta(description="A `relay.Buckets` that pads sequences to a few lengths.")] = None
    seed: Annotated[
        Annotated[int, Meta(ge=0, extra={"kind": "seed"})],
        Meta(description="Random seed of dropout; in `relay train` also of the initial weights and the batches."),
    ] = 0
    max_cached_programs: Annotated[
        Count,
        Meta(
            description="Compiled models to keep in memory, one for each shape of batch and mode; the least recently "
            "used is dropped first."
        ),
    ] = 32
    on_nonfinite: Annotated[
        Literal["stop", "skip", "log"],
        Meta(
            description="What to do when the loss is NaN or infinite. 'stop' raises NonFiniteLoss and updates nothing; "
            "'skip' logs a warning and skips the update; 'log' logs a warning and updates. Not used with a dynamic "
            "loss scale, which skips such steps."
        ),
    ] = "stop"
    on_device_lost: Annotated[
        Literal["raise", "retry"],
        Meta(
            description="'retry' opens a lost device again and repeats the step, once. Of several devices one that "
            "cannot be opened again is left out, and the others go on without it."
        ),
    ] = "raise"
    stall_timeout: Annotated[
        Positive | None,
        Meta(
            description="If a step takes longer than so many seconds, log which operation it waits for; never if not "
            "given."
        ),
    ] = None


class StepShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a step is given, for commands that make their own batches or simulate them."""

    seq: Annotated[Count, Meta(description="Tokens in a sequence.")] = 1024
    batch: Annotated[Count, Meta(description="Sequences in a step.")] = 8


OPTIONS = options_of(TrainOptions)
"""The options of training, by name."""

STEP_OPTIONS = options_of(StepShape)
"""The options of a step's batch, by name."""


def checked(given: Mapping[str, Any], options: Mapping[str, Option] = OPTIONS) -> dict[str, Any]:
    """The given values, each checked and converted. Raises ValueError for a value that is not allowed."""
    return {name: options[name].check(value) for name, value in given.items()}


def train_options(function: str, given: Mapping[str, Any]) -> TrainOptions:
    """The options of a call of `function`. Raises TypeError for a name that is not known, ValueError for a value."""
    refuse_unknown(function, given, OPTIONS)
    if isinstance(given.get("shared_inputs"), str):
        name = given["shared_inputs"]
        raise ValueError(f"shared_inputs={name!r} must be a list of names: shared_inputs=[{name!r}].")
    weight = given.get("loss_weight")
    if weight is not None and weight != "sum" and not callable(weight):
        raise ValueError(f"loss_weight={weight!r} must be None, 'sum', or a function of a micro-batch.")
    if weight is not None and given.get("loss_over") == "batch":
        raise ValueError(
            f"loss_weight={weight!r} gives each micro-batch a loss of its own, and with loss_over='batch' there is one "
            "loss, that of the whole batch. Leave one of them out."
        )
    return TrainOptions(**checked(given))


def takes_train_options(call: Callable[P, R]) -> Callable[P, R]:
    """Give a function with `**options` the signature of the options of training."""
    signature = inspect.signature(call)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    further = [
        inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default)
        for option in OPTIONS.values()
    ]
    call.__signature__ = signature.replace(parameters=[*own, *further])  # type: ignore[attr-defined]
    return call


def documentation(options: Mapping[str, Option] = OPTIONS) -> str:
    """Every option with its default and help, as the `Args:` of a docstring."""
    rows = [f"{option.name}: {option.help} Default: {option.default!r}." for option in options.values()]
    return "\n".join(textwrap.fill(row, 112, initial_indent="    ", subsequent_indent="        ") for row in rows)


def check_master_weights(master_weights: str, precision: str) -> None:
    """Raise ValueError for split master weights in a precision in which they cannot be split."""
    if master_weights == "split" and precision != "bf16":
        raise ValueError(
            "master_weights='split' stores each weight as the bfloat16 that the device takes and a remainder of 16 "
            f"bits. With precision={precision!r} the device takes no bfloat16, so there is nothing to split. Use "
            "precision='bf16', or master_weights='fp32'."
        )


def _renamed(function: str, name: str) -> TypeError:
    """The refusal of a former name."""
    return TypeError(f"relay.{function}() takes no {name!r}. It is called {RENAMED[name]!r} now.")


def refuse_renamed(function: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the public `function`: a former name of one of its arguments raises TypeError with the new name."""

    def decorate(target: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(target).parameters

        @functools.wraps(target)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if RENAMED.get(name) in known:
                    raise _renamed(function, name)
            return target(*args, **kwargs)

        return call

    return decorate


def refuse_unknown(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for a keyword that is not known, with its present name or the one that it resembles."""
    for name in given:
        if name not in known:
            if RENAMED.get(name) in known:
                raise _renamed(function, name)
            near = [each for each in known if each.startswith(name)] or difflib.get_close_matches(name, known, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"It takes {', '.join(known)}."
            raise TypeError(f"relay.{function}() takes no {name!r}. {hint}")
