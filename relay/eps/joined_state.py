"""The state of a model with split masters, in float32: each tensor is made when it is looked up.

It is a mapping as `nn.Module.state_dict()` gives one, and takes no memory of its own; a loop over it holds one tensor
at a time. Invariant: a tensor has the value of the time at which it is looked up, with all updates applied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Joinable(Protocol):
    """A parameter that can be had in float32."""

    def to_float(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class WholeMaster:
    """A parameter that was made float32 before."""

    tensor: torch.Tensor

    def to_float(self) -> torch.Tensor:
        """The tensor."""
        return self.tensor


class JoinedState(Mapping[str, torch.Tensor]):
    """`own` are the model's tensors by name, `split` the masters of those that are split.

    `ready` waits for updates that still run.
    """

    def __init__(
        self, own: Mapping[str, torch.Tensor], split: Mapping[str, Joinable], ready: Callable[[], None]
    ) -> None:
        self._own = own
        self._split = split
        self._ready = ready

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._split:
            return self._own[name]
        self._ready()
        return self._split[name].to_float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)

    def masters(self) -> JoinedState:
        """The same for the tensors that are split alone."""
        return JoinedState({name: self._own[name] for name in self._split}, self._split, self._ready)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied as a state_dict, an OrderedDict of the tensors as they are now."""
        return OrderedDict, (), None, None, iter(self.items())
