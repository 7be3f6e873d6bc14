"""Partitions and captures a model for the shapes of one micro-batch, or of all those that share a head.

Which compiled models are kept, and what a batch is cut into, is `relay.runtime.compiler`'s. Invariant: compiling
changes neither the model nor its modules' attributes, and one thread at a time traces.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from hal.errors import Unsupported
from relay.capture import Lowering, ObservedGradientPresence, unlogged
from relay.capture.guards.bypasses import bypassed
from relay.capture.states.own_generators import python_numbers, same_python_numbers
from relay.data.microbatches import Batch, Piece
from relay.errors import CaptureError, RelayError
from relay.partition import list_as_model, partition_list, partition_list_over_batch, partition_model
from relay.partition.batch_analysis import WholeTrace
from relay.partition.capture_cache import Captures
from relay.partition.find_blocks import undisturbed
from relay.partition.merge_layers import merge_layers
from relay.partition.named_outputs import named_outputs
from relay.partition.positions.labels import NotByPosition
from relay.partition.segments import Partition
from relay.partition.whole_head import WantedOutputs
from relay.runtime.compiling.capture_segments import Capturing, build_compiled_model
from relay.runtime.head.checks import too_small
from relay.runtime.head.choose_chunks import HeadChunks, left_whole, with_row_chunks
from relay.runtime.head.whole_batch import build_over_batch
from relay.runtime.stages import CompiledModel

_COMPILING = threading.RLock()
logger = logging.getLogger("relay")


class ShapeCompiler:
    """Makes compiled models of a model, and keeps what it captured for the next ones.

    `modules` is the list that the model was given as, with `loss`; None for a whole model. `device` names the device in
    error messages, `lowering` is the kind of graph that it executes, and `traced_for` the torch device that native
    graphs are traced for. `loss_over` is what the head runs over, and `head` whether it runs over chunks. The model is
    compiled as it is within `as_traced()`.
    """

    def __init__(
        self,
        model: nn.Module | None,
        modules: list[nn.Module] | None,
        loss: Callable[..., torch.Tensor] | None,
        compute: torch.dtype,
        layers_per_slot: int,
        recompute: bool | int,
        loss_over: str,
    ) -> None:
        assert model is not None or modules is not None
        self.modules = modules
        self.model: nn.Module = model if model is not None else list_as_model(modules or [], loss)
        self.device, self.lowering, self.traced_for = "cpu", Lowering.NATIVE, torch.device("cpu")
        self.head = HeadChunks()
        self.as_traced: Callable[[], AbstractContextManager[None]] = nullcontext
        self._loss = loss
        self._compute = compute
        self._layers_per_slot = layers_per_slot
        self._recompute = recompute
        self._loss_over = loss_over
        self._presences: dict[str, ObservedGradientPresence] = {}
        self._captures = Captures()
        self._whole_trace = WholeTrace()

    @property
    def whole(self) -> bool:
        """Whether the model was given whole."""
        return self.modules is None

    def _compile(
        self,
        piece: Piece,
        training: bool,
        results: bool,
        active: tuple[str, ...] | None,
        outputs: tuple[str, ...],
        whole: Piece | None,
        head: HeadChunks | None = None,
    ) -> CompiledModel:
        """Partition and capture for the shapes of one micro-batch."""
        head = head or self.head
        with self._at_work(piece, training):
            partition = self._partition(piece, training, active, whole)
            plan = partition.loss_plan
            mixes = plan.problem is not None or (results and plan.mixed_output is not None)
            if mixes and (not results or self._loss_over != "microbatch"):
                return CompiledModel(partition, [])  # it is refused, or compiled with a head over the whole batch
            partition.named_outputs = named_outputs(partition, outputs, self.whole)
            if partition.named_outputs and head.tokens is not None:
                left_whole(head.tokens, f"the step returns outputs of the model ({', '.join(outputs)})")
            elif not results:
                partition = head.split(partition, self._compute)
            try:
                compiled = build_compiled_model(
                    partition, training, results, self._compute, self._presences, self.lowering, self._captures,
                    self._recompute, self.traced_for,
                )  # fmt: skip
                head.check_layers(partition)
                return compiled
            except NotByPosition as why:
                head.give_up(why)
                return self._compile(piece, training, results, active, outputs, whole, replace(self.head, tokens=None))

    def _compile_piece(
        self,
        batch: Batch,
        number: int,
        training: bool,
        results: bool,
        active: tuple[str, ...] | None,
        outputs: tuple[str, ...],
        whole: Piece | None,
        head: HeadChunks | None,
    ) -> CompiledModel:
        """`_compile` for a micro-batch. Raises MicroBatchTooSmall where that fails and the batch can be captured."""
        piece, everything, asked = batch.pieces[number], batch.whole, (training, results, active, outputs)
        try:
            return self._compile(piece, *asked, whole, head)
        except CaptureError as failure:
            if everything is None or failure.by_data or piece.size == everything.size:
                raise
            try:
                self._compile(everything, *asked, None, head)
            except RelayError:
                raise failure from failure.__cause__
            raise too_small(failure, piece.size, everything.size, self.whole) from failure

    def _compile_over_batch(
        self,
        given: Batch,
        whole: Piece,
        training: bool,
        results: bool,
        active: tuple[str, ...] | None,
        outputs: tuple[str, ...],
    ) -> list[CompiledModel]:
        """Partition and capture for the micro-batches of a batch, with one head."""
        self.head.over_batch([])
        logger.info("what comes after the last layer runs once, over the whole batch of %d samples", whole.size)
        wanted = WantedOutputs(outputs, results)
        made: list[tuple[Piece, Partition]] = []
        partitions = []
        with self._at_work(given.pieces[0], training):
            for piece in given.pieces:
                known = next((partition for of, partition in made if _alike(of, piece, partition)), None)
                if known is None:
                    known = self._partition(piece, training, active, whole, wanted)
                    made.append((piece, known))
                partitions.append(known)
            capturing = Capturing(
                training, self._compute, self._presences, self.lowering, self._captures, self._recompute,
                self.traced_for,
            )  # fmt: skip
            head = partitions[0].head
            assert head is not None
            head.partition.named_outputs = named_outputs(head.partition, outputs, self.whole)
            for number, value in enumerate(head.partition.inputs):
                head.partition.values[value].requires_grad = training and number in whole.sources
            compiled = build_over_batch(partitions, given.sizes, capturing, results)
            self.head.check_layers(partitions[0])
            return compiled

    def _partition(
        self,
        piece: Piece,
        training: bool,
        active: tuple[str, ...] | None,
        whole: Piece | None,
        over_batch: WantedOutputs | None = None,
    ) -> Partition:
        """The partition for the shapes of one micro-batch; with `over_batch` its last segment stands for the head."""
        tensors = list(piece.tensors)
        for number in piece.sources if training else ():
            tensors[number] = tensors[number].detach().requires_grad_()
        if self.modules is None:
            partition = partition_model(
                self.model, tensors, piece.tree, self._compute, active, whole, piece.size, over_batch, self._whole_trace
            )
        else:
            inputs, targets = tensors[: piece.input_count], tensors[piece.input_count :]
            given = self.modules, self._loss, inputs, piece.tree, targets, piece.target_tree, self._compute, active
            if over_batch is None:
                partition = partition_list(*given, whole, piece.size)
            else:
                assert whole is not None
                partition = partition_list_over_batch(*given, whole, piece.size)
        partition = merge_layers(partition, self._layers_per_slot)
        with_row_chunks(partition, self.head.layers)
        # What is given of the whole batch follows the batch's tensors, and has no gradient.
        for value, tensor in zip(partition.inputs, tensors, strict=False):
            partition.values[value].requires_grad = tensor.requires_grad
            partition.values[value].own = tensor
        return partition

    @contextmanager
    def _at_work(self, piece: Piece, training: bool) -> Iterator[None]:
        """Around partitioning and capturing. Tracing cannot run in several threads at once."""
        shapes = ", ".join("x".join(map(str, tensor.shape)) or "1" for tensor in piece.tensors)
        purpose = "training" if training else "evaluation"
        logger.info("compiling for %s on micro-batches of %s", purpose, shapes, extra={"event": "compile"})
        as_before = same_python_numbers(python_numbers())  # a trace draws what no step does
        try:
            with _COMPILING, self.as_traced(), undisturbed(self.model), bypassed(), unlogged(), as_before:
                yield
        except Unsupported as refused:
            what = f"device {self.device!r} takes graphs of known ops only: {refused}"
            raise Unsupported(what, op=refused.op, dtype=refused.dtype, device=self.device) from refused


def _alike(known: Piece, piece: Piece, partition: Partition) -> bool:
    """Whether a micro-batch takes the partition that was made for another."""
    return known.signature() == piece.signature() and all(guard.holds(piece.tensors) for guard in partition.guards)
