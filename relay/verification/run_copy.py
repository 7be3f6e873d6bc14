"""A copy of a run's state between two steps, and the memory that a comparison needs.

The state is all that later steps depend on: weights, buffers, optimizer states, step count, loss scale, the random
generators of PyTorch, Python and numpy, and the position of the data. Nothing is compared here. Invariant: after
both contexts have ended, the next step computes what it would have computed without it.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hal.errors import OutOfMemory
from relay.eps.snapshot import Record
from relay.eps.torch_form import RelayOptimizer
from relay.run_state import RunState
from relay.runtime.compiling.prepared_batch import PreparedBatch

ADVICE = "Compare on a machine with more memory, or a smaller configuration of the same model."


@contextmanager
def surroundings_restored(run: RunState, data: Any) -> Iterator[None]:
    """A context at whose end the random generators are as before, and the position of `data`.

    `data` has a position if it has `state_dict` and `load_state_dict`.
    """
    resumable = callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))
    position = copy.deepcopy(data.state_dict()) if resumable else None
    generators = random.getstate(), np.random.get_state()
    device = run._compiler.traced_for
    other = () if device.type == "cpu" else (device.index or 0,)
    kind = {} if device.type == "cpu" else {"device_type": device.type}
    try:
        with torch.random.fork_rng(devices=other, **kind):
            yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        if resumable:
            data.load_state_dict(position)


@contextmanager
def state_restored(run: RunState) -> Iterator[None]:
    """A context in which the trainer makes steps that are undone at its end, also after an error.

    The trainer has another `optimizer` meanwhile, so hooks and learning-rate schedulers do not notice.
    """
    model, session = run._model, run._session
    bound = session.server.optimizer
    store = session.store
    records = {
        name: Record(store.read_from(name, one), dict(bound.state(name))).copy()
        for name, one in model.named_parameters()
    }
    buffers = {name: one.detach().clone() for name, one in model.named_buffers()}
    step, scale, optimizer = run._step, copy.copy(run._scale), run.optimizer
    run.optimizer = RelayOptimizer([dict(group) for group in optimizer.param_groups], dict(optimizer.defaults))
    try:
        yield
    finally:
        run.optimizer, run._step, run._scale = optimizer, step, scale
        session.reset()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                record = records.pop(name)
                store.write(name, parameter, record.weight)
                bound.restore(name, record.states)
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])


def plain_bytes(run: RunState, prepared: PreparedBatch) -> tuple[int, int]:
    """Bytes that plain PyTorch needs where it computes (weights, gradients, one micro-batch), and for its optimizer."""
    model, store = run._model, run._session.store
    weights = sum(one.numel() * one.element_size() for one in model.buffers())
    weights += sum(one.numel() * store.dtype_of(name, one).itemsize for name, one in model.named_parameters())
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    gradients = sum(one.numel() * store.dtype_of(name, one).itemsize for name, one in trained)
    own = [sum(stage.captured.saved_bytes for stage in compiled.stages) for compiled in prepared.compiled]
    saved = max(own) if prepared.compiled[0].head is None else sum(own)  # with such a head all of the batch at once
    return weights + gradients + saved, sum(_state_bytes(run, name) for name, _ in trained)


def refuse_without_room(run: RunState, prepared: PreparedBatch, plain_on_host: bool) -> None:
    """Raise OutOfMemory, with the figure, if host memory does not suffice for the copy of the run and plain PyTorch."""
    model, store = run._model, run._session.store
    sizes = {name: one.numel() * store.dtype_of(name, one).itemsize for name, one in model.named_parameters()}
    masters = sum(sizes.values())
    kept = masters + sum(one.numel() * one.element_size() for one in model.buffers())
    kept += sum(_state_bytes(run, name) for name, one in model.named_parameters() if one.requires_grad)
    kept += sum(sizes[name] for name, one in model.named_parameters() if one.requires_grad)  # gradients
    computing, states = plain_bytes(run, prepared)
    needed = kept + states + (computing if plain_on_host else 2 * masters)
    limits = [available_bytes()]
    memory = run._session.host.memory()
    if memory.capacity is not None:
        limits.append(memory.capacity - memory.in_use)
    if needed > min(limits):
        raise OutOfMemory("The comparison with plain PyTorch in host memory", needed, 0, min(limits), ADVICE)


def fits_on_device(run: RunState, prepared: PreparedBatch) -> bool:
    """Whether the device has room for the whole model, its gradients and a micro-batch beside what it holds now."""
    memory = run._session.device.memory()
    return memory.capacity is None or plain_bytes(run, prepared)[0] <= memory.capacity - memory.in_use


def available_bytes() -> int:
    """Bytes of host memory that are free or can be made free; those of the machine where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _state_bytes(run: RunState, name: str) -> int:
    return run._session.server.optimizer.state_bytes(name)
