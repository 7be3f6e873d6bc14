"""Any class of `torch.optim`, layer by layer: one torch optimizer for each set of parameters updated together.

The class is given as `functools.partial(torch.optim.X, ...)`, since the relay makes the optimizers itself. They share
one state for each parameter, so a parameter that is later updated together with others keeps its state. This works for
optimizers that treat each parameter by itself; others are refused (`relay.optim.by_parameter`). Split masters
are made float32 for the update of their layer, in memory that all layers share. Invariant: states are torch's own
objects, made by torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hal.host import Host
from relay.capture.guards.messages import in_short
from relay.eps.optimizer_state import WithoutDevice
from relay.eps.store import LayerStore
from relay.optim.by_parameter import check_by_parameter

JOINED = "split weights of one layer"

LARGEST_TRIAL = 1 << 16
"""Elements of the largest parameter that an optimizer is tried on."""

WHOLE_MODEL = {"LBFGS": "it combines parameters", "Muon": "it takes matrices only: use relay.Muon"}
"""torch.optim classes that do not treat each parameter by itself, or not every shape."""


class TorchOptimizer:
    """A torch.optim class with its options."""

    def __init__(self, factory: Callable[..., torch.optim.Optimizer]) -> None:
        self._factory = factory
        self._refusals: dict[torch.dtype, str] = {}
        name = getattr(getattr(factory, "func", factory), "__name__", "")
        if name in WHOLE_MODEL:
            raise TypeError(f"torch.optim.{name} cannot run layer by layer: {WHOLE_MODEL[name]}.")
        check_by_parameter(factory)

    def defaults(self) -> dict[str, Any]:
        """The hyperparameters of a parameter group, as the class fills them in."""
        probe = self._factory([nn.Parameter(torch.zeros(1))])
        return {key: value for key, value in probe.param_groups[0].items() if key != "params"}

    def param_groups(self, model: nn.Module, given: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The parameter groups that a user gave."""
        return given

    def check_dtype(self, name: str, dtype: torch.dtype, state_dtype: str) -> None:
        """Raise ValueError if the class does not update parameters of that dtype: it is tried on one element."""
        if dtype is torch.float32:
            return
        if dtype not in self._refusals:
            try:
                parameter = nn.Parameter(torch.zeros(1, dtype=dtype))
                optimizer = self._factory([parameter])
                parameter.grad = torch.zeros_like(parameter)
                optimizer.step()
                self._refusals[dtype] = ""
            except Exception as failure:
                self._refusals[dtype] = f"{type(failure).__name__}: {failure}"
        if self._refusals[dtype]:
            raise ValueError(
                f"{name!r} is {dtype}, and {kind_of(self._factory)} cannot update it ({self._refusals[dtype]}). Freeze "
                "it with requires_grad_(False), use another optimizer, or make it float32."
            )

    def check_updates(self, trained: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        """Raise TypeError if the class cannot update these parameters layer by layer, from dense gradients alone.

        It makes two steps on zeros of the shape of the smallest parameter of each number of dimensions.
        """
        smallest: dict[int, str] = {}
        for name, (shape, _) in trained.items():
            known = smallest.get(len(shape))
            if shape.numel() <= LARGEST_TRIAL and (known is None or shape.numel() < trained[known][0].numel()):
                smallest[len(shape)] = name
        for name in smallest.values():
            shape, dtype = trained[name]
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
            try:
                with torch.random.fork_rng(devices=[]), torch.enable_grad():
                    optimizer = self._factory([parameter])
                    for _ in range(2):
                        parameter.grad = torch.zeros_like(parameter)
                        optimizer.step()
            except Exception as failure:
                raise TypeError(
                    f"{kind_of(self._factory)} cannot update {name!r}, a parameter of shape {tuple(shape)}: given a "
                    f"dense gradient, and nothing else, its step() fails with {in_short(failure).rstrip('.')}. The "
                    "trainer calls step() without a closure, on float gradients of whole tensors in host memory. Use "
                    "an optimizer that takes these (torch.optim.Adam instead of SparseAdam, for example), leave out "
                    "the option that asks for more, or freeze the parameter."
                ) from failure

    def bind(self, host: Host, store: LayerStore) -> BoundTorchOptimizer:
        """The optimizer of one trainer."""
        return BoundTorchOptimizer(self, self._factory, host, store)


class BoundTorchOptimizer(WithoutDevice):
    """See `relay.eps.optimizer_state.BoundOptimizer`."""

    def __init__(
        self, spec: TorchOptimizer, factory: Callable[..., torch.optim.Optimizer], host: Host, store: LayerStore
    ) -> None:
        self._spec = spec
        self._factory = factory
        self._host = host
        self._store = store
        self._leaves: dict[str, nn.Parameter] = {}
        self._optimizers: dict[tuple[str, ...], torch.optim.Optimizer] = {}
        self._states: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._counted: set[str] = set()
        self._waiting: dict[str, dict[str, Any]] = {}
        self._joined: torch.Tensor | None = None

    def allocate(self, names: Sequence[str], group: Mapping[str, Any]) -> None:
        """Allocates no states: torch makes them at the first step. Raises ValueError for a dtype it refuses."""
        needed = sum(self._store[name].numel() for name in names if name in self._store.split)
        if needed > (0 if self._joined is None else self._joined.numel()):
            if self._joined is not None:
                self._host.free(self._joined, JOINED)
            self._joined = self._host.alloc(needed, torch.float32, JOINED)
        for name in names:
            self._spec.check_dtype(name, self._store.dtype(name), "fp32")

    def _optimizer_of(self, key: tuple[str, ...]) -> torch.optim.Optimizer:
        if key in self._optimizers:
            return self._optimizers[key]
        for name in key:
            if name not in self._leaves:
                self._leaves[name] = nn.Parameter(self._store.read(name), requires_grad=True)
            if name in self._waiting:
                self._states[self._leaves[name]] = _copied(self._waiting.pop(name))
                self._count(name, 1)
        made = self._factory([self._leaves[name] for name in key])
        for leaf, state in made.state.items():
            self._states.setdefault(leaf, state)
        made.state = self._states
        self._optimizers[key] = made
        return made

    def update(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        group: Mapping[str, Any],
        factor: torch.Tensor | None,
    ) -> None:
        for name, joined in self._joined_masters(names):
            leaf = self._leaves.setdefault(name, nn.Parameter(joined, requires_grad=True))
            leaf.data = joined
        optimizer = self._optimizer_of(tuple(names))
        if factor is not None:
            torch._foreach_mul_(list(gradients), factor)
        for own in optimizer.param_groups:
            own.update(group)
        for name, gradient in zip(names, gradients, strict=True):
            self._leaves[name].grad = gradient
        with torch.enable_grad():
            optimizer.step()
        for name in names:
            leaf = self._leaves[name]
            leaf.grad = None
            self._store.updated_from(name, leaf.detach())
            if name in self._store.split:
                leaf.data = torch.empty(0)
        # torch makes its states at the first step; they are added to the ledger then.
        for name in set(names) - self._counted:
            self._count(name, 1)

    def _joined_masters(self, names: Sequence[str]) -> list[tuple[str, torch.Tensor]]:
        """The split masters among these as float32, in the memory for one layer."""
        start, joined = 0, []
        for name in names:
            if name in self._store.split:
                master = self._store.split[name]
                assert self._joined is not None
                part = self._joined[start : start + master.numel()].view(master.shape)
                joined.append((name, master.to_float(part)))
                start += master.numel()
        return joined

    def state(self, name: str) -> dict[str, Any]:
        if name in self._waiting:
            return dict(self._waiting[name])
        return dict(self._states.get(self._leaves[name], {})) if name in self._leaves else {}

    @property
    def kind(self) -> str:
        return kind_of(self._factory)

    @property
    def reads_half(self) -> bool:
        return False

    def check(self, name: str, labels: Collection[str], dtypes: Mapping[str, torch.dtype]) -> None:
        """Does nothing: a class of torch.optim accepts any state that it has saved."""

    def allows(self, label: str, shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
        """True: a class of torch.optim has states of any shape."""
        return True

    def from_torch_form(
        self, name: str, state: dict[str, Any], group: Mapping[str, Any], shape: torch.Size
    ) -> dict[str, Any]:
        """The same state: it is torch's own."""
        return dict(state)

    def restore(self, name: str, state: Mapping[str, Any]) -> None:
        leaf = self._leaves.get(name)
        if leaf is not None:
            if name in self._counted:
                self._count(name, -1)
            self._states.pop(leaf, None)
        # Made again, so that a class that begins with a state (Adagrad) does so if none is given.
        self._optimizers = {key: made for key, made in self._optimizers.items() if name not in key}
        self._waiting.pop(name, None)
        if state:
            self._waiting[name] = dict(state)

    def _count(self, name: str, sign: int) -> None:
        (self._counted.add if sign > 0 else self._counted.discard)(name)
        for label, tensor in self._states[self._leaves[name]].items():
            if isinstance(tensor, torch.Tensor):
                self._host.ledger.add(label, tensor.dtype, sign * tensor.numel() * tensor.dtype.itemsize)

    def rename(self, names: Mapping[str, str | None]) -> None:
        for old, new in names.items():
            if new is None and old in self._leaves:
                state = self._states.pop(self._leaves[old], {})
                for label, tensor in state.items() if old in self._counted else ():
                    if isinstance(tensor, torch.Tensor):
                        self._host.ledger.add(label, tensor.dtype, -tensor.numel() * tensor.dtype.itemsize)
        moved = ((names.get(name, name), leaf) for name, leaf in self._leaves.items())
        self._leaves = {name: leaf for name, leaf in moved if name is not None}
        self._counted = {new for new in (names.get(name, name) for name in self._counted) if new is not None}
        waiting = ((names.get(name, name), state) for name, state in self._waiting.items())
        self._waiting = {name: state for name, state in waiting if name is not None}
        self._optimizers.clear()  # made again for the new sets of names, around the same states

    def state_bytes(self, name: str) -> int:
        made = [value for value in self.state(name).values() if isinstance(value, torch.Tensor)]
        if not made:
            return 2 * self._store[name].numel() * self._store.dtype(name).itemsize
        return sum(value.numel() * value.dtype.itemsize for value in made)


def kind_of(factory: Callable[..., torch.optim.Optimizer]) -> str:
    """The name of a torch.optim class in checkpoints and messages."""
    made_by = getattr(factory, "func", factory)
    return f"torch.optim.{getattr(made_by, '__name__', '')}"


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {label: value.clone() if isinstance(value, torch.Tensor) else value for label, value in state.items()}
