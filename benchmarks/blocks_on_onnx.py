"""A GPT-2-small block on ONNX Runtime against eager PyTorch: forward and backward, on the same machine, paired.

The block has hidden size 768 and runs on 4 sequences of 128; the loss is the sum of its output times given numbers, so
that the whole forward is needed. PyTorch runs forward and autograd's backward; the device runs the program that the
relay gives it for a last segment, which is both in one. The two take turns, so that a drift of the machine meets both.
Both must give the same gradients: a figure of a broken run is worth nothing.

    python benchmarks/blocks_on_onnx.py [--device onnx:cpu] [--pairs 15] [--accumulate] [--quick] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from hal import registry
from hal.device import KernelCall
from hal.program import Role
from relay.capture import CaptureRequest, Lowering, capture
from relay.models.gpt import Block

GRADIENTS = (Role.PARAMETER_GRADIENT, Role.VALUE_GRADIENT)


class _BlockWithLoss(nn.Module):
    """A block and its loss, as segments have it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.block = Block(hidden, heads, 0.0)

    def forward(self, stream: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        return ((self.block(stream) * weights).sum(),)


def main() -> int:
    """Print the two medians and the median of the paired ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="onnx:cpu")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="a small block and few pairs: tries the script")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--accumulate", action="store_true", help="add gradients to what is there, on both sides")
    options = parser.parse_args()

    torch.manual_seed(0)
    hidden, heads, shape = (64, 2, (2, 16, 64)) if options.quick else (768, 12, (4, 128, 768))
    pairs_wanted = 2 if options.quick else options.pairs
    module = _BlockWithLoss(hidden, heads)
    stream = torch.randn(shape, requires_grad=True)
    weights = torch.randn(shape)
    program = capture(
        CaptureRequest(module, [stream, weights], "block", ends_in_loss=True, lowering=Lowering.CORE)
    ).joint
    assert program is not None
    device = registry.open(options.device)
    queue = device.queue("compute")
    started = time.perf_counter()
    kernel = device.compile(program)
    compiled = time.perf_counter() - started
    parameters = [parameter.detach() for parameter in module.parameters()]
    results = [torch.zeros(port.shape) for port in program.outputs]
    inputs, outputs = [], []
    for tensor in (*parameters, stream.detach(), weights, torch.ones(())):
        view = device.alloc(tensor.numel() * 4).view(0, tuple(tensor.shape), tensor.dtype)
        queue.write(view, tensor).wait()
        inputs.append(view)
    for tensor in results:
        view = device.alloc(tensor.numel() * 4).view(0, tuple(tensor.shape), tensor.dtype)
        queue.fill(view, 0.0).wait()
        outputs.append(view)
    accumulate = tuple(options.accumulate and port.accumulates for port in program.outputs)

    def ours() -> float:
        start = time.perf_counter()
        queue.run(KernelCall(kernel, inputs, outputs, accumulate)).wait()
        return time.perf_counter() - start

    def eager() -> float:
        if not options.accumulate:
            for tensor in (*module.parameters(), stream):
                tensor.grad = None
        start = time.perf_counter()
        (loss,) = module(stream, weights)
        loss.backward()
        return time.perf_counter() - start

    for _ in range(3):
        ours(), eager()
    pairs = [(ours(), eager()) for _ in range(pairs_wanted)]
    for view, tensor in zip(outputs, results, strict=True):
        queue.read(tensor, view).wait()
    wanted = [parameter.grad for parameter in module.parameters()] + [stream.grad]
    gradients = [result for result, port in zip(results, program.outputs, strict=True) if port.role in GRADIENTS]
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, wanted, strict=True) if b is not None)
    report = {
        "device": options.device,
        "threads": torch.get_num_threads(),
        "compile_seconds": compiled,
        "device_ms": 1e3 * statistics.median(mine for mine, _ in pairs),
        "eager_ms": 1e3 * statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(mine / theirs for mine, theirs in pairs),
        "gradient_error": error,
    }
    print(json.dumps(report, indent=2))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    device.close()
    return 0 if error < 1e-5 else 1


if __name__ == "__main__":
    sys.exit(main())
