"""Sections of `benchmarks/gpu.py` about what is right. A section raises where something is wrong.

Equality is with plain PyTorch doing the same micro-batches on the same device, its gradients brought to the host and
applied there by torch.optim, as the relay's are: then every bit must agree, with deterministic kernels.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_settings import DTYPES, Setting, make_model, plain_gradients, random_batches

import relay
from hal import registry
from hal.device import Device
from hal.errors import Unavailable
from hal.ops import calls, name_of
from hal.program import Kernel, Program

ROOT = Path(__file__).resolve().parent.parent


def attention_used(setting: Setting) -> dict[str, Any]:
    """Which attention the programs of a GPT hold on this device: a fused kernel of the device's own."""
    names: set[str] = set()
    tags: set[str] = set()
    plain_open = registry.open

    def listening(name: str, capacity: int | None = None) -> Device:
        device = plain_open(name, capacity)
        compiled = device.compile

        def compile_and_note(program: Program) -> Kernel:
            names.update(name_of(node.target) for node in calls(program.graph))
            return compiled(program)

        device.compile = compile_and_note  # type: ignore[method-assign]
        tags.update(device.info.tags)
        return device

    registry.open = listening
    try:
        for precision in DTYPES:
            with relay.Trainer(make_model(2, 128, 64), device=setting.device, precision=precision) as trainer:
                trainer.prepare(random_batches(1, 4, 64)[0])
    finally:
        registry.open = plain_open
    attention = sorted(name for name in names if "dot_product" in name)
    if "native" in tags and not attention:
        raise AssertionError(f"no fused attention among {sorted(names)}")
    return {"attention": attention, "tags": sorted(tags)}


def equal_to_plain(setting: Setting, precision: str) -> dict[str, Any]:
    """10 steps of SGD with momentum: losses and parameters against plain PyTorch on the device, to the bit."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    layers, hidden, sequence = setting.pick((6, 256, 128), (2, 64, 16))
    model, torch_device = make_model(layers, hidden, sequence), setting.torch_device
    batches = random_batches(setting.pick(10, 2), 10, sequence)
    plain, twin = copy.deepcopy(model).to(torch_device), copy.deepcopy(model)
    rule = {"lr": 0.05, "momentum": 0.9}
    optimizer = torch.optim.SGD(twin.parameters(), **rule)
    expected = []
    for batch in batches:
        expected.append(plain_gradients(plain, batch, 4, torch_device, DTYPES[precision]))
        for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is not None
            ours.grad, theirs.grad = theirs.grad.cpu(), None
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
                theirs.copy_(ours)
    with relay.Trainer(
        model, device=setting.device, microbatches=4, precision=precision, optimizer=relay.SGD(**rule)
    ) as trainer:
        losses = [trainer.step(batch).loss for batch in batches]
        state = trainer.state_dict()
    torch.use_deterministic_algorithms(False)
    apart = {name: float((state[name] - tensor).abs().max()) for name, tensor in twin.state_dict().items()}
    found = {
        "equal": all(torch.equal(state[name], tensor) for name, tensor in twin.state_dict().items()),
        "losses apart": max(abs(one - other) for one, other in zip(losses, expected, strict=True)),
        "parameters apart": max(apart.values()),
        "losses": losses,
    }
    if not found["equal"] or losses != expected:
        raise AssertionError(f"not equal: {json.dumps(found)}; apart in {[name for name in apart if apart[name]]}")
    return found


def close_to_plain(setting: Setting) -> dict[str, Any]:
    """Clipping with the stash on the host, and dropout: losses against plain PyTorch, and against the CPU's masks."""
    layers, hidden, sequence = setting.pick((6, 256, 128), (2, 64, 16))
    torch_device, batches = setting.torch_device, random_batches(setting.pick(10, 2), 10, sequence)
    model = make_model(layers, hidden, sequence)
    plain = copy.deepcopy(model).to(torch_device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)
    expected = []
    for batch in batches:
        expected.append(plain_gradients(plain, batch, 4, torch_device, torch.float32))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    options: dict[str, Any] = {"microbatches": 4, "optimizer": relay.AdamW(lr=1e-3, weight_decay=0.01)}
    with relay.Trainer(model, device=setting.device, stash="host", clip_grad_norm=0.5, **options) as trainer:
        losses = [trainer.step(batch).loss for batch in batches]
    dropped = {}
    for device in (setting.device, "cpu"):
        with relay.Trainer(make_model(2, hidden, sequence, 0.2), device=device, seed=7, **options) as trainer:
            dropped[device] = [trainer.step(batch).loss for batch in batches[:3]]
    clipped_apart = max(abs(one / other - 1) for one, other in zip(losses, expected, strict=True))
    dropout_apart = max(
        abs(one / other - 1) for one, other in zip(dropped[setting.device], dropped["cpu"], strict=True)
    )
    found = {"clipped, relative": clipped_apart, "dropout against the cpu's, relative": dropout_apart}
    if clipped_apart > 1e-3 or dropout_apart > 1e-3:
        raise AssertionError(f"too far apart: {found}")
    return found


def conformance(device: str) -> Callable[[Setting], dict[str, Any]]:
    """The conformance suite on a device (empty: the one that is asked for)."""

    def run(setting: Setting) -> dict[str, Any]:
        name = device or setting.device
        try:
            registry.open(name).close()
        except Unavailable as failure:
            return {"not here": str(failure)}
        words = [sys.executable, "-m", "relay", "conformance", name, "--json"]
        answer = json.loads(subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout)
        if not answer["conforms"]:
            raise AssertionError(json.dumps(answer)[-3000:])
        return {key: value for key, value in answer.items() if isinstance(value, (bool, int, float, str))}

    return run


def gpu_tests(setting: Setting) -> dict[str, Any]:
    """The tests of the suite that need a GPU."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    marked = [str(path) for path in files if "mark.gpu" in path.read_text("utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "gpu", *marked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 5):
        raise AssertionError(done.stdout[-3000:])
    return {"pytest": done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""}
