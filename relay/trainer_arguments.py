"""What a trainer and its steps may be given, as far as it depends on several arguments or on the model.

The range of each option is in `relay.options`; shapes and names in a batch are in `relay.data`. Nothing is built here.
Invariant: every check raises before anything is allocated, and changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from relay.errors import BatchError, PartitionError, StandingGradient
from relay.options import TrainOptions, check_master_weights


def check_options(chosen: TrainOptions, modules: Sequence[nn.Module] | None) -> None:
    """Raise ValueError for options that contradict each other, or a list of `modules`; warn of one without effect."""
    if chosen.shared_inputs and modules is not None:
        raise ValueError(
            f"shared_inputs={list(chosen.shared_inputs)!r} names inputs of a whole model, and a list of modules "
            "has inputs without names. Leave shared_inputs out, or pass the whole model."
        )
    devices = 1 if isinstance(chosen.device, str) else len(chosen.device)
    if chosen.device_speeds is not None and len(chosen.device_speeds) != devices:
        raise ValueError(
            f"device_speeds={list(chosen.device_speeds)!r} has {len(chosen.device_speeds)} numbers, and "
            f"device={chosen.device!r} names {devices} devices. Give one number for each device."
        )
    check_master_weights(chosen.master_weights, chosen.precision)
    if chosen.precision != "fp16" and chosen.loss_scale != "dynamic":
        warnings.warn(
            f"loss_scale={chosen.loss_scale!r} has no effect with precision={chosen.precision!r}: only fp16 scales "
            "its loss.",
            stacklevel=5,
        )


def check_model(model: nn.Module, chosen: TrainOptions) -> None:
    """Raise PartitionError or ValueError for a model that cannot be trained with these options."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PartitionError("The model has no parameter that requires a gradient: there is nothing to train.")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{name!r} has no memory: the model was built empty and has no weights yet. Load them by "
                "relay.models.load_weights(model, folder), or build the model without empty_weights()."
            )
    for name, parameter in model.named_parameters():
        if chosen.clip_grad_value is not None and parameter.requires_grad and parameter.is_complex():
            raise ValueError(
                f"clip_grad_value={chosen.clip_grad_value!r} clips real numbers, and {name!r} is {parameter.dtype}. "
                "Use clip_grad_norm, or leave it out."
            )


def refuse_standing_gradients(model: nn.Module) -> None:
    """Raise StandingGradient for a parameter that has a gradient before a step."""
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise StandingGradient([name for name, parameter in model.named_parameters() if parameter.grad is not None])


def step_arguments(
    batch: Any, pieces: Sequence[Any] | None, weights: Sequence[float] | None, outputs: Sequence[str] | None
) -> Mapping[str, Any]:
    """What a step is asked for besides its batch. Raises BatchError or TypeError for what contradicts itself."""
    if batch is None and pieces is None:
        raise BatchError(
            "A step takes a batch (a mapping for a whole model, a pair of inputs and targets for a list of modules)"
            ", or pieces=[batch, ...]. Received None."
        )
    if batch is not None and pieces is not None:
        raise TypeError("relay.Trainer.step() takes a batch, or pieces=[batch, ...], and not both.")
    if weights is not None and pieces is None:
        raise TypeError("weights= are the weights of pieces=[batch, ...]. A batch that is cut has none.")
    if isinstance(outputs, str):
        raise TypeError(f"outputs={outputs!r} must be a list of names: outputs=[{outputs!r}].")
    for name, given in (("pieces", pieces), ("weights", weights)):
        if given is not None and not isinstance(given, (list, tuple)):
            raise TypeError(f"{name}= must be a list; got {type(given).__name__}.")
    return {"pieces": pieces, "weights": weights, "outputs": tuple(outputs or ())}
