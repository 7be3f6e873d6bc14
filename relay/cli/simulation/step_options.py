"""The options of a simulated step, which `relay simulate` and `relay sweep` share, and the arguments they become.

Options that more commands have are in `relay.cli.shared_options`. Invariant: every option here reaches
`relay.simulate`.
"""

from __future__ import annotations

from typing import Any

from relay.cli.shared_options import (
    machine_options,
    model_options,
    precision_option,
    sample_options,
    together,
    training_option,
)

step_options = together(
    model_options,
    training_option(
        "microbatches",
        default=None,
        because="Here, one per sequence if not given, which needs the least device memory; relay train has 4.",
    ),
    precision_option,
    *[
        training_option(name)
        for name in (
            "state_dtype", "master_weights", "stash", "slots", "clip_grad_norm", "layers_per_slot", "resident_layers",
            "layers_per_visit", "recompute", "head_chunk_tokens", "mlp_chunk_tokens", "sparse_rows", "loss_over",
            "loss_scale", "exact_ties",
        )
    ],
    machine_options,
)  # fmt: skip
"""A model, a step and a machine."""

_ARGUMENTS = (
    "config", "layers", "hidden", "heads", "ffn", "vocabulary", "tied",
    "device", "count", "one_link", "link", "host", "software", "calibration",
    "host_memory", "capacity", "layers_per_visit", "batch", "state_dtype", "stash", "slots", "precision", "loss_scale",
    "layers_per_slot", "resident_layers", "recompute", "clip_grad_norm", "master_weights", "exact_ties",
    "head_chunk_tokens", "sparse_rows", "loss_over", "mlp_chunk_tokens",
)  # fmt: skip


def step_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `relay.simulate` but the model."""
    return {
        **{name: options[name] for name in _ARGUMENTS},
        **sample_options(options),
        "microbatches": options["microbatches"] or options["batch"],
    }
