"""The passes of a trainer whose process is one rank of several: what the ranks agree on before and after each pass.

Before a training step or an evaluation every rank sends one small record: what it calls, the error that it met while it
prepared, and what its micro-batches count. So each knows the weights of its losses, an error on one rank is raised on
all, and ranks without a batch take part with none. An evaluation that only some ranks call is joined by the others with
an empty share. What is sent during a step is the server's (`relay.distributed.parameter_server`). Invariant: ranks that
call different things get an error on all ranks, and never wait for each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hal.device import Device
from hal.host import Host
from relay.checkpoint.format import SHARD_BYTES, Progress
from relay.checkpoint.saving import Saving, write_from
from relay.data.microbatches import MASKED_TERM, Batch, Piece, count_tokens, term_totals
from relay.distributed.buffers import share_buffers
from relay.distributed.checkpoints import RankStates, part_of_state, write_together
from relay.distributed.compare_ranks import checksum_of_states, refuse_differences
from relay.distributed.ownership import OwnedWeights, Ownership, works_by_element
from relay.distributed.parameter_server import RankParameterServer
from relay.distributed.ranks import Ranks
from relay.distributed.shares import is_empty, stand_in
from relay.distributed.whole_batch import join_shares
from relay.eps.optimizer_state import BoundOptimizer
from relay.eps.server import Clipping, ParameterServer
from relay.eps.snapshot import Snapshot
from relay.eps.store import LayerStore
from relay.errors import BatchError, RankFailed, RankLost, RanksDiffer, RelayError
from relay.metrics import Metrics
from relay.optim.optimizers import State
from relay.runtime.compiling.prepared_batch import PreparedBatch
from relay.runtime.schedule import PreparedStep

Prepare = Callable[[Any, Piece | None], tuple[PreparedBatch, PreparedStep | None]]
"""Prepares a share of a batch, given the whole batch where it is known. A share that needs it has nothing to run on."""

TRAIN, EVALUATE, SAVE, LOAD, CLOSE = "step", "evaluate", "save", "load", "close"
STATE, ASK, STATES, RESTORE = "state_dict", "checkpoints", "optimizer.state_dict", "optimizer.load_state_dict"


@dataclass
class SharedPass:
    """A pass that all ranks have agreed on.

    Attributes:
        batch: this rank's share, with its weights in the whole batch; without micro-batches if it has none.
        prepared: what it runs on.
        first: the number of its first micro-batch in the whole batch.
        first_rank: the rank that has the first micro-batch of the whole batch.
        tokens: those of the whole batch.
    """

    batch: PreparedBatch
    prepared: PreparedStep
    first: int
    first_rank: int
    tokens: int
    ranks: Ranks

    def share_buffers(self, store: LayerStore) -> None:
        """After the step was applied: the buffers that its forward changed become those of the batch's first rank."""
        share_buffers(self.ranks, self.first_rank, [store[name] for name in self.prepared.saved_buffers])
        store.changed(self.prepared.saved_buffers)


