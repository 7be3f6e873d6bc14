"""Captured programs on the CPU devices: the bits of eager torch and of its autograd."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hal.device import Device, KernelCall, View
from hal.program import Program, Role
from hal.random import RandomKey
from relay.capture import CaptureRequest, capture
from tests.support.cpu_devices import NAMES, fetch, opened, same_bits, upload
from tests.support.device_programs import (
    MODULES,
    Attention,
    Tuple,
    captured_from,
    module_and_inputs,
    numbers,
    run_program,
)


@pytest.mark.parametrize("which", MODULES)
def test_a_captured_forward_gives_the_bits_of_eager_torch(device: Device, which: str) -> None:
    module, inputs = module_and_inputs(which)
    found = run_program(device, captured_from(which).forward, module, inputs)
    expected = module(*inputs)
    for index, value in enumerate(expected):
        assert same_bits(found[Role.VALUE, index], value.detach()), f"output {index}"
    for index, (name, buffer) in enumerate(module.named_buffers()):
        if (Role.BUFFER_UPDATE, index) in found:
            assert same_bits(found[Role.BUFFER_UPDATE, index], buffer), name


@pytest.mark.parametrize("keep", [False, True], ids=["recomputing", "keeping"])
@pytest.mark.parametrize("which", [which for which in MODULES if which != "aliasing outputs"])
@pytest.mark.sample(3)
def test_a_captured_backward_gives_the_bits_of_eager_autograd(device: Device, which: str, keep: bool) -> None:
    module, inputs = module_and_inputs(which)
    captured = captured_from(which, keep)
    program = captured.backward
    assert program is not None
    forward = run_program(device, captured.forward, module_and_inputs(which)[0], inputs)
    saved = [forward[Role.VALUE, port.index] for port in captured.saved]
    seeds = [numbers(*value.shape).to(value.dtype) for value in module_and_inputs(which)[0](*inputs)]
    found = run_program(device, program, module, [*inputs, *saved], seeds)
    module, inputs = module_and_inputs(which)
    differentiable = [(value, seed) for value, seed in zip(module(*inputs), seeds, strict=True) if value.requires_grad]
    torch.autograd.backward([value for value, _ in differentiable], [seed for _, seed in differentiable])
    for index, parameter in enumerate(module.parameters()):
        assert same_bits(found[Role.PARAMETER_GRADIENT, index], parameter.grad), f"parameter {index}"
    for index, tensor in enumerate(inputs):
        if tensor.requires_grad:
            assert same_bits(found[Role.VALUE_GRADIENT, index], tensor.grad), f"input {index}"


def linear_backward(device: Device) -> tuple[Program, list[View], list[torch.Tensor]]:
    """A program with two gradients, its inputs on the device, and the gradients as torch has them."""
    module, inputs = module_and_inputs("linear")
    inputs[0].requires_grad_(False)
    program = capture(CaptureRequest(module, inputs, "linear")).backward
    assert program is not None
    seed = numbers(7, 3)
    given = [*module.parameters(), *inputs, seed]
    module(*inputs)[0].backward(seed)
    return program, [upload(device, tensor) for tensor in given], [parameter.grad for parameter in module.parameters()]


def test_accumulating_adds_to_what_is_there_and_replacing_does_not(device: Device) -> None:
    program, inputs, gradients = linear_backward(device)
    assert all(port.accumulates for port in program.outputs)
    for pattern in [(True, True), (True, False), (False, True), (False, False), ()]:
        previous = [numbers(3, 5) + 2, numbers(3)]
        outputs = [upload(device, tensor) for tensor in previous]
        device.queue("compute").run(KernelCall(device.compile(program), inputs, outputs, pattern)).wait()
        for position, (before, gradient) in enumerate(zip(previous, gradients, strict=True)):
            expected = before + gradient if pattern and pattern[position] else gradient
            assert same_bits(fetch(device, outputs[position]), expected), f"output {position} under {pattern}"


def test_wrong_counts_of_inputs_outputs_or_accumulations_are_value_errors(device: Device) -> None:
    program, inputs, gradients = linear_backward(device)
    outputs = [upload(device, gradient) for gradient in gradients]
    kernel, queue = device.compile(program), device.queue("compute")
    for wrong in (inputs[:-1], [*inputs, inputs[0]], []):
        with pytest.raises(ValueError, match=f"takes 4 inputs and 2 outputs, got {len(wrong)} and 2"):
            queue.run(KernelCall(kernel, wrong, outputs))
    for wrong in (outputs[:1], [*outputs, outputs[0]], []):
        with pytest.raises(ValueError, match=f"takes 4 inputs and 2 outputs, got 4 and {len(wrong)}"):
            queue.run(KernelCall(kernel, inputs, wrong))
    for pattern in ((True,), (True, True, True)):
        with pytest.raises(ValueError, match="accumulate"):
            queue.run(KernelCall(kernel, inputs, outputs, pattern))


def test_a_program_that_draws_needs_a_key(device: Device) -> None:
    module, inputs = Tuple(nn.Dropout(0.5)), [numbers(50)]
    program = capture(CaptureRequest(module, inputs, "dropout")).forward
    assert program.draws
    with pytest.raises(ValueError, match="without a key"):
        run_program(device, program, module, inputs)


def test_one_key_draws_the_same_numbers_on_every_device_and_another_key_others() -> None:
    module, inputs = Tuple(nn.Dropout(0.25)), [numbers(1000)]
    program = capture(CaptureRequest(module, inputs, "dropout")).forward
    results = {}
    for name in NAMES:
        with opened(name) as device:
            for step in (1, 2):
                key = RandomKey(5, step, 0, 0)
                results[name, step] = run_program(device, program, module, inputs, key=key)[Role.VALUE, 0]
    assert same_bits(results["cpu", 1], results["cpu:discrete", 1])
    assert same_bits(results["cpu", 2], results["cpu:discrete", 2])
    assert not torch.equal(results["cpu", 1], results["cpu", 2])
    saved = results["cpu", 1] != 0
    assert torch.equal(results["cpu", 1], torch.where(saved, inputs[0] * (1 / 0.75), 0.0))


def test_the_same_fingerprint_gives_the_same_kernel(device: Device) -> None:
    module, inputs = module_and_inputs("attention")
    other = Attention()
    first, second = (
        capture(CaptureRequest(module, inputs, "layer 0")).forward,
        capture(CaptureRequest(other, inputs, "layer 1")).forward,
    )
    assert first is not second
    assert first.fingerprint == second.fingerprint
    assert device.compile(first) is device.compile(second) is device.compile(first)
    backward = capture(CaptureRequest(module, inputs, "layer 0")).backward
    assert backward is not None
    assert device.compile(backward) is not device.compile(first)


def test_the_same_kernel_serves_every_layer_built_alike(device: Device) -> None:
    first, inputs = module_and_inputs("attention")
    program = capture(CaptureRequest(first, inputs, "layer")).forward
    for module in (first, Attention(), Attention()):
        found = run_program(device, program, module, inputs)[Role.VALUE, 0]
        assert same_bits(found, module(*inputs)[0].detach())
