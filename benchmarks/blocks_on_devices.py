"""Devices against eager PyTorch on the same machine: a GPT-2-small block, forward plus backward, and a matrix product.

The two sides run in turn, pair by pair, for the machine's speed drifts; the median of the paired ratios counts. Before
a figure is printed the device's results are compared with PyTorch's: a figure of a broken run is worth nothing.

    python benchmarks/blocks_on_devices.py [--device opencl] [--pairs 9] [--quick] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from hal import registry
from hal.device import Device, KernelCall, View
from hal.program import Kernel, Port, Program, Role
from relay.capture import CaptureRequest, capture, graphs_for
from relay.models import GPT


@dataclass(frozen=True)
class Size:
    """Of the block and its input, and of the square matrices that are multiplied."""

    hidden: int
    heads: int
    sequence: int
    batch: int
    product: int


FULL = Size(hidden=768, heads=12, sequence=128, batch=4, product=1024)
QUICK = Size(hidden=32, heads=2, sequence=8, batch=2, product=64)


class BoundKernel:
    """A kernel with its inputs on the device: `run` is one call, waited for."""

    def __init__(self, device: Device, kernel: Kernel, inputs: Sequence[torch.Tensor]) -> None:
        self._queue = device.queue("compute")
        self._kernel = kernel
        self._inputs = [
            self._allocate(device, port, tensor) for port, tensor in zip(kernel.program.inputs, inputs, strict=True)
        ]
        self._outputs = [self._allocate(device, port, None) for port in kernel.program.outputs]

    def _allocate(self, device: Device, port: Port, tensor: torch.Tensor | None) -> View:
        view = device.alloc(port.size).view(0, port.shape, port.dtype)
        if tensor is not None:
            self._queue.write(view, tensor.detach().contiguous()).wait()
        return view

    def run(self) -> None:
        """Run the kernel and wait."""
        self._queue.run(KernelCall(self._kernel, self._inputs, self._outputs)).wait()

    def results(self) -> list[torch.Tensor]:
        """The outputs on the host."""
        tensors = [torch.empty(view.shape, dtype=view.dtype) for view in self._outputs]
        for tensor, view in zip(tensors, self._outputs, strict=True):
            self._queue.read(tensor, view).wait()
        return tensors


def block_inputs(size: Size) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A block of a GPT, its input and the gradient of its output."""
    torch.manual_seed(0)
    block = GPT(layers=1, hidden=size.hidden, heads=size.heads, sequence=size.sequence, dropout=0.0).blocks[0]
    shape = (size.batch, size.sequence, size.hidden)
    return block, torch.randn(shape), torch.randn(shape)


class Segment(nn.Module):
    """A block as the relay captures it: with a tuple of results."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.block(x),)


def block_on(device: Device, size: Size) -> tuple[Callable[[], None], Callable[[], list[torch.Tensor]]]:
    """The block's forward and backward on a device: a call that runs both, and one that gives its results."""
    block, x, seed = block_inputs(size)
    lowering, traced_for = graphs_for(device.info)
    captured = capture(
        CaptureRequest(
            Segment(block), [x.requires_grad_()], lowering=lowering, device=traced_for, name="block", strides=False
        )
    )
    program = captured.backward  # it holds the forward: a segment's backward recomputes
    assert program is not None
    given = {Role.PARAMETER: list(block.parameters()), Role.BUFFER: list(block.buffers())}
    given |= {Role.VALUE: [x], Role.SEED: [seed]}
    inputs = [given[port.role][port.index] for port in program.inputs]
    bound = BoundKernel(device, device.compile(program), inputs)
    return bound.run, bound.results


def block_in_torch(size: Size) -> tuple[Callable[[], None], Callable[[], list[torch.Tensor]]]:
    """The same by autograd."""
    block, x, seed = block_inputs(size)
    x.requires_grad_()
    leaves = [*block.parameters(), x]

    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        block(x).backward(seed)

    return run, lambda: [leaf.grad for leaf in leaves]


