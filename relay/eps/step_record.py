"""The two records of a pass over the model (what it submitted, what came of it), and what its end depends on.

`SubmittedStep` holds the events, which other threads complete. `StepResult` holds values that host tasks write; read
them once `SubmittedStep.required` has ended. They do no work themselves. `StepAgreement` is what a step has to agree on
with other processes: nothing, where one process trains alone. `relay.eps.server` extends it, and `relay.distributed`
extends that for several processes. Invariant: `StepResult.updating` is True before the first parameter changes, so a
step that failed while it is False has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hal.event import Event
from relay.eps.gradient_plan import GradientPlan

if TYPE_CHECKING:
    from relay.eps.updates.split_update import SplitUpdate


@dataclass
class StepResult:
    """What came of a pass.

    Attributes:
        loss: the mean loss over the batch; 0 for a pass without a loss.
        grad_norm: the global 2-norm of the gradients, before clipping; 0 without training.
        skipped: True if nothing of the step was applied.
        updating: True from before the first parameter changes.
        overflowed: True if a gradient was not finite before it was clipped by value.
        factor: what deferred updates multiply the gradients by: unscaling times clipping.
        norms: the 2-norm of each parameter's gradient, by the parameter's name.
        reached: the names of the parameters that have a gradient in this step.
    """

    loss: float = 0.0
    grad_norm: float = 0.0
    skipped: bool = False
    updating: bool = False
    overflowed: bool = False
    factor: torch.Tensor | None = None
    norms: dict[str, torch.Tensor] = field(default_factory=dict)
    reached: set[str] = field(default_factory=set)


@dataclass
class SubmittedStep:
    """What a pass submitted: its events by kind, and the bytes of weights that it sent to the device.

    Attributes:
        loads, compute, reads, drains: weights to the device, kernels, values to the host, gradients to the host.
        arrivals: the host tasks that take gradients in.
        updates: the host tasks that update parameters, one for each of the segments in `updated_segments`.
        ended_updates: the updates whose time counts for this step. With deferred updates they are those of the step
            before; without, they are `updates`.
        verdict: the host task that checks the loss.
        decision: the host task that computes the gradient norm, and for deferred updates the factor.
        optimizer_bytes: what crosses the link, both ways together, for parts of updates that the device computes.
        resident_layers: how many segments are resident on the device.
        touched_rows: of tied embeddings, by name, the rows in which the gradient that arrives last is complete.
        halves: the updates that a device has a part in, by segment.
        result: what came of the pass.
    """

    loads: list[Event] = field(default_factory=list)
    compute: list[Event] = field(default_factory=list)
    reads: list[Event] = field(default_factory=list)
    drains: list[Event] = field(default_factory=list)
    arrivals: list[Event] = field(default_factory=list)
    updates: list[Event] = field(default_factory=list)
    updated_segments: list[str] = field(default_factory=list)
    ended_updates: list[Event] = field(default_factory=list)
    verdict: Event | None = None
    decision: Event | None = None
    weight_bytes: int = 0
    optimizer_bytes: int = 0
    resident_layers: int = 0
    touched_rows: dict[str, torch.Tensor] = field(default_factory=dict)
    halves: dict[GradientPlan, SplitUpdate] = field(default_factory=dict)
    result: StepResult = field(default_factory=StepResult)

    def required(self) -> list[Event]:
        """The events that must have ended before the step's result is known, the verdict first.

        Deferred updates are not among them.
        """
        first = [event for event in (self.verdict, self.decision) if event is not None]
        return [*first, *self.loads, *self.compute, *self.reads, *self.drains, *self.arrivals]


class StepAgreement:
    """The agreement of one process with itself.

    Within `agreed_step`, a step calls `agree_on_loss` and `end_step` once each and in this order, unless submitting
    fails before.
    """

    def owned(self, names: Sequence[str]) -> Sequence[str]:
        """Those of the parameters whose optimizer states this process holds."""
        return names

    @contextmanager
    def agreed_step(self, plans: Sequence[GradientPlan]) -> Iterator[None]:
        """A context in which a training step with these plans is prepared, submitted and ended."""
        yield

    def agree_on_loss(
        self, checked: Event | None, losses: Callable[[], list[float]], number: int, submitted: SubmittedStep
    ) -> Event:
        """The event after which a step may be applied.

        `checked` is the check of the losses of this process (None: it has none), `losses` gives them weighted once it
        has ended, and `number` is the step's.
        """
        assert checked is not None
        return checked

    def whole_loss(self, losses: Sequence[float]) -> float:
        """The loss of the whole batch, from the weighted losses of this process, once the step has ended."""
        return sum(losses)

    def collect_nothing(
        self, plan: GradientPlan, groups: Sequence[Mapping[str, Any]], unscale: float, submitted: SubmittedStep
    ) -> None:
        """A segment for which this process has no micro-batch: no gradient arrives, and nothing is updated."""

    def end_step(self, error: BaseException | None, submitted: SubmittedStep) -> BaseException | None:
        """Called when all of a step has ended, with its error. Returns the error that the step raises."""
        return error
