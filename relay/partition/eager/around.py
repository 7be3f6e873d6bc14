"""A model's own forward with its layers left out, as a module: what the parts of an eager partition have in common.

Each layer returns what it was given, or, if nothing in this part depends on it, zeros. Parameters and buffers on which
nothing here depends are zeros too, and are not loaded. What a part returns is its subclass's. Invariant: the model is
as it was, and layers are called in the order of the dry run.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from relay.capture import call_with
from relay.capture.guards.unsupported import hooks_refused
from relay.errors import CaptureError
from relay.graph.pytree import TensorTree, tensor_leaves
from relay.models.huggingface import without_cache
from relay.partition.eager.dry_run import DryRun, LayerCall, dry_run, layers_replaced
from relay.partition.state_at_calls import ChangesBetweenCalls

SEEDS = 4
"""How many dry runs must call the same layers. A random number that decides which layers run shows in these."""


@dataclass(frozen=True, eq=False)
class Around:
    """A model and what its forward is called with: for running the code around its layers."""

    model: nn.Module
    blocks: Mapping[str, nn.Module]
    skipped: Container[str]
    states: Mapping[str, torch.Tensor]
    batch: Sequence[torch.Tensor]
    tree: TensorTree
    compute: torch.dtype

    def outside(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers outside of the layers."""
        inside = {id(tensor) for block in self.blocks.values() for tensor in [*block.parameters(), *block.buffers()]}
        used = {id(part) for block in self.blocks.values() for part in block.modules()}
        own = {
            id(tensor)
            for part in self.model.modules()
            if id(part) not in used
            for tensor in [*part._parameters.values(), *part._buffers.values()]
            if tensor is not None
        }
        return {name: one for name, one in self.states.items() if id(one) in own or id(one) not in inside}

    def dry_run(self) -> DryRun | None:
        """A dry run, or None where the code cannot run by itself: it fails, or other layers run in another run.

        Raises ChangesBetweenCalls.
        """
        if any(tensor.is_meta or type(tensor) is not torch.Tensor for tensor in self.batch):
            return None
        runs = []
        for seed in range(SEEDS):
            try:
                with hooks_refused():
                    found = dry_run(
                        self.model, self.blocks, self.skipped, self.outside(), self.batch, self.tree, self.compute, seed
                    )
            except ChangesBetweenCalls:
                raise
            except Exception:
                return None
            runs.append(found)
            if [one.described for one in found.calls] != [one.described for one in runs[0].calls]:
                return None
        return runs[-1] if runs[-1].calls else None


Seen = Callable[[int, LayerCall, Sequence[torch.Tensor], TensorTree], None]
"""Called at each call of a layer with its number, the call, and the tensors and the structure of its arguments."""


