"""`relay calibrate`: measure a real device through the HAL and describe it for the simulator.

The kernels of transformer layers of several shapes are timed, and the constants of the simulator's cost model are
fitted to the times by least squares of relative errors: seconds = call + ops x launch + (flops + products x ramp) /
rate + attention flops / attention rate + other bytes / bandwidth. Transfers in each direction and both at once, host
memory, and an optimizer step alone and during transfers are timed directly. The result is a table that `hal.spec`
reads.

Figures are medians of interleaved runs, because the speed of a machine drifts. Invariant: the device is used through
the HAL alone, and nothing on it is changed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hal import registry
from hal.device import Device, DeviceInfo, KernelCall, View
from hal.event import Event
from hal.ops.cost import work_of
from hal.program import Program
from hal.random import RandomKey
from hal.spec import COLUMNS
from relay.capture import graphs_for
from relay.optim.optimizers import AdamW
from relay.precision import COMPUTE
from relay.runtime.grad_mode import as_if_alone
from relay.simulation.described.transformer_shape import ModelShape, compiled_model_of

SHAPES = ((96, 128, 4), (128, 128, 2), (192, 128, 1), (224, 128, 4), (256, 64, 4), (384, 128, 2), (448, 128, 2))
"""(hidden, sequence, sequences) of the timed layers: small for a GPU, quick on a CPU."""

LARGE = ((1024, 512, 4), (2048, 1024, 2), (4096, 1024, 2))
"""Further layers that are timed on devices with memory of their own."""

HOST_DEVICES = ("cpu", "numpy")
"""Backends that compute on the host, even with a memory of their own."""

CHUNK = 32 * 2**20
REPEATS = 5


@as_if_alone()
def calibrate(
    name: str,
    precision: str = "fp32",
    on_progress: Callable[[str], None] = lambda text: None,
    rounds: int = REPEATS,
    between: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Measure a device, its link and this host: {"device": ..., "link": ..., "host": ..., "kernels_mean_error": ...}.

    Arguments:
        name: The device, as `relay devices` lists it.
        precision: "fp32", "bf16" or "fp16".
        on_progress: Called with the name of each part before it is measured.
        rounds: How often kernels and host work are timed.
        between: Called after each round. What it measures is subject to the same drift of the machine.
        clock: Any clock but `time.perf_counter` also replaces the times that the device reports: `time.process_time`
            suits a device on the host's cores while other processes keep the machine busy.

    Raises Unavailable for a device that is not present, and Unsupported for one without an op of a transformer.
    """
    device = registry.open(name)
    try:
        discrete = not device.info.unified
        on_progress("kernels of layers")
        large = discrete and name.partition(":")[0] not in HOST_DEVICES
        programs = _programs(SHAPES + (LARGE if large else ()), precision, device.info)
        runs = [_Prepared(device, program, clock) for program in programs]
        hosts = _HostWork(device, clock)
        for prepared in runs:
            prepared.run()
        times: list[list[float]] = []
        host_times: list[tuple[float, float, float]] = []
        for _ in range(rounds):
            times.append([prepared.run() for prepared in runs])
            host_times.append(hosts.run())
            between()
        for prepared in runs:
            prepared.free()
        constants = fit(programs, [statistics.median(column) for column in zip(*times, strict=True)])
        copying, stepping, task = (statistics.median(column) for column in zip(*host_times, strict=True))
        memory, optimizer = 2 * CHUNK / copying, hosts.moved / stepping
        on_progress("transfers")
        down, up, both, latency = _transfers(device)
        beside = _optimizer_beside_transfers(device, optimizer) if discrete else optimizer
        # The shared memory gives at least what each user drew alone, or less where transfers slow the optimizer down.
        shared = max(memory, optimizer, constants["bandwidth"] if not discrete else 0.0)
        if discrete and beside < optimizer:
            shared = min(shared, beside + down)
        info = device.info
        source = f"calibrated on {time.strftime('%Y-%m-%d')}"

        def cell(value: str) -> dict[str, Any]:
            return {"value": value, "source": source, "verified": True}

        bandwidth = cell(f"{constants['bandwidth'] / 1e9:.4f}GB/s")
        described: dict[str, Any] = {
            "name": name.replace(":", "-"),
            "title": info.description,
            "unified": info.unified,
            "host_cores": "host-cores" in info.tags,
            "memory": cell(f"{info.memory or 2**40}B"),
            "bandwidth": bandwidth,
            "bandwidth_achieved": bandwidth,
            f"achieved_{precision}": cell(f"{constants['rate'] / 1e9:.4f}GFLOPS"),
            "attention": cell(min(1.0, constants["attention"])),  # type: ignore[arg-type]
            "launch": cell(f"{constants['launch'] * 1e6:.4f}us"),
            "call": cell(f"{constants['call'] * 1e6:.4f}us"),
            "ramp": cell(f"{constants['ramp'] / 1e6:.4f}MFLOP"),
            "granularity": cell("1B"),
            "power_idle": {"value": "10W", "source": "assumed: no meter is read", "verified": False},
            "power_busy": {"value": "65W", "source": "assumed: no meter is read", "verified": False},
        }
        link = {
            "name": described["name"],
            "peak": cell(f"{max(down, up) / 1e9:.4f}GB/s"),
            "down": cell(f"{down / 1e9:.4f}GB/s"),
            "up": cell(f"{up / 1e9:.4f}GB/s"),
            "both": cell(f"{both / 1e9:.4f}GB/s"),
            "latency": cell(f"{latency * 1e6:.4f}us"),
        }
        host = {
            "name": described["name"],
            "memory": cell(f"{host_memory_size()}B"),
            "bandwidth": cell(f"{shared / 1e9:.4f}GB/s"),
            "bandwidth_achieved": cell(f"{shared / 1e9:.4f}GB/s"),
            "optimizer_bandwidth": cell(f"{optimizer / 1e9:.4f}GB/s"),
            "task": cell(f"{task * 1e6:.4f}us"),
            "power_idle": {"value": "10W", "source": "assumed: no meter is read", "verified": False},
            "power_busy": {"value": "65W", "source": "assumed: no meter is read", "verified": False},
        }
        return {"device": described, "link": link, "host": host, "kernels_mean_error": constants["error"]}
    finally:
        device.close()


