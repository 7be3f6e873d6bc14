"""trl's trainers with the mixin before them.

Nothing is defined here but the classes; `relay.hf.trl_loss` has their losses. Their invariant is the mixin's.
"""

from __future__ import annotations

from trl import DPOTrainer, RewardTrainer, SFTTrainer

from relay.hf.mixin import RelayMixin


class RelaySFTTrainer(RelayMixin, SFTTrainer):
    """`trl.SFTTrainer` on Relay, with `relay={...}` for options of `relay.Trainer`."""


class RelayDPOTrainer(RelayMixin, DPOTrainer):
    """`trl.DPOTrainer` on Relay, with `relay={...}`. A reference model is relayed too; so is a model whose adapter is
    switched off for the reference."""


class RelayRewardTrainer(RelayMixin, RewardTrainer):
    """`trl.RewardTrainer` on Relay, with `relay={...}` for options of `relay.Trainer`."""
