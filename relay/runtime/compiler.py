"""From batches to compiled models: a model is partitioned and captured for each shape of batch.

Compiled models are kept, and dropped when the model is edited. Nothing is run here, and no device memory is taken.
Invariant: compiling changes neither the model nor its modules' attributes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from relay.capture.guards.counters import refuse_counters, writes_outside
from relay.capture.guards.executed_code import collected_code
from relay.capture.guards.held_tensors import HeldTensors, watching
from relay.data.buckets import Buckets
from relay.data.loss_weight import SUM, LossPlan, StatedCount
from relay.data.microbatches import (
    Batch,
    Piece,
    check_weights,
    first_of,
    join,
    take_apart,
    weigh,
    with_whole_values,
)
from relay.errors import BatchError, MicroBatchTooSmall, RelayError
from relay.partition import list_as_model
from relay.partition.edit_layers import chosen_layers, layer_names
from relay.partition.named_outputs import no_loss
from relay.runtime.code_states import CodeState, CodeStates
from relay.runtime.compiling.compile_shapes import ShapeCompiler
from relay.runtime.compiling.prepared_batch import PreparedBatch, share_of_batch
from relay.runtime.head.checks import check_loss, refuse_mixed_output, refuse_other_layers, refuse_pieces
from relay.runtime.head.choose_chunks import HeadChunks, alike
from relay.runtime.program_cache import ProgramCache
from relay.runtime.stages import CompiledModel

logger = logging.getLogger("relay")


class ModelCompiler(ShapeCompiler):
    """Compiles a model for batches, and keeps the compiled models by shape of batch.

    At most `max_cached_programs` compiled models are kept. `loss_weight` is what the user says that a micro-batch
    counts; the other arguments are those of `ShapeCompiler`.
    """

    def __init__(
        self,
        model: nn.Module | None,
        modules: list[nn.Module] | None,
        loss: Callable[..., torch.Tensor] | None,
        microbatches: int,
        compute: torch.dtype,
        max_cached_programs: int,
        buckets: Buckets | None,
        shared_inputs: Sequence[str],
        layers_per_slot: int,
        recompute: bool | int,
        loss_weight: Callable[[Any], float] | str | None = None,
        loss_over: str = "auto",
    ) -> None:
        super().__init__(model, modules, loss, compute, layers_per_slot, recompute, loss_over)
        self.cache = ProgramCache(max_cached_programs)
        self._microbatches = microbatches
        self._buckets = buckets
        self._shared_inputs = tuple(shared_inputs)
        self._code = CodeStates(lambda: self.model, {} if loss is None else {"loss": loss})
        self.held = HeldTensors(lambda: self.model)
        self._loss_weight = loss_weight
        self._warned = False
        self.is_share = False
        """Whether batches are one process's share of a larger batch, so that each micro-batch counts for a part."""

    def use(self, modules: list[nn.Module]) -> Callable[[], None]:
        """Use another list of modules from now on. Returns a function that undoes it."""
        before = self.modules, self.model
        self.modules, self.model = modules, list_as_model(modules, self._loss)

        def undo() -> None:
            self.modules, self.model = before

        return undo

    def forget(self) -> None:
        """Drop everything compiled and captured, after the model has changed."""
        self.cache.clear()
        self._presences.clear()
        self._captures.clear()
        self._code.clear()

    def prepare(
        self,
        batch: Any,
        training: bool = True,
        active_layers: Sequence[int | str] | None = None,
        pieces: Sequence[Any] | None = None,
        weights: Sequence[float] | None = None,
        outputs: Sequence[str] = (),
        whole: Piece | None = None,
    ) -> PreparedBatch:
        """Cut a batch into micro-batches, or take those in `pieces`, and compile the model for each of their shapes.

        `weights` are what the pieces count, if the loss is not to decide it; `outputs` the names of those to return;
        `whole` is the batch of which this is a share. Raises BatchError, PartitionError or CaptureError.
        """
        asked = batch, training, active_layers, pieces, weights, outputs, whole
        try:
            return self._prepared(*asked)
        except MicroBatchTooSmall as small:
            stated = self._loss_weight is not None or pieces is not None
            if self.whole or self.is_share or self._loss_over != "auto" or stated:
                raise
            try:  # the loss of a list may run over the whole batch
                return self._prepared(*asked, over_batch=True)
            except RelayError:
                raise small from small.__cause__
        finally:
            self._whole_trace.clear()

    def _prepared(
        self,
        batch: Any,
        training: bool,
        active_layers: Sequence[int | str] | None,
        pieces: Sequence[Any] | None,
        weights: Sequence[float] | None,
        outputs: Sequence[str],
        whole: Piece | None,
        over_batch: bool = False,
    ) -> PreparedBatch:
        chosen = None
        if active_layers is not None:
            chosen = chosen_layers(layer_names(self.model, self.modules or []), active_layers)
        if chosen == () and not self.whole:
            raise ValueError(
                "active_layers=[] leaves every module of the list out, so there is nothing to run. Name at least one."
            )
        given = self._as_given(pieces) if pieces is not None else self.take_apart(batch, needs_targets=True)
        if whole is not None:
            given = replace(given, whole=whole)
        stated = check_weights(weights, len(given.pieces)) if weights is not None else None
        state = self._code.current()
        names = tuple(outputs)
        if (self._loss_over == "batch" or over_batch) and len(given.pieces) > 1:
            refuse_pieces(given, stated)
            return self._prepare_over_batch(given, training, False, chosen, state, names)
        follow = stated is None and self._loss_weight is None
        first = self.compiled(given, 0, training, False, chosen, state, names, follow).partition
        if not first.has_loss:
            raise no_loss(type(self.model).__name__, first)
        count = len(given.pieces)
        if follow and first.loss_plan.problem is not None and self._may_go_over(given):
            return self._prepare_over_batch(given, training, False, chosen, state, names)
        if follow:
            self._check_loss([first.loss_plan], count)
        numbers = range(count)

        def compiled_with(head: HeadChunks | None) -> list[CompiledModel]:
            asked = chosen, state, names, follow, head
            return [self.compiled(given, number, training, False, *asked) for number in numbers]

        compiled = alike(compiled_with(None), lambda size: compiled_with(replace(self.head, tokens=size)))
        plans = self._plans(compiled)
        if follow and any(plan.problem for plan in plans) and self._may_go_over(given):
            return self._prepare_over_batch(given, training, False, chosen, state, names)
        if stated is None:
            self._check_loss(plans, count)
        refuse_other_layers(compiled)
        if stated is not None:
            return PreparedBatch(given, stated, compiled, list(numbers), count)
        if self.is_share:
            return share_of_batch(given, compiled, plans, whole)
        given = with_whole_values(given, plans)
        shares = weigh(given, plans)
        counting = [number for number in numbers if shares[number] != 0]  # the mean of nothing is undefined
        return PreparedBatch(
            replace(given, pieces=[given.pieces[number] for number in counting]),
            [shares[number] for number in counting],
            [compiled[number] for number in counting],
            counting,
            count,
        )

    def prepare_outputs(self, batch: Any) -> PreparedBatch:
        """The same for a forward pass in eval mode that returns the model's outputs. The batch needs no targets."""
        try:
            return self._prepared_outputs(batch)
        finally:
            self._whole_trace.clear()

    def _prepared_outputs(self, batch: Any) -> PreparedBatch:
        pieces = self.take_apart(batch, needs_targets=False)
        count = len(pieces.pieces)
        if count > 1 and self._loss_weight is None:
            state = self._code.current()
            first = self.compiled(pieces, 0, False, True, None, state).partition
            mixes = first.loss_plan.problem or first.loss_plan.mixed_output
            if self._may_go_over(pieces) and (mixes or (self._loss_over == "batch" and first.has_loss)):
                return self._prepare_over_batch(pieces, False, True, None, state, ())
        compiled = [self.compiled(pieces, number, False, True) for number in range(count)]
        plans = self._plans(compiled)
        for plan in plans:
            refuse_mixed_output(type(self.model).__name__, plan, count)
        given = with_whole_values(pieces, plans)
        return PreparedBatch(given, weigh(given, plans), compiled, list(range(count)), count)

    def _may_go_over(self, given: Batch) -> bool:
        """Whether the head may run over the whole batch."""
        return self._loss_over != "microbatch" and given.whole is not None and not self.is_share

    def _prepare_over_batch(
        self,
        given: Batch,
        training: bool,
        results: bool,
        active: tuple[str, ...] | None,
        state: CodeState,
        outputs: tuple[str, ...],
    ) -> PreparedBatch:
        """A batch whose head runs once, over all of it."""
        compiled = self._models_over_batch(given, training, results, active, state, outputs)
        plans = [model.partition.loss_plan for model in compiled]
        self._check_loss(plans, len(compiled), over_batch=True)
        refuse_other_layers(compiled)
        numbers = list(range(len(compiled)))
        return PreparedBatch(given, [1.0], compiled, numbers, len(compiled))

    def _models_over_batch(
        self,
        given: Batch,
        training: bool,
        results: bool,
        active: tuple[str, ...] | None,
        state: CodeState,
        outputs: tuple[str, ...],
    ) -> list[CompiledModel]:
        """The compiled models of a batch's micro-batches with one head, from the cache or compiled now."""
        whole = given.whole
        assert whole is not None
        sizes, signatures = tuple(given.sizes), tuple(piece.signature() for piece in given.pieces)
        common = (sizes, signatures, whole.signature(), training, results, active, state, outputs)
        keys = [(*common, signature) for signature in signatures]
        known = [
            self.cache.find(key, piece.tensors, whole.tensors) for key, piece in zip(keys, given.pieces, strict=True)
        ]
        found = [model for model in known if model is not None]
        if len(found) == len(known) and len({id(model.head) for model in found}) == 1:
            return found
        compiled = self._in_state(
            state, lambda: self._compile_over_batch(given, whole, training, results, active, outputs)
        )
        for model, key in dict(zip(compiled, keys, strict=True)).items():
            self.cache.add(key, model)
        return compiled

    def first_over_batch(self, batch: Batch, count: int, training: bool) -> list[CompiledModel]:
        """The compiled models for a batch of the first `count` micro-batches of one with a head over all of it."""
        state, first = self._code.current(), first_of(batch, count)
        if count == 1:
            return [self.compiled(first, 0, training, False, None, state)]
        return self._models_over_batch(first, training, False, None, state, ())

    def _plans(self, compiled: Sequence[CompiledModel]) -> list[LossPlan]:
        """How the losses of the micro-batches make the loss of the batch."""
        if self._loss_weight is not None:
            share = SUM if isinstance(self._loss_weight, str) else StatedCount(self._loss_weight)
            return [LossPlan(share)] * len(compiled)
        return [one.partition.loss_plan for one in compiled]

    def _check_loss(self, plans: Sequence[LossPlan], microbatches: int, over_batch: bool = False) -> None:
        """Refuse a loss that micro-batches cannot make, and warn once of one that cannot be followed."""
        microbatches = max(microbatches, 2) if self.is_share else microbatches  # others have more
        name = type(self.model).__name__
        self._warned = check_loss(name, plans, microbatches, self._warned, over_batch, self.is_share)

    def take_apart(self, batch: Any, needs_targets: bool) -> Batch:
        """The batch cut into micro-batches; into fewer than asked where it has fewer samples."""
        if needs_targets:
            batch = self._padded(batch)
        return take_apart(batch, self.whole, self._microbatches, needs_targets, self._shared_inputs)

    def _as_given(self, pieces: Sequence[Any]) -> Batch:
        """Batches of their own shapes, each as one micro-batch."""
        if not pieces:
            raise BatchError("pieces= is empty, so there is nothing to train on.")
        padded = [self._padded(piece) for piece in pieces]
        return join([take_apart(piece, self.whole, 1, True, self._shared_inputs) for piece in padded])

    def _padded(self, batch: Any) -> Any:
        """The batch with its sequences padded to the buckets, if there are any."""
        return self._buckets.pad(batch) if self._buckets is not None and isinstance(batch, Mapping) else batch

    def compiled(
        self,
        batch: Batch,
        number: int,
        training: bool,
        results: bool,
        active: tuple[str, ...] | None = None,
        state: CodeState | None = None,
        outputs: tuple[str, ...] = (),
        follow: bool = True,
        head: HeadChunks | None = None,
    ) -> CompiledModel:
        """The compiled model for one micro-batch of a batch, from the cache or compiled now.

        `state` is that of the code, found once for all micro-batches. With `follow` it is found out how several
        micro-batches make the loss of the batch. `head` replaces the trainer's choice of chunks.
        """
        state = state or self._code.current()
        piece, whole = batch.pieces[number], None
        several = len(batch.pieces) > 1 or (self.is_share and not results)
        if several and follow and self._loss_weight is None:
            whole = batch.whole or piece.doubled()
            if whole.size == piece.size:  # no other process has samples
                whole = None
        key = (piece.signature(), whole and whole.signature(), training, results, active, state, outputs, head)
        compiled = self.cache.find(key, piece.tensors, whole.tensors if whole else ())
        if compiled is None:
            asked = training, results, active, outputs, whole, head
            (compiled,) = self._in_state(state, lambda: [self._compile_piece(batch, number, *asked)])
            self.cache.add(key, compiled)
        return compiled

    def _in_state(self, state: CodeState, compile_models: Callable[[], list[CompiledModel]]) -> list[CompiledModel]:
        """Compile models in a state of the code, which depends from then on on all that the code read.

        Raises PartitionError for numbers that the code counts and computes with.
        """
        first = state.guards is None
        with watching(self.held), self._code.capturing(state) as captured, collected_code() as ran:
            models = compile_models()
            for value in (value for model in models for value in model.partition.values):
                value.own = None
            for model in dict.fromkeys(models):
                captured.append((self.model, model.partition.reads))
                captured += [(one.segment.module, one.captured.reads or {}) for one in model.stages]
                eager = [one.captured.eager for one in model.stages if one.captured.eager is not None]
                self._code.changes_itself([counter.change for one in eager for counter in one.counted.counters])
        counted = self._code.counted(state)
        if first and (counted or any(map(writes_outside, ran))):
            with watching(self.held):
                compile_models()  # once more: what changes again is a counter
            refuse_counters(counted, self._code.counted(state), ran)
            self._code.settle(state)
        self.held.follow()
        return models

    def baseline_device_bytes(self, compiled: CompiledModel) -> int:
        """Device bytes that plain training would need: weights, gradients, two moments, autograd's saved tensors."""
        with self.as_traced():
            state = sum(
                parameter.numel() * parameter.element_size() * (4 if parameter.requires_grad else 1)
                for parameter in self.model.parameters()
            )
        state += sum(buffer.numel() * buffer.element_size() for buffer in self.model.buffers())
        for stage in compiled.stages:
            chunks = stage.segment.chunks
            share = 1.0 if chunks is None else chunks.positions / chunks.size
            state += int(stage.captured.saved_bytes * share)
        return state
