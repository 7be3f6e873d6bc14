"""Any `nn.Module` on torch's meta device, for simulated runs that compute no numbers.

The module is partitioned and captured by the same code as a model that trains, over tensors that have shapes but no
memory. Models that are given as sizes are in `relay.simulation.described.transformer_shape`. Invariant: the module is
not changed.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from relay.capture import Lowering
from relay.capture.fake_tensors import FakeMode, copy_with_fakes, fake_mode, fake_on_cpu
from relay.data.microbatches import Piece
from relay.eps.master_weights import HALF, to_master_weights
from relay.graph.pytree import tensor_leaves
from relay.partition import partition_model
from relay.partition.batch_analysis import WholeTrace
from relay.partition.capture_cache import Captures
from relay.partition.find_blocks import find_blocks
from relay.partition.merge_layers import merge_layers
from relay.partition.segments import Partition
from relay.partition.whole_head import WantedOutputs
from relay.runtime.compiling.capture_segments import CPU, Capturing, build_compiled_model
from relay.runtime.head.checks import check_loss
from relay.runtime.head.choose_chunks import HeadChunks
from relay.runtime.head.whole_batch import build_over_batch
from relay.runtime.stages import CompiledModel
from relay.simulation.described.example_batch import Unit, unit_of
from relay.simulation.described.experts import RoutedExperts, routed_experts
from relay.simulation.described.transformer_shape import WHOLE, ShapeError


class MetaModel:
    """A module, called as `module(**batch)`, whose output has a `.loss`, and an example of a step's batch.

    Only the shapes and dtypes of the example are used. Dimension 0 of its tensors counts the samples. `unit` is what
    speed counts, and a sample has `per_sample` of it: see `unit_of`. `sequence` is the number of tokens in a sample; 1
    where samples have none.
    """

    def __init__(
        self, module: nn.Module, example: Mapping[str, Any], notes: tuple[str, ...] = (), unit: Unit | None = None
    ) -> None:
        tensors = [tensor for tensor in example.values() if isinstance(tensor, torch.Tensor) and tensor.dim()]
        if not tensors or tensors[0].dim() < 2:
            raise ShapeError("The example batch needs a first tensor of (samples, ...), such as (sequences, tokens).")
        self.example = dict(example)
        self.notes = notes
        two_stacks = bool(getattr(getattr(module, "config", None), "is_encoder_decoder", False))
        self.unit, self.per_sample = unit_of(example, two_stacks) if unit is None else unit
        self.sequences = tensors[0].shape[0]
        self.sequence = tensors[0].shape[1] if self.unit == "tokens" else 1
        layers = len(find_blocks(module))
        self._begin(module, layers, f"{type(module).__name__}, {layers} repeated layers")

    def _begin(self, module: nn.Module, layers: int, title: str) -> None:
        self.module = module
        self.experts: RoutedExperts | None = routed_experts(module)
        self.layers, self.title = layers, title
        self._compiled: dict[tuple[Any, ...], list[CompiledModel]] = {}
        self._captures: dict[torch.dtype, Captures] = {}
        self._traced: dict[tuple[Any, ...], tuple[FakeMode, list[Partition]]] = {}
        self._in_float32: MetaModel | None = None

    def described(self) -> dict[str, Any]:
        """The model as `--json` prints it."""
        return {"class": type(self.module).__name__, "layers": self.layers}

    def compiled(
        self,
        sequences: int,
        sequence: int,
        compute: torch.dtype,
        layers_per_slot: int = 1,
        recompute: bool | int = True,
        head: HeadChunks = WHOLE,
    ) -> CompiledModel:
        """The compiled model for training on that many sequences of the example."""
        return self.models((sequences,), sequence, compute, layers_per_slot, recompute, head=head)[0]

    def models(
        self,
        sizes: tuple[int, ...],
        sequence: int,
        compute: torch.dtype,
        layers_per_slot: int = 1,
        recompute: bool | int = True,
        loss_over: str = "auto",
        head: HeadChunks = WHOLE,
    ) -> list[CompiledModel]:
        """The compiled models for training on a batch of the example in micro-batches of these sizes."""
        key = sizes, compute, layers_per_slot, str(recompute), loss_over, head  # 1 and True are the same key
        if key not in self._compiled:
            mode, traced = self._partitioned(sizes, compute, loss_over)
            captures = self._captures.setdefault(compute, Captures(keeps_traces=True))
            capturing = Capturing(True, compute, None, Lowering.NATIVE, captures, recompute, CPU)
            with mode:
                own = {one: merge_layers(_copy_of(one), layers_per_slot) for one in dict.fromkeys(traced)}
                made = [own[one] for one in traced]
                if made[0].head is not None:
                    head.over_batch(made)
                    self._compiled[key] = build_over_batch(made, sizes, capturing, False)
                else:
                    built = {
                        one: build_compiled_model(
                            head.split(one, compute), True, False, compute, captures=capturing.captures,
                            recompute=recompute,
                        )
                        for one in dict.fromkeys(made)
                    }  # fmt: skip
                    self._compiled[key] = [built[one] for one in made]
                head.check_layers(made[0])
        return self._compiled[key]

    def _partitioned(
        self, sizes: tuple[int, ...], compute: torch.dtype, loss_over: str
    ) -> tuple[FakeMode, list[Partition]]:
        """The module cut into segments for each micro-batch, and the mode of its tensors. It is traced once."""
        key = sizes, compute, loss_over
        if key not in self._traced:
            mode = fake_mode(allow_real_inputs=True)
            module = copy_with_fakes(self.module, mode)
            whole = self._piece(sum(sizes), mode) if len(sizes) > 1 else None
            cut = functools.partial(self._partitions, module, mode, sizes, compute, whole, WholeTrace())
            with mode:
                over_batch = WantedOutputs() if whole is not None and loss_over == "batch" else None
                made = cut(over_batch)
                if made[0].loss_plan.problem is not None and loss_over == "auto":
                    made = cut(WantedOutputs())
            check_loss(type(self.module).__name__, [one.loss_plan for one in made], len(sizes), True)
            if made[0].head is not None:
                return mode, made  # what is built from it is noted in the head too, so it is traced anew each time
            self._traced[key] = mode, made
        return self._traced[key]

    def _piece(self, sequences: int, mode: Any) -> Piece:
        """That many sequences of the example, as fake tensors."""
        batch = dict(self.example)
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and value.dim():
                one = torch.empty((sequences, *value.shape[1:]), dtype=value.dtype, device="meta")
                batch[name] = fake_on_cpu(one, mode)
        leaves, tree = tensor_leaves(batch)
        return Piece(leaves, sequences, len(leaves), tree, None)

    def _partitions(
        self,
        module: nn.Module,
        mode: Any,
        sizes: tuple[int, ...],
        compute: torch.dtype,
        whole: Piece | None,
        whole_trace: WholeTrace,
        over_batch: WantedOutputs | None,
    ) -> list[Partition]:
        """The partition of each micro-batch; those of one size are one object."""
        made = {
            size: self._partition(module, self._piece(size, mode), compute, whole, whole_trace, over_batch)
            for size in dict.fromkeys(sizes)
        }
        return [made[size] for size in sizes]

    def _partition(
        self,
        module: nn.Module,
        piece: Piece,
        compute: torch.dtype,
        whole: Piece | None,
        whole_trace: WholeTrace,
        over_batch: WantedOutputs | None,
    ) -> Partition:
        """The partition of one micro-batch."""
        partition = partition_model(
            module, piece.tensors, piece.tree, compute, None, whole, piece.size, over_batch, whole_trace
        )
        if not partition.has_loss:
            name = type(self.module).__name__
            raise ShapeError(f"{name} returns no .loss for this example. Does the example hold labels?")
        return partition

    @property
    def trains_in_half(self) -> bool:
        """Whether some of what the module trains is in half precision."""
        return any(parameter.requires_grad and parameter.dtype in HALF for parameter in self.module.parameters())

    def in_float32(self) -> MetaModel:
        """The model with masters in float32, if some of what it trains is in half precision; else the same object."""
        if not self.trains_in_half:
            return self
        if self._in_float32 is None:
            self._in_float32 = copy.copy(self)
            module = self.model(self.sequence)
            with warnings.catch_warnings():  # of the conversion, which the trainer gives
                warnings.simplefilter("ignore")
                to_master_weights(module, "fp32", "fp32")
            self._in_float32._begin(module, self.layers, self.title)
        return self._in_float32

    def model(self, sequence: int) -> nn.Module:
        """A copy on the meta device, which the layer store takes over."""
        known: dict[int, Any] = {}
        for parameter in self.module.parameters():  # none of the numbers is copied
            known[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        for buffer in self.module.buffers():
            known[id(buffer)] = torch.empty_like(buffer, device="meta")
        return copy.deepcopy(self.module, known)

    def units(self, sequence: int) -> float:
        """How many of the unit a sample has."""
        return self.per_sample

    def model_flops(self, sequence: int) -> float:
        """FLOPs of forward and backward per unit, counted from the graphs; recompute is not among them."""
        sizes, compute = next(((key[0], key[1]) for key in self._compiled), ((1,), torch.float32))
        compiled = self.compiled(sizes[0], sequence, compute, recompute=False)
        flops = 0
        for stage in compiled.stages:
            one = stage.captured
            programs = (one.joint,) if one.joint is not None else (one.forward, one.backward)
            flops += sum(program.flops for program in programs if program is not None)
        return flops / (sizes[0] * self.per_sample)


def _copy_of(partition: Partition) -> Partition:
    """The partition with segments and values of its own: what is built from it is noted there."""
    segments = [copy.copy(segment) for segment in partition.segments]
    values = [replace(value, consumers=list(value.consumers)) for value in partition.values]
    return replace(partition, segments=segments, values=values)
