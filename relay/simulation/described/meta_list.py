"""A list of modules with a loss, for simulated runs that compute no numbers.

It is cut and captured as `relay.Trainer([...], loss)` does it, over tensors that have shapes but no memory. Whole
models are in `meta_model`. Invariant: the modules are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from relay.capture.fake_tensors import fake_on_cpu
from relay.data.microbatches import Piece
from relay.errors import BatchError
from relay.graph.pytree import tensor_leaves
from relay.partition.batch_analysis import WholeTrace
from relay.partition.list_over_batch import partition_list_over_batch
from relay.partition.module_list import list_as_model, partition_list
from relay.partition.segments import Partition
from relay.partition.whole_head import WantedOutputs
from relay.simulation.described.example_batch import unit_of
from relay.simulation.described.meta_model import MetaModel


class MetaList(MetaModel):
    """Modules, each called with the output of the one before, their loss, and an example `(inputs, targets)`.

    Only the shapes and dtypes of the example are used. Dimension 0 of its tensors counts the samples. `unit` and
    `sequence` are as for a `MetaModel`.
    """

    def __init__(self, modules: Sequence[nn.Module], loss: Callable[..., torch.Tensor], example: Any) -> None:
        if not isinstance(example, (list, tuple)) or len(example) != 2:
            raise BatchError(f"The batch of a list of modules is a pair (inputs, targets); received {example!r:.100}.")
        (tensors, self._tree), (targets, self._target_tree) = map(tensor_leaves, example)
        if not tensors or not tensors[0].dim():
            raise BatchError("The inputs of a list of modules need a tensor of samples.")
        self._examples, self._count = [*tensors, *targets], len(tensors)
        self._modules, self._loss = len(modules), loss
        self.notes: tuple[str, ...] = ()
        self.unit, self.per_sample = unit_of({str(number): one for number, one in enumerate(tensors)})
        self.sequences = len(tensors[0])
        self.sequence = tensors[0].shape[1] if self.unit == "tokens" else 1
        self._begin(list_as_model(modules, loss), len(modules), f"a list of {len(modules)} modules")

    def described(self) -> dict[str, Any]:
        return {"class": "list", "layers": self.layers}

    def _piece(self, sequences: int, mode: Any) -> Piece:
        tensors = [
            fake_on_cpu(torch.empty((sequences, *one.shape[1:]), dtype=one.dtype, device="meta"), mode)
            for one in self._examples
        ]
        return Piece(tensors, sequences, self._count, self._tree, self._target_tree)

    def _partition(
        self,
        module: nn.Module,
        piece: Piece,
        compute: torch.dtype,
        whole: Piece | None,
        whole_trace: WholeTrace,
        over_batch: WantedOutputs | None,
    ) -> Partition:
        children = dict(module.named_children())
        loss: Any = children.get("loss", self._loss)
        modules = [children[str(number)] for number in range(self._modules)]
        inputs, targets = piece.tensors[: self._count], piece.tensors[self._count :]
        given = modules, loss, inputs, piece.tree, targets, piece.target_tree, compute, None
        if over_batch is None:
            return partition_list(*given, whole, piece.size)
        assert whole is not None
        return partition_list_over_batch(*given, whole, piece.size)
