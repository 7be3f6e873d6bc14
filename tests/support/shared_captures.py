"""What was captured of a layer, shared by the trainers of many tests, as one trainer shares it between its layers.

To trace a layer takes ten times as long as the few steps that most tests are about, and tests of one file train the
same model in many ways. Whether a capture serves another model's layer is the product's own question and answer
(`relay.partition.capture_cache.Captures`): everything that its code could look at must be equal, and in doubt it is
traced anew. What that cannot see is code that changes: a test that replaces a class's method or a global makes its own
trainers.
"""

import functools

import torch

import relay
from relay.capture import Lowering
from relay.partition.capture_cache import Captures


def share(trainer: relay.Trainer) -> relay.Trainer:
    """Let a trainer that has not run yet find what others captured."""
    compiler = trainer._compiler
    compiler._captures = _captures(compiler._compute, compiler.lowering, compiler.traced_for)
    return trainer


class SharedCaptures(Captures):
    """They stay when one of the trainers that look in them lets go of its own."""

    def clear(self) -> None:
        """Others go on with them."""


@functools.cache
def _captures(compute: torch.dtype, lowering: Lowering, traced_for: torch.device) -> SharedCaptures:
    """For what a trainer captures for: the same for all of its layers."""
    return SharedCaptures()
