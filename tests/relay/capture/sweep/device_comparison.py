"""One sample layer on devices that execute core graphs: outputs, new buffers and gradients against eager PyTorch.

The layer is captured once, and its programs run on every device that is asked for. Eager PyTorch computes in float64,
and in float32 where float64 is not to be had (`NEAR`, `FAR`: how equal a result must be). Layers that draw random
numbers are compared with their undecomposed programs on the CPU, which the sweep of `test_sweep` holds to PyTorch's
bits. Nothing here says which samples may be refused.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hal import registry
from hal.device import NATIVE, Device, KernelCall
from hal.errors import CompileError, HalError, Unsupported
from hal.program import Program, Role
from relay.capture import Captured, CaptureRequest, Lowering, capture
from relay.errors import RelayError
from tests.relay.capture.sweep.comparison import Verdict
from tests.relay.capture.sweep.sample_layers import NotASample, Sample
from tests.support.zoo.core_modules import KEY, given_to

NEAR = 2e-5
"""A result may differ from float64 by this, relative to itself and to a fiftieth of the largest element about it."""

FAR = 16.0
"""... or by this many times what eager float32 differs by, for ops that lose digits in PyTorch too."""

Results = dict[tuple[Role, int], Tensor]


def verdicts(sample: Sample, opened: Mapping[str, Device]) -> dict[str, Verdict]:
    """How the sample fared on each of the opened devices, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            layer, value = sample.make()
            value.requires_grad_()
            torch.manual_seed(0)
            copy.deepcopy(layer)(value)
        except NotASample as why:
            return dict.fromkeys(opened, Verdict("no sample", str(why)))
        except Exception as why:
            return dict.fromkeys(opened, Verdict("no sample", f"{type(why).__name__}: {why}"))
        found: dict[str, Verdict] = {}
        for lowering in Lowering:
            native = lowering is Lowering.NATIVE
            devices = {name: device for name, device in opened.items() if (NATIVE in device.info.tags) is native}
            if devices:
                found.update(verdicts_by_graph(layer, value, lowering, devices))
        return found


def verdicts_by_graph(
    layer: nn.Module, value: Tensor, lowering: Lowering, opened: Mapping[str, Device]
) -> dict[str, Verdict]:
    """How the layer fared on devices that execute one kind of graph."""
    try:
        captured = capture(CaptureRequest(layer, [value], "sample", lowering=lowering, strides=False))
    except (RelayError, HalError) as why:
        return dict.fromkeys(opened, refusal(why))
    except Exception as why:
        return dict.fromkeys(opened, Verdict("crashed", f"in capture: {type(why).__name__}: {why}"))
    given = given_to(layer, captured, [value])
    try:
        references = references_of(layer, value, captured, given)
    except Exception as why:
        return dict.fromkeys(opened, Verdict("no sample", f"{type(why).__name__}: {why}"))
    return {name: judged(device, captured, given, references) for name, device in opened.items()}


def refusal(why: Exception) -> Verdict:
    """The verdict of an error before anything runs. It must name the layer or its program."""
    return Verdict("refused" if "sample" in str(why) else "crashed", f"{type(why).__name__}: {why}")


def judged(
    device: Device, captured: Captured, given: Mapping[Role, Sequence[Tensor]], references: tuple[Results, Results]
) -> Verdict:
    """Compile and run the programs on a device, and compare."""
    programs = [captured.forward, *([captured.backward] if captured.backward is not None else [])]
    try:
        kernels = [device.compile(program) for program in programs]
    except (Unsupported, CompileError) as why:
        return refusal(why)
    except Exception as why:
        return Verdict("crashed", f"in compile: {type(why).__name__}: {why}")
    found: Results = {}
    for program, kernel in zip(programs, kernels, strict=True):
        saved = [found[Role.VALUE, port.index] for port in captured.saved] if found else []
        try:
            found = run(device, program, kernel, {**given, Role.VALUE: [*given[Role.VALUE], *saved]})
        except HalError as why:
            return Verdict("crashed", f"in the run: {type(why).__name__}: {why}")
        except Exception as why:
            return Verdict("crashed", f"bare, in the run: {type(why).__name__}: {why}")
        for port, result in found.items():
            if port[0] is Role.VALUE and port[1] >= len(captured.output_requires_grad):
                continue  # a copy of a buffer for the backward
            problem = difference(result, *(reference.get(port) for reference in references))
            if problem:
                return Verdict("wrong", f"{port[0].value} {port[1]} {problem}")
    return Verdict("equal")