def product_program(size: int) -> Program:
    """A matrix product of two squares."""
    graph = fx.Graph()
    left, right = graph.placeholder("left"), graph.placeholder("right")
    result = graph.call_function(torch.ops.aten.mm.default, (left, right))
    for node in (left, right, result):
        node.meta["val"] = torch.empty((size, size), device="meta")
    graph.output((result,))
    ports = [Port(Role.VALUE, index, (size, size), torch.float32) for index in range(3)]
    return Program(
        f"product {size}", graph, tuple(ports[:2]), (ports[2],), {}, False, 2 * size**3, 0, 0, f"product {size}"
    )


def timed(call: Callable[[], object]) -> float:
    """Seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def paired(ours: Callable[[], object], theirs: Callable[[], object], pairs: int) -> dict[str, Any]:
    """Medians of both sides and of the ratios of pairs, after two runs to warm up."""
    for _ in range(2):
        ours()
        theirs()
    times = [(timed(ours), timed(theirs)) for _ in range(pairs)]
    return {
        "seconds": statistics.median(ours for ours, _ in times),
        "torch_seconds": statistics.median(theirs for _, theirs in times),
        "ratio": statistics.median(ours / theirs for ours, theirs in times),
        "ratios": [ours / theirs for ours, theirs in times],
    }


def check_alike(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], what: str) -> float:
    """The largest error by norm; ends the program where it is more than rounding."""
    worst = max(float((a - b).norm() / b.norm().clamp(min=1e-3)) for a, b in zip(ours, theirs, strict=True))
    if not worst < 1e-4:
        sys.exit(f"{what}: the results differ from PyTorch's by {worst:.1e}")
    return worst


def measure_block(device: Device, pairs: int, size: Size) -> dict[str, Any]:
    """Forward plus backward of the block."""
    run, results = block_on(device, size)
    plain, expected = block_in_torch(size)
    start = time.perf_counter()
    run()
    first = time.perf_counter() - start
    plain()
    error = check_alike(_sorted(results()), _sorted(expected()), "block")
    return {**paired(run, plain, pairs), "error": error, "first_seconds": first}


def _sorted(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients in an order that does not depend on who made them: by size, then by norm."""
    return sorted(tensors, key=lambda tensor: (tensor.numel(), float(tensor.norm())))


def measure_product(device: Device, pairs: int, size: int) -> dict[str, Any]:
    """A matrix product; also in GFLOP/s and as a share of PyTorch's."""
    torch.manual_seed(0)
    left, right = torch.randn(size, size), torch.randn(size, size)
    bound = BoundKernel(device, device.compile(product_program(size)), [left, right])
    bound.run()
    error = check_alike(bound.results(), [left @ right], "product")
    figures = paired(bound.run, lambda: left @ right, pairs)
    flops = 2 * size**3 / 1e9
    return {
        **figures,
        "error": error,
        "gflops": flops / figures["seconds"],
        "torch_gflops": flops / figures["torch_seconds"],
        "share": 1 / figures["ratio"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", action="append", help="may be given several times; default: opencl, with --quick cpu"
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="a small block and few pairs: tries the script")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    size, pairs = (QUICK, 2) if options.quick else (FULL, options.pairs)
    figures: dict[str, Any] = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    for name in options.device or ["cpu" if options.quick else "opencl"]:
        device = registry.open(name)
        print(f"{name}: {device.info.description}")
        block = measure_block(device, pairs, size)
        print(
            f"  block, forward plus backward: {block['seconds']:.3f} s, PyTorch {block['torch_seconds']:.3f} s, "
            f"median of paired ratios {block['ratio']:.2f} (first run {block['first_seconds']:.1f} s)"
        )
        product = measure_product(device, pairs, size.product)
        print(
            f"  product of {size.product}: {product['gflops']:.1f} GFLOP/s, PyTorch {product['torch_gflops']:.1f}, "
            f"{100 * product['share']:.0f} % of it by the median pair"
        )
        figures[name] = {"description": device.info.description, "block": block, "product": product}
        device.close()
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
