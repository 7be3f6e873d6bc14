"""Any `nn.Module` on torch's meta device, for simulated runs that compute no numbers.

The module is partitioned and captured by the same code as a model that trains, over tensors that have shapes but no
memory. Models that are given as sizes are in `relay.simulation.transformer_shape`. Invariant: the module is not
changed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from relay.capture.fake_tensors import copy_with_fakes, fake_mode, fake_on_cpu
from relay.graph.pytree import tensor_leaves
from relay.partition import partition_model
from relay.partition.find_blocks import find_blocks
from relay.partition.merge_layers import merge_layers
from relay.runtime.head.choose_chunks import HeadChunks
from relay.runtime.stages import CompiledModel, build_compiled_model
from relay.simulation.transformer_shape import WHOLE, ShapeError


class MetaModel:
    """A module, called as `module(**batch)`, whose output has a `.loss`, and an example of a step's batch.

    Only the shapes and dtypes of the example are used. Dimension 0 of its tensors counts the sequences, dimension 1 of
    its first tensor the tokens.
    """

    def __init__(self, module: nn.Module, example: Mapping[str, torch.Tensor]) -> None:
        tensors = [tensor for tensor in example.values() if isinstance(tensor, torch.Tensor)]
        if not tensors or tensors[0].dim() < 2:
            raise ShapeError("The example batch needs a first tensor of (sequences, tokens).")
        self.module = module
        self.example = dict(example)
        self.sequences, self.sequence = tensors[0].shape[:2]
        self.layers = len(find_blocks(module))
        self.title = f"{type(module).__name__}, {self.layers} repeated layers"
        self._compiled: dict[tuple[Any, ...], CompiledModel] = {}

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
        key = sequences, compute, layers_per_slot, str(recompute), head  # 1 and True are the same key
        if key not in self._compiled:
            mode = fake_mode(allow_real_inputs=True)
            module = copy_with_fakes(self.module, mode)
            batch = {
                name: torch.empty((sequences, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")
                for name, tensor in self.example.items()
            }
            leaves, tree = tensor_leaves({name: fake_on_cpu(tensor, mode) for name, tensor in batch.items()})
            with mode:
                partition = partition_model(module, leaves, tree, compute)
                if not partition.has_loss:
                    name = type(self.module).__name__
                    raise ShapeError(f"{name} returns no .loss for this example. Does the example hold labels?")
                partition = head.split(merge_layers(partition, layers_per_slot), compute)
                self._compiled[key] = build_compiled_model(partition, True, False, compute, recompute=recompute)
        return self._compiled[key]

    def model(self, sequence: int) -> nn.Module:
        """A copy on the meta device, which the layer store takes over."""
        return copy.deepcopy(self.module).to("meta")

    def model_flops(self, sequence: int) -> float:
        """FLOPs of forward and backward per token: three times those of the captured forward."""
        stages = self.compiled(1, sequence, torch.float32).stages
        return 3.0 * sum(stage.captured.forward.flops for stage in stages) / self.sequence
