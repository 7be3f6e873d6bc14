"""Hugging Face trainers on Relay: `RelayTrainer`, the mixin behind it, the same of trl's trainers, and `generate`.

Here lives what takes part in the loops of transformers and trl. The step itself is `relay.trainer`; reading and writing
folders of weights is `relay.models`. Only users and the command line import from here. transformers and trl are
imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relay.hf.mixin import RelayMixin
    from relay.hf.trainers import RelayTrainer
    from relay.hf.trl_trainers import RelayDPOTrainer, RelayRewardTrainer, RelaySFTTrainer

_HOMES = {
    "RelayDPOTrainer": "relay.hf.trl_trainers",
    "RelayMixin": "relay.hf.mixin",
    "RelayRewardTrainer": "relay.hf.trl_trainers",
    "RelaySFTTrainer": "relay.hf.trl_trainers",
    "RelayTrainer": "relay.hf.trainers",
}

__all__ = ["RelayDPOTrainer", "RelayMixin", "RelayRewardTrainer", "RelaySFTTrainer", "RelayTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'relay.hf' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ImportError as missing:
        if (missing.name or "").split(".")[0] not in ("transformers", "accelerate", "trl", "datasets"):
            raise
        message = f"relay.hf.{name} needs {missing.name}: pip install 'layer-relay[hf]'"
        raise ImportError(message, name=missing.name) from missing
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