def run(device: Device, program: Program, kernel: Any, given: Mapping[Role, Sequence[Tensor]]) -> Results:
    """One run of a program, on memory that is freed after it."""
    queue, buffers = device.queue("compute"), []

    def view(port: Any) -> Any:
        buffers.append(device.alloc(max(math.prod(port.shape) * port.dtype.itemsize, 1)))
        return buffers[-1].view(0, port.shape, port.dtype)

    try:
        inputs = [view(port) for port in program.inputs]
        written = [
            queue.write(target, given[port.role][port.index].detach().to(port.dtype).contiguous())
            for target, port in zip(inputs, program.inputs, strict=True)
        ]
        outputs = [view(port) for port in program.outputs]
        ran = queue.run(KernelCall(kernel, inputs, outputs, key=KEY if program.draws else None), written)
        ran.wait()
        results: Results = {}
        for port, source in zip(program.outputs, outputs, strict=True):
            result = torch.empty(port.shape, dtype=port.dtype)
            queue.read(result, source, [ran]).wait()
            results[port.role, port.index] = result
        return results
    finally:
        for buffer in buffers:
            buffer.free()


def references_of(
    layer: nn.Module,
    value: Tensor,
    captured: Captured,
    given: Mapping[Role, Sequence[Tensor]],
) -> tuple[Results, Results]:
    """What float64 and float32 give, by role and index."""
    if captured.forward.draws or (captured.backward is not None and captured.backward.draws):
        native = capture(CaptureRequest(layer, [value], "sample", strides=False))
        found = on_the_cpu(native, given_to(layer, native, [value]))
        return found, found
    single = by_port(layer, value, captured, given)
    try:
        double = by_port(copy.deepcopy(layer).double(), value.detach().double().requires_grad_(), captured, given)
    except RuntimeError:  # an argument that stays float32, or an op without a kernel for float64
        double = single
    if any(first.shape != second.shape for first, second in zip(double.values(), single.values(), strict=False)):
        double = single
    return double, single


def on_the_cpu(captured: Captured, given: Mapping[Role, Sequence[Tensor]]) -> Results:
    device = registry.open("cpu")
    try:
        found = run(device, captured.forward, device.compile(captured.forward), given)
        if captured.backward is not None:
            saved = [found[Role.VALUE, port.index] for port in captured.saved]
            taken = {**given, Role.VALUE: [*given[Role.VALUE], *saved]}
            found.update(run(device, captured.backward, device.compile(captured.backward), taken))
        return found
    finally:
        device.close()


def by_port(layer: nn.Module, value: Tensor, captured: Captured, given: Mapping[Role, Sequence[Tensor]]) -> Results:
    """Outputs, new buffers and gradients of eager PyTorch, by role and index."""
    layer = copy.deepcopy(layer)
    outputs = layer(value)
    found: Results = {}
    for index, output in enumerate(outputs):
        found[Role.VALUE, index] = output.detach()
    for index, name in enumerate(captured.buffer_names):
        found[Role.BUFFER_UPDATE, index] = layer.get_buffer(name).detach()
    if captured.backward is None:
        return found
    ports = [port for port in captured.backward.inputs if port.role is Role.SEED]
    seeds = [given[Role.SEED][port.index].to(outputs[port.index].dtype) for port in ports]
    parameters = [layer.get_parameter(names[0]) for names in captured.parameter_names]
    gradients = torch.autograd.grad(
        [outputs[port.index] for port in ports], [*parameters, value], seeds, allow_unused=True
    )
    roles = [(Role.PARAMETER_GRADIENT, index) for index in range(len(parameters))] + [(Role.VALUE_GRADIENT, 0)]
    for port, gradient in zip(roles, gradients, strict=True):
        if gradient is not None:
            found[port] = gradient.detach()
    return found


def difference(found: Tensor, double: Tensor | None, single: Tensor | None) -> str:
    """What is wrong with a result, in words; empty where nothing is."""
    if double is None or single is None:
        return "" if not found.to(torch.float64).abs().sum() else "is not zero, where PyTorch has no gradient"
    if found.numel() != double.numel():
        return f"is of {tuple(found.shape)}, not {tuple(double.shape)}"
    if not found.is_floating_point():
        return "" if torch.equal(found.reshape(-1), single.to(found.dtype).reshape(-1)) else "differs in whole numbers"
    mine, wanted = (tensor.to_dense().to(torch.float64).reshape(-1) for tensor in (found, double))
    alone = single.to_dense().to(torch.float64).reshape(-1)
    finite = wanted.isfinite() & alone.isfinite()
    if not torch.equal(torch.where(finite, 0.0, mine).nan_to_num(), torch.where(finite, 0.0, alone).nan_to_num()):
        return "is not infinite or NaN where PyTorch's is"
    mine, wanted, alone = mine[finite], wanted[finite], alone[finite]
    if not mine.numel():
        return ""
    allowed = NEAR * (wanted.abs() + wanted.abs().max() / 50) + FAR * (alone - wanted).abs() + 1e-30
    worst = int(((mine - wanted).abs() - allowed).nan_to_num(math.inf).argmax())
    if (mine - wanted).abs()[worst] <= allowed[worst]:
        return ""
    return f"is {mine[worst].item()!r} where float64 gives {wanted[worst].item()!r} and float32 {alone[worst].item()!r}"