class Together:
    """The agreements of one rank with the others."""

    def __init__(self, ranks: Ranks, model: nn.Module, optimizer: Any, state_dtype: str, microbatches: int) -> None:
        self.ranks, self._microbatches = ranks, microbatches
        self._sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        whole = not works_by_element(optimizer, state_dtype)
        self.ownership = Ownership(self._sizes, ranks.rank, ranks.count, whole)
        self._names = [ranks.name(rank) for rank in range(ranks.count)]

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which logs, and reads and deletes what is shared."""
        return self.ranks.rank == 0

    @property
    def part(self) -> Callable[[str], tuple[int, int]]:
        """The elements of a parameter that this rank owns."""
        return self.ownership.own

    def owned(self, store: LayerStore) -> OwnedWeights | None:
        """What the optimizer sees of a store, if parameters are cut."""
        return None if self.ownership.whole else OwnedWeights(store, self.ownership)

    def serve(
        self,
        device: Device,
        host: Host,
        store: LayerStore,
        optimizer: BoundOptimizer,
        group_of: Mapping[str, int],
        order: Sequence[str],
        clipping: Clipping,
        scaled: bool,
    ) -> RankParameterServer:
        """The server of this rank."""
        return RankParameterServer(
            device, host, store, optimizer, group_of, order, clipping, scaled, self.ranks, self.ownership, self._sizes
        )

    # -- before a pass ----------------------------------------------------------------------------------------

    def agree_on_step(self, prepare: Prepare, batch: Any, facts: Mapping[str, Any]) -> SharedPass:
        """Prepare a training step, and agree on it. `facts` must be equal on all ranks, such as the learning rate."""
        return self._agree(TRAIN, prepare, batch, facts)

    def _agree(self, call: str, prepare: Prepare, batch: Any, facts: Mapping[str, Any]) -> SharedPass:
        given, prepared, record, error = self._prepared(call, prepare, batch, facts, None)
        records = self._exchange(record, error)
        if any(each["needs whole"] for each in records):
            whole = join_shares(self.ranks, given, is_empty(batch))
            given, prepared, record, error = self._prepared(call, prepare, batch, facts, whole)
            records = self._exchange(record, error)
        if given is None or prepared is None:
            raise RelayError("The ranks did not agree.")  # not reached: an error of this rank was raised
        first = sum(each["microbatches"] for each in records[: self.ranks.rank])
        shared = self._weighed(given, records, record["microbatches"])
        if not record["microbatches"]:
            shared = replace(shared, pieces=Batch([]), weights=[], numbers=[], count=0)
        first_rank = next(rank for rank, each in enumerate(records) if each["microbatches"])
        return SharedPass(shared, prepared, first, first_rank, sum(each["tokens"] for each in records), self.ranks)

    def _prepared(
        self, call: str, prepare: Prepare, batch: Any, facts: Mapping[str, Any], whole: Piece | None
    ) -> tuple[PreparedBatch | None, PreparedStep | None, dict[str, Any], Exception | None]:
        """This rank's share, and what the others have to know of it: also an error that it met."""
        error: Exception | None = None
        given: PreparedBatch | None = None
        prepared: PreparedStep | None = None
        record: dict[str, Any] = {"call": call, "error": None, **_NOTHING}
        try:
            empty = is_empty(batch)
            given, prepared = prepare(stand_in(batch, self._microbatches) if empty else batch, whole)
            record["facts"] = dict(facts) if call == TRAIN else {}
            record["needs whole"], record["sum"] = given.needs_whole, given.counts is None
            if prepared is not None:
                record["facts"] |= {"parameters of the segments": _digest(prepared)} if call == TRAIN else {}
            if not empty and (given.counts is None or any(given.counts)):
                record["microbatches"] = len(given.weights)
                record["counts"], record["terms"] = given.counts, given.terms
                record["tokens"] = count_tokens(given.pieces)
        except Exception as failure:
            error = failure
            record["error"] = _text(failure)
        return given, prepared, record, error

    # -- checkpoints ------------------------------------------------------------------------------------------

    def save(
        self,
        path: Path,
        model: nn.Module,
        server: ParameterServer,
        host: Host,
        progress: Progress,
        budget: int,
        shard_bytes: int,
        background: bool,
    ) -> Saving:
        """Write a checkpoint with the other ranks. No update may be running. Raises CheckpointError on all of them.

        With `background` a thread writes it, and training may continue.
        """
        facts = {"path of the checkpoint": str(path.resolve()), "background of the checkpoint": background}
        self._exchange({"call": SAVE, "error": None, "facts": facts}, None)
        states = RankStates(self.ranks, self.ownership, model, server.store, server.optimizer, shard_bytes)
        snapshot = Snapshot(states.weights, server.optimizer, host, budget)

        def write() -> None:
            write_together(states, snapshot, path, progress)

        return write_from(snapshot, path, server, host, (), write, background)

    def agree_on_load(self, error: Exception | None, checkpoint: str) -> None:
        """Agree that all ranks load this checkpoint now. `error` is what keeps this rank from it."""
        record = {"call": LOAD, "error": None if error is None else _text(error)}
        self._exchange({**record, "facts": {"checkpoint": checkpoint}}, error)

    def part_of(self, name: str, state: State) -> State:
        """What this rank owns of a parameter's optimizer state."""
        return part_of_state(self.ownership, name, state)

    def agree_on_states(self, call: str, facts: Mapping[str, Any]) -> None:
        """Agree on a call that reads or replaces the optimizer's states."""
        self._exchange({"call": call, "error": None, "facts": facts}, None)

    def any(self, value: bool) -> bool:
        """Whether it is so on any rank."""
        return any(each["value"] for each in self._exchange({"call": ASK, "error": None, "value": value}, None))

    def of_first(self, value: Any) -> Any:
        """The plain value of rank 0."""
        return self._exchange({"call": ASK, "error": None, "value": value}, None)[0]["value"]

    def join_weights(self, store: LayerStore) -> None:
        """Let the store make whole float32 parameters of the ranks' parts, from a call that all ranks make."""
        ranges, bulk, rank = self.ownership.ranges, self.ranks.bulk, self.ranks.rank

        def join(name: str, shape: torch.Size) -> torch.Tensor:
            whole = torch.empty(shape, dtype=torch.float32)
            parts = [whole.view(-1)[start:stop] for start, stop in ranges(name)]
            if parts[rank].numel():
                parts[rank].copy_(store.split[name].to_float().view(-1))
            bulk.exchange_now([parts[rank]] * len(parts), parts)
            return whole

        store.split.join = join

    def whole_weights(self, store: LayerStore) -> dict[str, torch.Tensor]:
        """The parameters with split masters in float32, called on all ranks."""
        self._exchange({"call": STATE, "error": None}, None)
        self.join_weights(store)
        try:
            return {name: store.split.whole(name) for name in store.split}
        finally:
            store.split.join = None

    # -- what all passes have in common -----------------------------------------------------------------------

    def _exchange(self, record: dict[str, Any], error: BaseException | None) -> list[dict[str, Any]]:
        """The records of all ranks, which call the same and have no error."""
        while True:
            records: list[dict[str, Any]] = self.ranks.control.gather_now(record)
            evaluating = [each["call"] == EVALUATE for each in records]
            if record["call"] == EVALUATE or not any(evaluating):
                break
            self._join_evaluation(records)
        problem = error or self._difference(record["call"], records)
        if problem is not None:
            self.ranks.control.hear_out()
            raise problem
        if record["call"] != EVALUATE:
            return records
        return [each if each["call"] == EVALUATE else {**each, **_NOTHING} for each in records]

    def _difference(self, call: str, records: Sequence[Mapping[str, Any]]) -> RelayError | None:
        """What keeps the ranks from a call: an error on one of them, another call, or other facts."""
        for rank, each in enumerate(records):
            if call == EVALUATE != each["call"]:
                continue  # it takes part with nothing
            if each["error"] is not None:
                return RankFailed(rank, self._names[rank], each["error"])
            if each["call"] != call:
                return RanksDiffer(
                    f"{self._names[self.ranks.rank]} calls {call}, and {self._names[rank]} calls {each['call']}. All "
                    "ranks must make the same number of steps, and save and close after the same step. A rank that "
                    "has no samples left gives a batch of no samples: tensors of length 0."
                )
            for name, value in records[0].get("facts", {}).items() if call != EVALUATE else ():
                if each["facts"][name] != value:
                    return RanksDiffer(
                        f"The ranks differ in the {name}: {self._names[0]} has {value}, {self._names[rank]} has "
                        f"{each['facts'][name]}. Give every rank the same."
                    )
        return None

    def _weighed(self, given: PreparedBatch, records: Sequence[Mapping[str, Any]], count: int) -> PreparedBatch:
        """This rank's share with its weights in the whole batch."""
        problem = _problem(records)
        if problem is not None:
            self.ranks.control.hear_out()
            raise problem
        if not count:
            return given
        shared = given.with_term_shares(term_totals([row for each in records for row in each["terms"]]))
        if given.counts is None:
            return shared
        total = sum(one for each in records for one in each["counts"] or [])
        return replace(shared, weights=[one / total for one in given.counts])

    # -- evaluations ------------------------------------------------------------------------------------------

    def evaluate(
        self, prepare: Prepare, forward: Callable[[PreparedBatch, PreparedStep], Metrics], batch: Any
    ) -> Metrics:
        """Evaluate a batch of which every rank has a share. Ranks that do not evaluate now take part without one."""
        shared = self._agree(EVALUATE, prepare, batch, {})
        error: BaseException | None = None
        metrics: Metrics | None = None
        try:
            metrics = forward(shared.batch, shared.prepared)
        except BaseException as failure:
            error = failure
        loss = 0.0 if metrics is None else metrics.loss
        records = self.ranks.control.gather_now({"loss": loss, "error": None if error is None else _text(error)})
        if error is not None or metrics is None:
            raise error or RelayError("The evaluation gave nothing.")
        for rank, each in enumerate(records):
            if each["error"] is not None:
                raise RankFailed(rank, self._names[rank], each["error"])
        return replace(metrics, loss=sum(each["loss"] for each in records), tokens=shared.tokens)

    def _join_evaluation(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take part in an evaluation of others, without a batch."""
        evaluating = [each for each in records if each["call"] == EVALUATE]
        if any(each["error"] for each in evaluating):
            return
        if any(each["needs whole"] for each in evaluating):
            with suppress(BatchError):  # theirs to raise
                join_shares(self.ranks, None, True)
        elif _problem(evaluating) is None:
            self.ranks.control.gather_now({"loss": 0.0, "error": None})

    # -- the whole run ----------------------------------------------------------------------------------------

    def refuse_differences(self, record: Mapping[str, Any]) -> None:
        """Compare what all ranks have built. Raises RanksDiffer on every rank."""
        refuse_differences([each["built"] for each in agree_on_construction(self.ranks, record, None)], self._names)

    def join_end(self) -> bool:
        """Take part in what the others still evaluate, until all ranks close. False if others fail or are gone."""
        try:
            self._exchange({"call": CLOSE, "error": None}, None)
        except (RankLost, RanksDiffer, RankFailed):
            return False
        return True

    def close(self) -> None:
        """End the channels."""
        self.ranks.close()


class SharedOptimizerStates:
    """The optimizer's states of all ranks; see `relay.eps.torch_form.SharedStates`."""

    def __init__(self, together: Together, model: Callable[[], nn.Module], server: ParameterServer) -> None:
        self._together, self._model, self._server = together, model, server

    def whole(self) -> dict[str, State]:
        together, model, server = self._together, self._model(), self._server
        together.agree_on_states(STATES, {})
        states = RankStates(together.ranks, together.ownership, model, server.store, server.optimizer, SHARD_BYTES)
        return {name: states.state(name) for name, _ in model.named_parameters()}

    def part_of(self, states: Mapping[str, State]) -> dict[str, State]:
        self._together.agree_on_states(RESTORE, {"states of the optimizer": checksum_of_states(states)})
        return {name: self._together.part_of(name, state) for name, state in states.items()}


_NOTHING: dict[str, Any] = {
    "error": None, "microbatches": 0, "counts": [], "terms": [], "tokens": 0, "sum": False, "needs whole": False,
}  # fmt: skip
"""What a rank brings that takes part with nothing."""


def _problem(records: Sequence[Mapping[str, Any]]) -> RelayError | None:
    """Why the shares of these ranks make no batch, or None."""
    working = [each for each in records if each["microbatches"]]
    if not working:
        return BatchError("The batch has no samples on any rank, or all of its targets are masked: it has no loss.")
    rows = [row for each in working for row in each["terms"]]
    if len(set(map(len, rows))) > 1:
        return RanksDiffer("The terms of the loss count alike on some ranks and differently on others.")
    if not all(map(sum, zip(*rows, strict=True))):
        return BatchError(MASKED_TERM)
    if len({each["sum"] for each in working}) > 1:
        return RanksDiffer("The loss is a sum on some ranks and a mean on others. Give every rank the same weights=.")
    return None


def agree_on_construction(
    ranks: Ranks, record: Mapping[str, Any] | None, error: BaseException | None
) -> list[dict[str, Any]]:
    """The records of all ranks when their trainers are built. Raises RankFailed if one could not be built."""
    records: list[dict[str, Any]] = ranks.control.gather_now(
        {"built": record, "error": None if error is None else _text(error)}
    )
    ranks.control.hear_out()
    for rank, each in enumerate(records):
        if error is None and each["error"] is not None:
            raise RankFailed(rank, ranks.name(rank), each["error"])
    return records


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _digest(prepared: PreparedStep) -> str:
    """What must be equal on all ranks for their messages to match: what each segment updates, and what changes."""
    plans = [[plan.names[index] for index in plan.updates] for plan in prepared.gradient_plans]
    changed = list(prepared.saved_buffers)
    checksum = zlib.crc32(repr((plans, changed)).encode())
    return f"{sum(map(len, plans))} parameters in {len(plans)} segments, {len(changed)} changed buffers, {checksum:08x}"