class AroundLayers(nn.Module):
    """(tensors of the batch, some outputs of layers) -> what a subclass returns of the model's forward.

    `outputs` are the outputs of layers that it is given: (call, number). `names` are the model's names of its
    parameters and buffers, by its own. `where` names the code that runs eagerly, in the first part of it, and `why`
    says the reason.
    """

    runs_eagerly = True

    def __init__(
        self,
        around: Around,
        found: DryRun,
        outputs: Sequence[tuple[int, int]],
        states: Container[str],
        where: str,
        why: str,
    ) -> None:
        super().__init__()
        # The model is no part of this module: its layers are not loaded.
        self.__dict__["around"] = replace(around, batch=())
        self.count = len(around.batch)
        self.where, self.why = where, why
        outside = around.outside()
        self.originals = tuple(outside.values())
        self.outside = {
            name: (tuple(one.shape), one.dtype, isinstance(one, nn.Parameter)) for name, one in outside.items()
        }
        self.calls = found.calls
        self.outputs = list(outputs)
        self.names = {f"own__{name.replace('.', '__')}": name for name in outside if name in states}
        for own, name in self.names.items():
            if isinstance(outside[name], nn.Parameter):
                self.register_parameter(own, outside[name])  # type: ignore[arg-type]
            else:
                self.register_buffer(own, outside[name])

    @property
    def model_parameters(self) -> dict[str, str]:
        """The model's names of its parameters, by its own."""
        return {own: name for own, name in self.names.items() if own in self._parameters}

    @property
    def model_buffers(self) -> dict[str, str]:
        """The model's names of its buffers, by its own."""
        return {own: name for own, name in self.names.items() if own in self._buffers}

    def run(self, tensors: Sequence[torch.Tensor], seen: Seen | None = None) -> Any:
        """The output of the model's forward. `tensors` are what this module is given."""
        around: Around = self.__dict__["around"]
        count = self.count
        given = dict(zip(self.outputs, tensors[count:], strict=True))
        where = tensors[0].device if tensors else torch.device("cpu")
        own = {name: getattr(self, local) for local, name in self.names.items()}
        states = [own[name] if name in own else _zeros(*like, where) for name, like in self.outside.items()]
        done = 0
        local_of = {id(own[name]): local for local, name in self.names.items() if local in self._buffers}

        def keep(buffer: torch.Tensor, assigned: torch.Tensor) -> None:
            if id(buffer) in local_of:
                setattr(self, local_of[id(buffer)], assigned)

        def stand_in(name: str, _: nn.Module, __: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            nonlocal done
            if done == len(self.calls) or self.calls[done].name != name:
                expected = self.calls[done].name if done < len(self.calls) else "no further layer"
                raise CaptureError(
                    f"the model calls layer {name!r} where {expected!r} was expected: which layers run depends on the "
                    "data. Choose them by step(batch, active_layers=...).",
                    layer=name,
                )
            call, number = self.calls[done], done
            done += 1
            inputs, tree = tensor_leaves((args, kwargs))
            if seen is not None:
                seen(number, call, inputs, tree)
            if name in around.skipped:
                return call.returned(inputs[:1], args, kwargs, inputs)
            made = [
                given[number, index] if (number, index) in given else _zeros_of(shape, dtype, where)
                for index, (shape, dtype) in enumerate(call.outputs)
            ]
            return call.returned(made, args, kwargs, inputs)

        with layers_replaced(around.blocks, stand_in), without_cache(around.model), hooks_refused():
            shell = WithAssignedBuffers(around.model, keep)
            return call_with(shell, self.originals, states, (), around.tree.fill(tensors[:count]))


class WithAssignedBuffers(nn.Module):
    """The model; what its forward assigns to a buffer is copied into the one that stands for it, or given to `keep`.

    Buffers of modules whose ids are `inside` layers are the layers' own matter.
    Once such a buffer is known (`assigned` holds its module's path and its name) the forward has a copy of it, since
    autograd may have saved the one that is written to.
    """

    def __init__(
        self,
        model: nn.Module,
        keep: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
        inside: Container[int] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self._inside = inside
        self.assigned: set[tuple[str, str]] = set()
        self._keep = keep

    def forward(self, **inputs: Any) -> Any:
        before = [
            (path, part, name, one)
            for path, part in self.model.named_modules()
            if id(part) not in self._inside
            for name, one in part._buffers.items()
            if one is not None
        ]
        for path, part, name, buffer in before:
            if (path, name) in self.assigned:
                part._buffers[name] = buffer.clone()
        try:
            return self.model(**inputs)
        finally:
            for path, part, name, buffer in before:
                assigned = part._buffers.get(name)
                if assigned is None or assigned is buffer:
                    continue
                part._buffers[name] = buffer
                if self._keep is not None:
                    self._keep(buffer, assigned.detach())
                    continue
                self.assigned.add((path, name))
                with torch.no_grad():
                    buffer.copy_(assigned)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, trained: bool, where: torch.device) -> torch.Tensor:
    """What stands for a parameter or buffer on which nothing depends. A buffer may be written to, so it has memory."""
    return _zeros_of(shape, dtype, where) if trained else torch.zeros(shape, dtype=dtype, device=where)


def _zeros_of(shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> torch.Tensor:
    zeros = torch.zeros((), dtype=dtype, device=where).expand(shape).detach()
    return zeros.requires_grad_(dtype.is_floating_point and torch.is_grad_enabled())
