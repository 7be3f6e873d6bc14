"""The dtype of the weights of simulated models: what the option `master_weights` makes of a model.

The rule for modules is the trainer's (`relay.eps.master_weights`). Models that are described by sizes have no dtype of
their own. Invariant: the model that was given is not changed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from relay.eps.bind_optimizer import narrows_states
from relay.eps.master_weights import HALF
from relay.simulation.described.meta_model import MetaModel
from relay.simulation.described.transformer_shape import ModelShape


def as_trained(shape: ModelShape | MetaModel, master_weights: str, compute: torch.dtype) -> ModelShape | MetaModel:
    """The model with its weights as a trainer holds them.

    A module in half precision becomes float32, except with "as_given". A model described by sizes is float32, and with
    "as_given" a model in half precision if that is what is computed in.
    """
    if isinstance(shape, ModelShape):
        kept = master_weights == "as_given" and compute in HALF
        return replace(shape, dtype=compute) if kept else shape
    return shape if master_weights == "as_given" else shape.in_float32()


def states_may_be_small(
    shape: ModelShape | MetaModel, master_weights: str, compute: torch.dtype, optimizer: Any
) -> bool:
    """Whether moments may be stored in fewer bits.

    Not those of weights that are trained in half precision, nor of optimizers whose states are float32.
    """
    trained = as_trained(shape, master_weights, compute)
    half = trained.dtype in HALF if isinstance(trained, ModelShape) else trained.trains_in_half
    return not half and narrows_states(optimizer)
