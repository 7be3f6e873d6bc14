"""`RelayTrainer`: the library's `Trainer` with the mixin before it.

Nothing is defined here but the class. Its invariant is the mixin's.
"""

from __future__ import annotations

from transformers import Trainer

from relay.hf.mixin import RelayMixin


class RelayTrainer(RelayMixin, Trainer):
    """`transformers.Trainer` on Relay: the same arguments, and `relay={...}` for options of `relay.Trainer`."""

    __doc__ = f"{__doc__}\n\n{RelayMixin.__doc__}"
