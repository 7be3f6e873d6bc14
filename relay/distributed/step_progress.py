"""How far a training step of all ranks has come: its messages in order, and the error that all ranks know.

Every message goes from each rank to each other one and has a status, so a failure that one message carries is known to
all ranks at the same point. Nothing is sent here. Invariant: where `error` is set, every rank has it set before its
next message, and the step sends no more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hal.event import Event
from relay.distributed.messages import Layout
from relay.distributed.ranks import Ranks
from relay.eps.gradient_plan import GradientPlan
from relay.errors import RankFailed


@dataclass(frozen=True)
class Message:
    """One message of a step: "losses", "gradients" or "weights" of a plan, or "norms"."""

    kind: str
    plan: GradientPlan | None = None


Layouts = tuple[list[Layout], list[Layout]]
"""The layouts of a plan's messages, by owner: of its gradients, and of its weights."""


def messages_of(plans: Sequence[GradientPlan], deferred: bool) -> list[Message]:
    """The messages of a step with these plans (in forward order), in the order in which they are sent."""
    arriving = [plan for plan in reversed(plans) if plan.updates]
    messages = [Message("losses")]
    if deferred:
        messages += [Message("gradients", plan) for plan in arriving]
        return [*messages, Message("norms"), *(Message("weights", plan) for plan in reversed(arriving))]
    for number, plan in enumerate(arriving):
        messages.append(Message("gradients", plan))
        if number:
            messages.append(Message("weights", arriving[number - 1]))
    return [*messages, *(Message("weights", plan) for plan in arriving[-1:]), Message("norms")]


class StepProgress:
    """One step, from its first message to its end.

    Attributes:
        layouts: those of the messages of each plan.
        error: what ended the step early, as all ranks know; None while it goes on.
        losses: the weighted losses of all micro-batches of all ranks, once they are known.
        norms: the norms of the blocks that this rank owns, by parameter.
        sums: the gradients that this rank owns, by plan and index into its updates.
    """

    def __init__(self, ranks: Ranks, messages: Iterable[Message], layouts: Mapping[GradientPlan, Layouts]) -> None:
        self._ranks = ranks
        self.layouts = layouts
        self._left = deque(messages)
        self.error: BaseException | None = None
        self.losses: list[float] = []
        self.norms: dict[str, torch.Tensor] = {}
        self.sums: dict[GradientPlan, dict[int, torch.Tensor]] = {}

    @property
    def next(self) -> Message | None:
        """The message that is submitted next."""
        return self._left[0] if self._left else None

    def take(self, kind: str, plan: GradientPlan | None = None) -> None:
        """Note that a message is submitted."""
        expected = self._left.popleft()
        assert (expected.kind, expected.plan) == (kind, plan), f"{kind} was sent where {expected.kind} comes"

    def check(self, failed: Sequence[bool], own: BaseException | None) -> None:
        """After a message with these statuses: raise the error that ends the step, if any rank failed."""
        if any(failed):
            if own is not None:
                raise self.stop(own)
            rank = list(failed).index(True)
            raise self.stop(RankFailed(rank, self._ranks.name(rank), "it has sent no reason."))

    def stop(self, error: BaseException) -> BaseException:
        """End the step with an error that all ranks know."""
        self.error = error
        return error

    def go_on(self) -> None:
        """Raise the error that has ended the step, if one has."""
        if self.error is not None:
            raise self.error


def settled(*events: Event | None) -> BaseException | None:
    """Wait for events. Returns the first error."""
    found: BaseException | None = None
    for event in events:
        if event is not None:
            try:
                event.wait()
            except BaseException as error:
                found = found or error
    return found