def _programs(shapes: Sequence[tuple[int, int, int]], precision: str, info: DeviceInfo) -> list[Program]:
    """The kernels of a layer, of the embedding and of the head, for each shape, in the graphs that the device takes."""
    found = []
    lowering, traced_for = graphs_for(info)
    for hidden, sequence, sequences in shapes:
        shape = ModelShape(2, hidden, max(1, hidden // 32), 256)
        compute = COMPUTE[precision]
        compiled = compiled_model_of(
            shape, sequences, sequence, compute, lowering=lowering, traced_for=traced_for
        ).stages
        for stage in (compiled[0], compiled[1], compiled[-1]):
            found += [part.program for part in (stage.forward, stage.backward) if part is not None]
    return found


class _Prepared:
    """A compiled program with its buffers."""

    def __init__(self, device: Device, program: Program, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue = device.queue("compute")
        self._program = program
        self._kernel = device.compile(program)
        ports = [*program.inputs, *program.outputs]
        self._buffers = [device.alloc(max(64, port.size), "calibration") for port in ports]
        views = [buffer.view(0, port.shape, port.dtype) for buffer, port in zip(self._buffers, ports, strict=True)]
        self._inputs, self._outputs = views[: len(program.inputs)], views[len(program.inputs) :]
        generator = torch.Generator().manual_seed(0)
        for view in self._inputs:
            self._fill(view, generator).wait()

    def _fill(self, view: View, generator: torch.Generator) -> Event:
        if view.dtype.is_floating_point:
            return self._queue.write(view, (torch.randn(view.shape, generator=generator) * 0.02).to(view.dtype))
        return self._queue.write(view, torch.randint(0, 256, view.shape, generator=generator).to(view.dtype))

    def run(self) -> float:
        """Seconds of one run: as the device reports them, or the time waited where it reports none."""
        key = RandomKey(0, 0, 0, 0) if self._program.draws else None
        start = self._clock()
        event = self._queue.run(KernelCall(self._kernel, self._inputs, self._outputs, key=key))
        event.wait()
        passed = self._clock() - start
        return event.elapsed() or passed if self._clock is time.perf_counter else passed

    def free(self) -> None:
        for buffer in self._buffers:
            buffer.free()


def fit(programs: Sequence[Program], seconds: Sequence[float]) -> dict[str, float]:
    """The constants of the cost model, by least squares of relative errors with no constant below zero.

    `error` is the mean relative error of the fit. Where times are too noisy to separate arithmetic from launches, only
    arithmetic and the call are fitted.
    """
    rows = []
    for program in programs:
        works = [work for work in map(work_of, program.graph.nodes) if work is not None]
        products = [work for work in works if work.flops and not work.attention]
        rows.append(
            [
                1.0,
                float(len(works)),
                sum(work.flops for work in products),
                float(len([work for work in works if work.flops])),
                sum(work.done for work in works if work.attention),
                sum(work.moved for work in works if not work.flops),
            ]
        )
    matrix, target = np.array(rows), np.array(seconds)
    solution = _non_negative(matrix / target[:, None], np.ones(len(target)))
    if solution[2] <= 0:
        plainer = matrix.copy()
        plainer[:, 2] += matrix[:, 4]
        plainer[:, [1, 3, 4, 5]] = 0.0
        solution = _non_negative(plainer / target[:, None], np.ones(len(target)))
        solution[4] = solution[2] = max(solution[2], float(np.median(target / plainer[:, 2].clip(1.0))) / 10)
    call, launch, product, ramp, attention, moved = map(float, solution)
    predicted = matrix @ solution
    rates = COLUMNS["device"]["achieved_fp32"]
    rate = min(max(1 / product, rates.low), rates.high)  # noise may leave hardly any time to arithmetic
    return {
        "call": call,
        "launch": launch,
        "rate": rate,
        "ramp": ramp * rate,
        "attention": max(product / max(attention, product), COLUMNS["device"]["attention"].low),
        "bandwidth": 1 / max(moved, 1e-13),  # the upper bound of a description
        "error": float(np.mean(np.abs(predicted / target - 1))),
    }


def _non_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares without negative solutions: columns with a negative solution are dropped, the worst first."""
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0
    columns = list(range(matrix.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, columns] / scale[columns], target, rcond=None)
        if (found >= 0).all():
            break
        columns.pop(int(np.argmin(found)))
    solution = np.zeros(matrix.shape[1])
    solution[columns] = found / scale[columns]
    return solution


def _transfers(device: Device) -> tuple[float, float, float, float]:
    """Bytes a second down, up, and in both directions together; seconds of a tiny transfer."""
    host = device.host()
    buffers = [device.alloc(CHUNK, "calibration") for _ in range(2)]
    down_view, up_view = (buffer.view(0, (CHUNK,), torch.uint8) for buffer in buffers)
    source = host.alloc(CHUNK, torch.uint8, "calibration", crosses=True)
    target = host.alloc(CHUNK, torch.uint8, "calibration", crosses=True)
    load, drain = device.queue("load"), device.queue("drain")

    def down(_: int) -> float:
        return _timed(lambda: [load.write(down_view, source) for _ in range(4)]) / 4

    def up(_: int) -> float:
        return _timed(lambda: [drain.read(target, up_view) for _ in range(4)]) / 4

    def both(_: int) -> float:
        def submit() -> list[Event]:
            writes = [load.write(down_view, source) for _ in range(4)]
            return [*writes, *(drain.read(target, up_view) for _ in range(4))]

        return _timed(submit)

    tiny = down_view if CHUNK <= 64 else buffers[0].view(0, (64,), torch.uint8)
    latency = statistics.median(_timed(lambda: [load.write(tiny, source[:64])]) for _ in range(20))
    for measure in (down, up):
        measure(0)
    seconds = [statistics.median(map(measure, range(REPEATS))) for measure in (down, up, both)]
    for buffer in buffers:
        buffer.free()
    return CHUNK / seconds[0], CHUNK / seconds[1], 8 * CHUNK / seconds[2], latency


class _HostWork:
    """The work that is timed on the host: a copy in memory, an optimizer step, and an empty task."""

    def __init__(self, device: Device, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._host = device.host()
        self._left, self._right = torch.zeros(CHUNK, dtype=torch.uint8), torch.ones(CHUNK, dtype=torch.uint8)
        self._step, self.moved = optimizer_step()
        self.run()

    def run(self) -> tuple[float, float, float]:
        """Seconds of one copy, one step and one empty task."""
        copying = _timed(lambda: [self._host.run(self._copy)], self._clock)
        stepping = _timed(lambda: [self._host.run(self._step)], self._clock)
        return copying, stepping, _timed(lambda: [self._host.run(_nothing)], self._clock)

    def _copy(self) -> None:
        self._left.copy_(self._right)


def _optimizer_beside_transfers(device: Device, alone: float) -> float:
    """Bytes a second of an optimizer step during transfers to the device."""
    host = device.host()
    step, moved = optimizer_step()
    buffer = device.alloc(CHUNK, "calibration")
    view = buffer.view(0, (CHUNK,), torch.uint8)
    source = host.alloc(CHUNK, torch.uint8, "calibration", crosses=True)
    events = [device.queue("load").write(view, source) for _ in range(8)]
    spans = []
    for _ in range(3):
        event = host.run(step)
        event.wait()
        spans.append(event.elapsed())
    for event in events:
        event.wait()
    buffer.free()
    seconds = statistics.median(spans)
    return moved / seconds if seconds > 0 else alone


def optimizer_step() -> tuple[Callable[[], None], int]:
    """The work of the parameter server for layers of 12 x 256^2: gradient norms, then AdamW in fp32; and its bytes.

    There are six layers, so that they do not stay in a cache from one step to the next.
    """
    hidden = 256
    shapes = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)] * 6
    masters = [torch.randn(shape) for shape in shapes]
    gradients = [torch.randn(shape) * 1e-3 for shape in shapes]
    optimizer = AdamW()
    states: list[dict[str, Any]] = [
        {"exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape), "step": torch.ones(())} for shape in shapes
    ]
    group = optimizer.defaults()

    def step() -> None:
        with torch.no_grad():
            for gradient in gradients:
                torch.linalg.vector_norm(gradient)
            optimizer.update_by_torch(masters, gradients, states, group, first=False)

    return step, 32 * sum(master.numel() for master in masters)


def _timed(submit: Callable[[], Sequence[Event]], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    for event in submit():
        event.wait()
    return clock() - start


def _nothing() -> None:
    """An empty host task."""


def host_memory_size() -> int:
    """Bytes of memory that this machine has."""
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
