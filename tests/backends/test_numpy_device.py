"""The numpy device: seeds, memory, and buffers that take each other's place. How it trains: `test_devices_train`."""

import pytest
import torch
from torch import fx

from backends.numpy_device import NumpyDevice
from hal import registry
from hal.device import KernelCall
from hal.errors import OutOfMemory, Unavailable
from hal.program import Port, Program, Role
from tests.support.zoo import small_models


def test_another_seed_draws_other_masks_and_leaves_plain_pytorch() -> None:
    ours = small_models.relayed("bert", "sgd", 2, "numpy")
    model = small_models.build("bert")
    other = small_models.relay.Trainer(
        model, device="numpy", optimizer=small_models.relay.SGD(lr=0.05), microbatches=2, seed=small_models.SEED + 1
    )
    try:
        losses = [other.step(batch).loss for batch in small_models.batches("bert", 2)]
    finally:
        other.close()
    assert small_models.loss_error(losses, ours.losses) > 1e-4


def swap() -> Program:
    """Two buffers change places, and the first one's old value comes out as well."""
    blank = torch.empty(4, 3, device="meta")
    ports = [Port(Role.BUFFER, index, (4, 3), torch.float32) for index in range(2)]
    updates = [Port(Role.BUFFER_UPDATE, index, (4, 3), torch.float32) for index in range(2)]
    results = (Port(Role.VALUE, 0, (4, 3), torch.float32), *updates)
    graph = fx.Graph()
    first, second = graph.placeholder("buffer_0"), graph.placeholder("buffer_1")
    first.meta, second.meta = {"val": blank}, {"val": blank}
    graph.output((first, second, first))  # the old first, then the new values of both
    return Program("swap", graph, tuple(ports), results, {}, False, 0, 0, 0, "swap")


def test_new_values_of_buffers_are_written_after_every_read_of_the_old_ones() -> None:
    device = registry.open("numpy")
    try:
        queue = device.queue("compute")
        views = [device.alloc(48).view(0, (4, 3), torch.float32) for _ in range(3)]
        filled = [queue.fill(view, float(number)) for number, view in enumerate(views)]
        queue.run(KernelCall(device.compile(swap()), views[:2], [views[2], views[0], views[1]]), filled).wait()
        results = [torch.empty(4, 3) for _ in views]
        for result, view in zip(results, views, strict=True):
            queue.read(result, view).wait()
        assert [float(result.unique()) for result in results] == [1.0, 0.0, 0.0]
    finally:
        device.close()


def test_memory_is_its_own_and_counted() -> None:
    device = registry.open("numpy", capacity=1000)
    try:
        assert not device.info.unified
        buffer = device.alloc(800)
        with pytest.raises(OutOfMemory, match="201 bytes requested"):
            device.alloc(201)
        buffer.free()
        assert device.memory().in_use == 0
        assert device.memory().peak == 800
    finally:
        device.close()


def test_the_workspace_of_the_oracle_is_charged_as_wide_as_it_computes() -> None:
    program = swap()
    wide = Program(**{**program.__dict__, "workspace": 100})
    charged = {}
    for name in ("numpy", "numpy:float64"):
        device = registry.open(name)
        assert isinstance(device, NumpyDevice)
        device.compile(wide)
        charged[name] = device.memory().in_use
        device.close()
    assert charged == {"numpy": 100, "numpy:float64": 200}


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(Unavailable, match="'numpy' or 'numpy:float64'"):
        registry.open("numpy:float16")
    assert {probe.name for probe in registry.devices() if probe.available} >= {"numpy", "numpy:float64"}
