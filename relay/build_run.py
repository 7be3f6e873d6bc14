"""What a trainer consists of, built from its model and options: compiler, host memory, devices, server and optimizer.

Not here: what a trainer does (`relay.trainer`, `relay.run_state`). Invariant: options, model and optimizer are checked
before the model's parameters are taken over, so that a refused trainer leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from hal.host import Host
from relay.distributed.compare_ranks import describe, refuse_options
from relay.distributed.ranks import Ranks, local_device
from relay.distributed.together import SharedOptimizerStates, Together
from relay.eps.bind_optimizer import as_spec, bind
from relay.eps.master_weights import frozen_half, master_dtype, refuse_unsplittable, to_master_weights
from relay.eps.server import Clipping, ParameterServer
from relay.eps.store import LayerStore
from relay.eps.torch_form import RelayOptimizer
from relay.eps.torch_optimizer import TorchOptimizer
from relay.optim.loss_scale import LossScale
from relay.optim.optimizers import AdamW
from relay.optim.param_groups import split_into_groups
from relay.options import TrainOptions, train_options
from relay.partition.module_list import list_of_modules
from relay.precision import COMPUTE
from relay.processes import warn_if_alone
from relay.runtime.compiler import ModelCompiler
from relay.runtime.head.choose_chunks import HeadChunks
from relay.runtime.lanes.open_devices import common_graphs, open_devices
from relay.runtime.session import Session
from relay.trainer_arguments import check_model, check_options

Grouping = Callable[[nn.Module], tuple[list[dict[str, Any]], dict[str, int]]]
"""From a model to its parameter groups, and each parameter's group by name."""


@dataclass(frozen=True)
class Run:
    """The parts of one trainer."""

    compiler: ModelCompiler
    session: Session
    optimizer: RelayOptimizer
    grouping: Grouping
    scale: LossScale | None
    options: TrainOptions
    together: Together | None
    frozen_half: list[tuple[str, nn.Parameter]]

    def begin(self, ready: Callable[[], None]) -> None:
        """Connect the optimizer, and compare what ranks have built.

        Args:
            ready: called before the optimizer's state is read or replaced. It must not keep the trainer alive.

        Raises RanksDiffer on every rank if their models, options or optimizers differ.
        """
        compiler, together = self.compiler, self.together
        compiler.is_share = together is not None
        groups, group_of = self.grouping(compiler.model)
        server = self.session.server
        server.group(group_of)
        shared = None if together is None else SharedOptimizerStates(together, lambda: compiler.model, server)
        self.optimizer.connect(lambda: compiler.model, server.optimizer, group_of, ready, shared)
        if together is not None:
            together.refuse_differences(describe(compiler.model, self.options, groups))


def build_run(
    model: nn.Module | Sequence[nn.Module],
    loss: Callable[..., torch.Tensor] | None,
    options: dict[str, Any],
    ranks: Ranks | None,
) -> Run:
    """Build the parts of a trainer. The model's parameters become views of its store.

    Args:
        model, loss, options: as `relay.Trainer` takes them.
        ranks: the processes that train together; None for one.

    Raises as `relay.Trainer` does.
    """
    chosen = train_options("Trainer", options)
    warn_if_alone()
    modules = list_of_modules(model, loss)
    check_options(chosen, modules)
    if ranks is not None:
        refuse_options(chosen)
    compiler = ModelCompiler(
        model if isinstance(model, nn.Module) else None, modules, loss, chosen.microbatches,
        COMPUTE[chosen.precision], chosen.max_cached_programs, chosen.buckets, chosen.shared_inputs,
        chosen.layers_per_slot, chosen.recompute, chosen.loss_weight, chosen.loss_over,
    )  # fmt: skip
    whole = compiler.model
    check_model(whole, chosen)
    splits = chosen.master_weights == "split"
    half = chosen.precision == "fp16"
    scale = LossScale() if half and chosen.loss_scale == "dynamic" else None
    spec = as_spec(AdamW() if chosen.optimizer is None else chosen.optimizer)
    defaults = spec.defaults()

    def grouping(model: nn.Module) -> tuple[list[dict[str, Any]], dict[str, int]]:
        return split_into_groups(model, spec.param_groups(model, chosen.param_groups), defaults)

    groups, _ = grouping(whole)
    together = None if ranks is None else Together(ranks, whole, spec, chosen.state_dtype, chosen.microbatches)
    trained: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for name, parameter in whole.named_parameters():
        if parameter.requires_grad:
            trained[name] = parameter.shape, master_dtype(whole, parameter, chosen.master_weights)
            spec.check_dtype(name, trained[name][1], chosen.state_dtype)
            if splits:
                refuse_unsplittable(name, parameter)
    if isinstance(spec, TorchOptimizer):
        spec.check_updates(trained)
    device = chosen.device if ranks is None else local_device(chosen.device)
    devices = open_devices(device, cast("int | None", chosen.capacity))
    opened = devices[0]
    host = opened.host(cast("int | None", chosen.host_memory), cast("int | None", chosen.pinned_memory))
    clipping = Clipping(chosen.clip_grad_norm, chosen.clip_grad_value)

    def build(on: Host) -> tuple[LayerStore, ParameterServer]:
        store = LayerStore(on, splits, None if together is None else together.part)
        part = None if together is None else together.owned(store)
        bound = bind(spec, on, store, chosen.state_dtype, part=part)
        _, group_of = grouping(compiler.model)  # the model may have been edited by now
        order = [name for name, _ in compiler.model.named_parameters()]
        serve = ParameterServer if together is None else together.serve
        return store, serve(opened, on, store, bound, group_of, order, clipping, scale is not None)

    store, server = build(host)
    session = Session(
        whole, devices, host, store, server, chosen.slots, chosen.stash, cast("int | None", chosen.capacity), build,
        chosen.precision, chosen.state_dtype, chosen.resident_layers, exact_ties=chosen.exact_ties,
        sparse_rows=chosen.sparse_rows if together is None else False,
        layers_per_visit=chosen.layers_per_visit, device_speeds=chosen.device_speeds,
    )  # fmt: skip
    to_master_weights(whole, chosen.master_weights, chosen.precision, stacklevel=5)
    kept_half = frozen_half(whole, chosen.master_weights)
    store.adopt(whole)
    store.moved = compiler.held.follow
    session.guard.defer_updates = chosen.defer_updates
    session.guard.stall_timeout = chosen.stall_timeout
    compiler.as_traced = store.as_traced
    infos = [device.info for device in devices]
    compiler.device, (compiler.lowering, compiler.traced_for) = opened.info.name, common_graphs(infos)
    known = [info.memory for info in infos if info.memory is not None]
    memory = cast("int | None", chosen.capacity) or min(known, default=None)
    compiler.head = HeadChunks(
        chosen.head_chunk_tokens, memory, chosen.slots, chosen.stash, chosen.microbatches, chosen.mlp_chunk_tokens,
        required=isinstance(chosen.head_chunk_tokens, int),
    )  # fmt: skip
    scheduled = RelayOptimizer(groups, defaults)
    return Run(compiler, session, scheduled, grouping, scale, chosen, together, kept_half)
