"""Plain PyTorch that holds the whole model: forward, `backward()` and a `torch.optim` step, as a script writes them.

For each micro-batch the loss times its weight is differentiated by autograd, and gradients add up in `.grad`. bf16 and
fp16 are `torch.autocast`, a dynamic loss scale is `torch.amp.GradScaler`, clipping is `torch.nn.utils`. The optimizer
is torch's, on the host, where the relay's is too. Nothing of the relay computes here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from relay.capture.guards.held_tensors import HeldTensors, Replacing
from relay.eps.aliases import Alias
from relay.errors import VerificationError
from relay.optim.int8_state import Int8State
from relay.optim.optimizers import SGD, Adam, AdamW
from relay.options import TrainOptions
from relay.partition.named_outputs import loss_of
from relay.precision import COMPUTE
from relay.verification.given_draws import GivenDraws
from relay.verification.left_out import left_out

COUNTERPARTS: dict[type, Callable[..., torch.optim.Optimizer]] = {
    AdamW: partial(torch.optim.AdamW, fused=True),
    Adam: partial(torch.optim.Adam, fused=True),
    SGD: partial(torch.optim.SGD, fused=True),
}
"""torch's optimizer for each of the relay's that has one."""


@dataclass(frozen=True)
class PlainPiece:
    """A micro-batch: `inputs` as the model takes them, `targets` for a list of modules, and its weight in the loss."""

    inputs: Any
    targets: Any
    weight: float


@dataclass
class PlainStep:
    """What one step of plain PyTorch gave: the loss, whether it is skipped, and its gradients by name, on the host.

    Gradients are without the loss scale, and clipped; parameters that the step did not reach have none.
    """

    loss: float
    skipped: bool
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def counterpart(options: TrainOptions) -> Callable[..., torch.optim.Optimizer] | None:
    """What makes torch's optimizer of the same arithmetic as the trainer's; None if there is none."""
    chosen = AdamW() if options.optimizer is None else options.optimizer
    if isinstance(chosen, partial):
        made: Callable[..., torch.optim.Optimizer] = chosen
        return made
    return COUNTERPARTS.get(type(chosen)) if options.state_dtype == "fp32" else None


def copied_model(
    model: nn.Module, modules: Sequence[nn.Module] | None, loss: Any, views: Sequence[torch.Tensor]
) -> tuple[nn.Module, list[nn.Module] | None, Any]:
    """A copy of the model with tensors of its own (and of the list and the loss that it was given as).

    The names of its tensors are the model's. `views` of parameters that its code holds are not copied. Raises
    VerificationError for a model that cannot be copied.
    """
    uncopied: dict[int, Any] = {id(view): view for view in views}
    try:
        whole, own, own_loss = copy.deepcopy((model, None if modules is None else list(modules), loss), uncopied)
    except Exception as failure:
        raise VerificationError(
            f"{type(model).__name__} cannot be copied for plain PyTorch: copy.deepcopy failed with "
            f"{type(failure).__name__}: {failure}. Keep results of other tensors, locks and open files out "
            "of the model's attributes."
        ) from failure
    config: Any = getattr(whole, "config", None)
    if getattr(config, "use_cache", False) is True:
        config.use_cache = False  # a cache for generation, which training does not use, changes the order of keys
    return whole, own, own_loss


class PlainRun:
    """The model in plain PyTorch on the torch device `where`.

    Args:
        model: a copy of the model, which this object takes over; `modules` and `loss` for a list.
        aliases: the buffers that view a parameter, as they do in the model itself.
        options: the trainer's, for precision, loss scale and clipping.
        groups: the optimizer's parameter groups, with names in place of parameters.
        states: the optimizer's state of each parameter, by name.
        loss_scale: the loss scale, and the number of steps since it last changed.
        growth_interval: the steps after which a dynamic loss scale grows.
        original: the model that was copied.
        held: what code holds of its tensors; what the copy's code holds of them is the copy's instead.

    Attributes:
        left_out: the names of the layers (indices of a list of modules) that the next steps leave out.
    """

    def __init__(
        self,
        model: nn.Module,
        modules: list[nn.Module] | None,
        loss: Any,
        aliases: Mapping[str, Alias],
        where: torch.device,
        options: TrainOptions,
        groups: Sequence[Mapping[str, Any]],
        states: Mapping[str, Mapping[str, Any]],
        loss_scale: tuple[float, int],
        growth_interval: int,
        original: nn.Module,
        held: HeldTensors,
    ) -> None:
        self.model = model.to(where)
        tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, alias in aliases.items():  # copies have memory of their own
            buffer, flat = tensors[name], tensors[alias.owner].data.view(-1)
            buffer.data = flat[alias.start : alias.start + buffer.numel()].view(buffer.shape)
        self.left_out: tuple[str, ...] = ()
        self._original = original
        self._held = held
        self._modules = modules
        self._loss = loss
        self._where = where
        self._options = options
        self._named = {name: one for name, one in self.model.named_parameters() if one.requires_grad}
        self._masters = {
            name: one if where.type == "cpu" else nn.Parameter(one.detach().cpu()) for name, one in self._named.items()
        }
        self.updates = counterpart(options)
        own = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "names"}
            | {"params": [self._masters[name] for name in group["names"] if name in self._masters]}
            for group in groups
        ]
        make = self.updates or partial(torch.optim.SGD, lr=0.0)  # only unscales then
        kept = own if self.updates is not None else [{"params": group["params"]} for group in own]
        self.optimizer = make([group for group in kept if group["params"]])
        self._group_numbers = [number for number, group in enumerate(kept) if group["params"]]
        if self.updates is not None:
            for name, master in self._masters.items():
                self._begin_with(master, states.get(name, {}))
        self._dynamic = options.precision == "fp16" and options.loss_scale == "dynamic"
        self._scaler = torch.amp.GradScaler("cpu", enabled=self._dynamic)
        self._fixed = 1.0
        if self._dynamic:
            state = {"scale": loss_scale[0], "growth_factor": 2.0, "backoff_factor": 0.5}
            counts = {"growth_interval": growth_interval, "_growth_tracker": loss_scale[1]}
            self._scaler.load_state_dict(state | counts)
        else:
            self._fixed = loss_scale[0]

    @property
    def loss_scale(self) -> float:
        """The loss scale of the next step."""
        return self._scaler.get_scale() if self._dynamic else self._fixed

    def set_learning_rate(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the learning rates of the trainer's parameter groups."""
        if self.updates is not None:
            for own, number in zip(self.optimizer.param_groups, self._group_numbers, strict=True):
                own["lr"] = copy.deepcopy(groups[number]["lr"])

    def gradients(
        self, pieces: Sequence[PlainPiece], begin: Callable[[int], None], draws: GivenDraws | None
    ) -> PlainStep:
        """Forward and backward of a step's micro-batches. `begin` is called with the number of each before it runs."""
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.model.zero_grad(set_to_none=True)
        losses = []
        for number, piece in enumerate(pieces):
            begin(number)
            losses.append(self._forward_and_backward(piece, draws))
        found = self._collect()
        overflowed = self._dynamic and not _all_finite(found)
        parameters = list(self._masters.values())
        if self._options.clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self._options.clip_grad_value)
        if self._options.clip_grad_norm is not None:
            overflowed = overflowed or not _all_finite(found)
            torch.nn.utils.clip_grad_norm_(parameters, self._options.clip_grad_norm)
        lost = not all(torch.isfinite(torch.tensor(losses)))
        skipped = overflowed or (lost and not self._dynamic and self._options.on_nonfinite == "skip")
        if skipped:  # as if the step had not been: buffers too
            with torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(before[name])
        return PlainStep(sum(losses), skipped, found)

    def update(self, step: PlainStep, gradients: Mapping[str, torch.Tensor] | None = None) -> None:
        """End a step by torch's optimizer, with its own gradients or the given ones."""
        if self.updates is not None and not step.skipped:
            for name, gradient in (gradients or {}).items():
                self._masters[name].grad = gradient
            self.optimizer.step()
            if self._where.type != "cpu":
                with torch.no_grad():
                    for name, one in self._named.items():
                        one.copy_(self._masters[name])
        self._scaler.update()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers by name, on the host; parameters that are not trained are left out."""
        return {name: one.detach() for name, one in self._masters.items()} | self.buffers()

    def buffers(self) -> dict[str, torch.Tensor]:
        """The buffers by name, on the host."""
        return {name: one.detach().cpu() for name, one in self.model.named_buffers()}

    def follow(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over the trainer's parameters and buffers, so that the next step begins from the same."""
        with torch.no_grad():
            for name, one in self.model.named_buffers():
                one.copy_(tensors[name])
            for name, one in self._named.items():
                one.copy_(tensors[name])
                self._masters[name].copy_(tensors[name])

    def _begin_with(self, master: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Give the optimizer a parameter's state, unless it is a new one (torch treats first steps by themselves)."""
        if not state or ("step" in state and float(state["step"]) == 0):
            return
        assert not any(isinstance(value, Int8State) for value in state.values())
        self.optimizer.state[master] = {
            label: value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
            for label, value in state.items()
        }

    def _forward_and_backward(self, piece: PlainPiece, draws: GivenDraws | None) -> float:
        low = COMPUTE[self._options.precision]
        # Without autocast's cache, weights that are used twice add their gradients in fp32, as the relay does.
        with torch.autocast(self._where.type, low, enabled=low is not torch.float32, cache_enabled=False):
            value = self._loss_of(piece, draws) * piece.weight
        if draws is not None:
            draws.begin_backward()
        (self._scaler.scale(value) if self._dynamic else value * self._fixed).backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    def _loss_of(self, piece: PlainPiece, draws: GivenDraws | None) -> torch.Tensor:
        self._held.note()  # the trainer moves its tensors where it allocates
        originals, copies = ([*model.parameters(), *model.buffers()] for model in (self._original, self.model))
        with Replacing(originals, copies, "", self._held, constants=False, elsewhere=False):
            return self._called(piece, draws)

    def _called(self, piece: PlainPiece, draws: GivenDraws | None) -> torch.Tensor:
        if self._modules is None:
            layers = [self.model.get_submodule(name) for name in self.left_out]
            with left_out(layers, self._held.views()):
                output = self.model(**piece.inputs)
            found = loss_of(output)
            assert found is not None
            return found
        value = piece.inputs
        for number, module in enumerate(self._modules):
            if str(number) in self.left_out:
                continue
            if draws is not None:
                draws.enter(str(number))
            value = module(value)
        result: torch.Tensor = self._loss(value, piece.targets)
        return result

    def _collect(self) -> dict[str, torch.Tensor]:
        """Move the gradients to the host, and take the loss scale off them."""
        if self._where.type != "cpu":
            for name, one in self._named.items():
                self._masters[name].grad = None if one.grad is None else one.grad.cpu()
                one.grad = None
        if self._dynamic:
            self._scaler.unscale_(self.optimizer)
        found = {name: one.grad for name, one in self._masters.items() if one.grad is not None}
        if self._fixed != 1.0:
            for gradient in found.values():
                gradient.mul_(1.0 / self._fixed)
        return found


def _all_finite(tensors: Mapping[str, torch.Tensor]) -> bool:
    return all(bool(torch.isfinite(one).all()) for one in tensors.values())
