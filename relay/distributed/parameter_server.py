"""The eager param-server of one rank: it sums gradients over all ranks, and updates what this rank owns.

The gradients of a segment are sent to their owners as they arrive. An owner sums them in rank order, updates its part
of the weights, and sends the new weights to all ranks, while the device works on the next segments. Messages go in one
order, which follows from the step's plans: losses, then gradients and weights segment by segment, and norms. An update
lags one segment behind, so that the host does not wait for the network.

A rank on which something fails sends its next message with that status. Then every rank knows it, and the step sends
nothing more (`relay.distributed.step_progress`). Layouts of messages are in `relay.distributed.messages`; the sums over
the micro-batches of one rank are the slot's. Invariants: sums and norms do not depend on timing; after a step that
failed, all ranks have applied nothing of it, or all refuse to go on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hal.device import Device, Queue
from hal.event import Event
from hal.host import Host
from hal.slot.device_slot import DeviceSlot, GradientRegion
from hal.slot.layout import SlotContent
from relay.distributed.block_norms import block_norms
from relay.distributed.exchange_memory import ExchangeMemory
from relay.distributed.messages import FAILED, OK, lay_out_messages, sum_in_rank_order, write_head
from relay.distributed.ownership import Ownership
from relay.distributed.ranks import Ranks
from relay.distributed.step_agreement import agree_on_end, agree_on_loss, agree_on_norm
from relay.distributed.step_progress import Layouts, Message, StepProgress, messages_of, settled
from relay.distributed.update_by_group import update_by_group
from relay.eps.gradient_plan import GradientPlan
from relay.eps.optimizer_state import BoundOptimizer
from relay.eps.regions import GRADIENTS
from relay.eps.server import Clipping, ParameterServer
from relay.eps.step_record import SubmittedStep
from relay.eps.store import LayerStore
from relay.errors import GradientOverflow

Groups = Sequence[Mapping[str, Any]]


class RankParameterServer(ParameterServer):
    """See `ParameterServer`. `optimizer` holds the states of what this rank owns, as `ownership` says."""

    def __init__(
        self,
        device: Device,
        host: Host,
        store: LayerStore,
        optimizer: BoundOptimizer,
        group_of: Mapping[str, int],
        order: Sequence[str],
        clipping: Clipping,
        scaled: bool,
        ranks: Ranks,
        ownership: Ownership,
        sizes: Mapping[str, int],
    ) -> None:
        super().__init__(device, host, store, optimizer, group_of, order, clipping, scaled)
        self.updater.without_device()
        self.ownership, self._sizes, self._ranks = ownership, sizes, ranks
        self._memory = ExchangeMemory(host, ranks.rank, ranks.count)
        self._layouts: dict[tuple[object, ...], Layouts] = {}
        self._dtypes: dict[GradientPlan, list[torch.dtype]] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._progress = StepProgress(ranks, (), {})
        self._lagging: Callable[[], None] | None = None
        self._in_step = False

    @property
    def keeps_gradients(self) -> bool:
        """False: this rank keeps sums of what it owns alone."""
        return False

    @property
    def keeps_narrow_gradients(self) -> bool:
        return False

    # -- memory -----------------------------------------------------------------------------------------------

    def allocate(self, plans: Sequence[GradientPlan], groups: Groups, contents: Sequence[SlotContent]) -> None:
        super().allocate(plans, groups, contents)
        if not plans:
            return  # a forward pass alone
        self._dtypes = {}
        for plan, content in zip(plans, contents, strict=True):
            own = [field.dtype for field in content.gradient_fields]
            late = [self.store.dtype(name) for name in plan.names[len(own) :]]
            self._dtypes[plan] = [[*own, *late][index] for index in plan.updates]
        found = [self._layouts_of(plan) for plan in plans]
        self._memory.allocate([gradients for gradients, _ in found], [weights for _, weights in found])
        if self.deferred:
            for plan in plans:
                for index, dtype in zip(plan.updates, self._dtypes[plan], strict=True):
                    start, stop = self.ownership.own(plan.names[index])
                    if plan.names[index] not in self._kept and stop > start:
                        self._kept[plan.names[index]] = self._host.alloc(stop - start, dtype, GRADIENTS)

    def owned(self, names: Sequence[str]) -> list[str]:
        return self.ownership.owned_names(names)

    def _layouts_of(self, plan: GradientPlan) -> Layouts:
        """The layouts of a segment's gradients and of its weights, by owner."""
        names = tuple(plan.names[index] for index in plan.updates)
        dtypes = self._dtypes[plan]
        key = names, tuple(dtypes)
        if key not in self._layouts:
            weights = [self.store[name].dtype for name in names]
            gradients = lay_out_messages(names, dtypes, self.ownership)
            self._layouts[key] = gradients, lay_out_messages(names, weights, self.ownership)
        return self._layouts[key]

    # -- one step ---------------------------------------------------------------------------------------------

    @contextmanager
    def agreed_step(self, plans: Sequence[GradientPlan]) -> Iterator[None]:
        self._progress = StepProgress(
            self._ranks, messages_of(plans, self.deferred), {plan: self._layouts_of(plan) for plan in plans}
        )
        self._lagging, self._in_step = None, True
        try:
            yield
        except BaseException as error:
            if self._in_step:  # before anything was submitted
                self.end_step(error, SubmittedStep())
            raise
        finally:
            self._in_step = False

    def agree_on_loss(
        self, checked: Event | None, losses: Callable[[], list[float]], number: int, submitted: SubmittedStep
    ) -> Event:
        progress, ranks = self._progress, self._ranks
        progress.take("losses")
        return ranks.control.submit(
            lambda: agree_on_loss(ranks, progress, settled(checked), losses, number), (), "agreement on the loss"
        )

    def whole_loss(self, losses: Sequence[float]) -> float:
        return sum(self._progress.losses)

    def collect(
        self,
        plan: GradientPlan,
        slot: DeviceSlot,
        queue: Queue,
        groups: Groups,
        unscale: float,
        submitted: SubmittedStep,
    ) -> None:
        self._memory.place(plan)
        super().collect(plan, slot, queue, groups, unscale, submitted)

    def collect_nothing(self, plan: GradientPlan, groups: Groups, unscale: float, submitted: SubmittedStep) -> None:
        assert submitted.verdict is not None
        self._memory.place(plan)
        label = f"no arrival of {plan.name}"
        done = self._host.run(lambda: self._write(plan, None, submitted), [submitted.verdict], label)
        submitted.arrivals.append(done)
        self._arrived(plan, done, groups, unscale, submitted)

    def _receive(
        self,
        plan: GradientPlan,
        content: SlotContent,
        gradients: Sequence[torch.Tensor],
        groups: Groups,
        unscale: float,
        submitted: SubmittedStep,
    ) -> None:
        self._join_uses(plan, gradients, submitted)
        self._write(plan, gradients, submitted)

    def _write(self, plan: GradientPlan, gradients: Sequence[torch.Tensor] | None, submitted: SubmittedStep) -> None:
        """Write a segment's gradients into the messages to their owners; None if this rank has none."""
        if not plan.updates:
            return
        self._memory.wait_for(plan)
        layouts, _ = self._progress.layouts[plan]
        reached = submitted.result.reached
        present = [gradients is not None and plan.names[index] in reached for index in plan.updates]
        for message, layout in zip(self._memory.outgoing(plan, layouts), layouts, strict=True):
            write_head(message, layout, OK, present)
            if gradients is not None:
                for piece in layout.pieces:
                    piece.within(message).copy_(piece.of(gradients[plan.updates[piece.index]]))

    def _arrived(
        self, plan: GradientPlan, done: Event, groups: Groups, unscale: float, submitted: SubmittedStep
    ) -> None:
        if not plan.updates:
            return
        progress = self._progress
        progress.take("gradients", plan)
        exchanged = self._ranks.bulk.submit(
            lambda: self._exchange(progress, plan, done, unscale, submitted), (), f"gradients of {plan.name}"
        )
        submitted.arrivals.append(exchanged)
        self._memory.read_by(plan, exchanged)
        if not self.deferred:
            lagging, self._lagging = (
                self._lagging,
                functools.partial(self._submit_update, plan, exchanged, groups, unscale, submitted),
            )
            if lagging is not None:
                lagging()

    def _exchange(
        self, progress: StepProgress, plan: GradientPlan, done: Event | None, unscale: float, submitted: SubmittedStep
    ) -> None:
        """Send a segment's gradients to their owners, and sum those that this rank owns."""
        error = settled(done)
        progress.go_on()
        layouts, _ = progress.layouts[plan]
        own = layouts[self._ranks.rank]
        self._send(progress, self._memory.outgoing(plan, layouts), self._memory.incoming(plan, layouts), error)
        sums, present = sum_in_rank_order(self._memory.incoming(plan, layouts), own)
        result = submitted.result
        result.reached.update(plan.names[plan.updates[index]] for index, one in enumerate(present) if one)
        limit = self._clipping.value
        for index, total in sums.items():
            name = plan.names[plan.updates[index]]
            if limit is not None:
                if self._scaled and not bool(torch.isfinite(torch.linalg.vector_norm(total, torch.inf))):
                    result.overflowed = True
                total.clamp_(-limit / unscale, limit / unscale)
            progress.norms[name] = block_norms(total, self._sizes[name]) * unscale
            if self.deferred:
                sums[index] = self._kept[name].copy_(total)
        progress.sums[plan] = sums
        if not self.deferred and unscale != 1.0:
            norms = [progress.norms[plan.names[plan.updates[index]]] for index in sums]
            if not all(bool(torch.isfinite(norm).all()) for norm in norms):
                raise GradientOverflow(plan.name, 1.0 / unscale)

    def _send(
        self,
        progress: StepProgress,
        outgoing: Sequence[torch.Tensor],
        incoming: Sequence[torch.Tensor],
        error: BaseException | None,
    ) -> None:
        """Send messages, with the status that `error` is, and raise what ends the step."""
        if error is not None:
            for message in outgoing:
                message[0] = FAILED
        self._ranks.bulk.exchange(outgoing, incoming)
        statuses = [int(message[0]) for message in incoming]
        progress.check([status != OK for status in statuses], error)

    def _submit_update(
        self, plan: GradientPlan, before: Event, groups: Groups, unscale: float, submitted: SubmittedStep
    ) -> None:
        """Submit the update of what this rank owns of a segment, and the gathering of its new weights."""
        progress = self._progress
        factor = None if self.deferred or unscale == 1.0 else torch.tensor(unscale)
        updated = self._host.run(
            lambda: self._update_owned(progress, plan, groups, factor, submitted), [before], f"update of {plan.name}"
        )
        progress.take("weights", plan)
        gathered = self._ranks.bulk.submit(
            lambda: self._gather(progress, plan, updated, submitted), (), f"weights of {plan.name}"
        )
        self.store.changed(plan.names[index] for index in plan.updates)
        self.updater.note(plan, gathered, submitted)

    def _update_owned(
        self,
        progress: StepProgress,
        plan: GradientPlan,
        groups: Groups,
        factor: torch.Tensor | None,
        submitted: SubmittedStep,
    ) -> None:
        """Update what this rank owns of a segment, unless the step is skipped."""
        result = submitted.result
        if result.skipped:
            return
        self.updater.before_update([plan.names[index] for index in plan.updates])  # the others' weights change too
        sums = progress.sums[plan]
        if self.ownership.whole:
            sums = {index: sums[index].view(self.store[plan.names[plan.updates[index]]].shape) for index in sums}
        result.updating = True
        chosen = result.factor if self.deferred else factor
        update_by_group(plan, sums, self.optimizer, groups, self.updater.group_of, chosen)

    def _gather(
        self, progress: StepProgress, plan: GradientPlan, updated: Event | None, submitted: SubmittedStep
    ) -> None:
        """Send the weights that this rank owns of a segment to all ranks, and take in those of the others."""
        error = settled(updated)
        progress.go_on()
        if submitted.result.skipped:
            return
        _, layouts = progress.layouts[plan]
        messages = self._memory.weights(layouts)
        mine, rank = messages[self._ranks.rank], self._ranks.rank
        names = [plan.names[index] for index in plan.updates]
        write_head(mine, layouts[rank], OK, [True] * len(names))
        for piece in layouts[rank].pieces if error is None else ():
            piece.within(mine).copy_(piece.of(self.store[names[piece.index]]))
        self._send(progress, [mine] * self._ranks.count, messages, error)
        submitted.result.updating = True
        with torch.no_grad():
            for other, (message, layout) in enumerate(zip(messages, layouts, strict=True)):
                for piece in layout.pieces if other != rank else ():
                    piece.of(self.store[names[piece.index]]).copy_(piece.within(message))
            for name in names:
                self.store.round(name)

    def conclude(
        self,
        plans: Sequence[GradientPlan],
        contents: Sequence[SlotContent],
        regions: Sequence[GradientRegion],
        groups: Groups,
        unscale: float,
        submitted: SubmittedStep,
    ) -> None:
        progress, result = self._progress, submitted.result
        if self._lagging is not None:
            self._lagging()
            self._lagging = None
        arrivals = list(submitted.arrivals)

        def decide() -> None:
            error = settled(*arrivals)
            progress.go_on()
            total, overflowed = self._norm(progress, plans, error, result.overflowed)
            result.grad_norm = float(total)
            if not self.deferred:
                return
            result.skipped = overflowed or not bool(torch.isfinite(total))
            factor = torch.tensor(unscale)
            if self._clipping.norm is not None:
                factor = factor * torch.clamp(self._clipping.norm / (total + 1e-6), max=1.0)
            result.factor = factor

        progress.take("norms")
        submitted.decision = self._ranks.control.submit(decide, (), "decision on the step")
        if self.deferred:
            for plan in filter(lambda each: each.updates, plans):
                self._submit_update(plan, submitted.decision, groups, unscale, submitted)

    def _norm(
        self, progress: StepProgress, plans: Sequence[GradientPlan], error: BaseException | None, overflowed: bool
    ) -> tuple[torch.Tensor, bool]:
        updating = {plan.names[index] for plan in plans for index in plan.updates}
        names = [name for name in self._order if name in updating]
        return agree_on_norm(self._ranks, progress, self.ownership, self._sizes, names, error, overflowed)

    def settle(self) -> None:
        super().settle()
        self._memory.settle()

    # -- its end ----------------------------------------------------------------------------------------------

    def end_step(self, error: BaseException | None, submitted: SubmittedStep) -> BaseException | None:
        if not self._in_step:
            return error
        self._in_step = False
        progress = self._progress
        if error is not None and progress.error is None and progress.next is not None:
            settled(self._abandon(progress, progress.next, error, submitted))
        found, submitted.result.updating = agree_on_end(self._ranks, error, submitted.result.updating)
        return found

    def _abandon(
        self, progress: StepProgress, message: Message, error: BaseException, submitted: SubmittedStep
    ) -> Event:
        """Send the next message of a step that could not be submitted, with the status that it failed."""
        if message.kind == "losses":
            return self._ranks.control.submit(
                lambda: agree_on_loss(self._ranks, progress, error, list, 0), (), "losses of a failed step"
            )
        if message.plan is None:

            def send_norm() -> None:
                self._norm(progress, list(progress.layouts), error, False)

            return self._ranks.control.submit(send_norm, (), "norm of a failed step")
        plan = message.plan
        gradients, weights = progress.layouts[plan]

        def send() -> None:
            if message.kind == "weights":
                messages = self._memory.weights(weights)
                outgoing = [messages[self._ranks.rank]] * self._ranks.count
                self._send(progress, outgoing, messages, error)
            else:
                outgoing = self._memory.outgoing(plan, gradients)
                self._send(progress, outgoing, self._memory.incoming(plan, gradients), error)

        self._memory.place(plan)
        return self._ranks.bulk.submit(send, (), f"{message.kind} of {plan.name}, which failed")
