"""Captures for CUDA on a machine without it: over `fake_cuda.cpp`, PyTorch's CPU build traces fake CUDA tensors.

Run as a script it prints, as JSON, what the programs of some segments hold. What a real device would choose (flash
attention or not) is what the stand-in says; that the choice reaches the graph, and what becomes of it there, is real.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import relay
from backends.torch_device.device import TorchDevice
from hal import registry
from hal.ops import calls, name_of
from hal.program import Kernel, Program
from relay.capture import CaptureRequest, capture
from relay.models import GPT
from relay.simulation.described.transformer_shape import ModelShape, compiled_model_of

WRITTEN_FOR = "2.13"
"""The PyTorch in which the stand-in must compile."""

HERE = Path(__file__).resolve().parent
CUDA = torch.device("cuda:0")


class Unbuildable(Exception):
    """The stand-in uses PyTorch's C++, which differs from version to version, and does not compile here."""


def compiler() -> str:
    """A C++ compiler, or an empty string."""
    return shutil.which("c++") or shutil.which("g++") or ""


def run(folder: Path) -> dict[str, Any]:
    """Run this file with the stand-in, and read what it prints. What is built stays in that folder for the next run."""
    root = Path(torch.__file__).parent
    paths = {"LD_LIBRARY_PATH": str(root / "lib"), "PYTHONPATH": str(HERE.parents[2])}
    environment = {**os.environ, "LD_PRELOAD": str(_built(folder, root)), **paths}
    answer = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if answer.returncode:
        raise AssertionError(answer.stderr[-4000:])
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def _built(folder: Path, root: Path) -> Path:
    """The library in that folder, compiled against the PyTorch at `root` unless it is there from this very source."""
    source = HERE / "fake_cuda.cpp"
    built_from = source.read_bytes() + f"{torch.__version__} {root} {compiler()}".encode()
    library = folder / f"fake_cuda-{hashlib.sha256(built_from).hexdigest()[:16]}.so"
    if library.exists():
        return library
    part = library.with_suffix(f".{os.getpid()}")
    includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    command = [compiler(), "-std=c++20", "-O0", "-shared", "-fPIC", *includes, str(source)]
    command += ["-o", str(part), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unbuildable(done.stderr[-4000:])
    part.replace(library)
    return library


class Of(nn.Module):
    """A module as a segment: its outputs in a tuple."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.inner(*values),)


class Positions(nn.Module):
    """Makes tensors of its own, on the device of what it is given, on the CPU by name, and on the default device."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[-1], device=x.device) + torch.arange(x.shape[-1], device="cpu")
        return x * positions * torch.ones(x.shape[-1])


class KeepsItsOwn(nn.Module):
    """Holds a tensor that is neither parameter nor buffer, which a trace for another device cannot move."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.scale = torch.ones(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1)
        attended = nn.functional.scaled_dot_product_attention(x, x, x)
        return torch.as_tensor(self.linear(attended) * self.scale)


def encoder(dropout: float) -> nn.Module:
    return nn.TransformerEncoderLayer(32, 2, 64, dropout=dropout, batch_first=True)


def describe(program: Program) -> dict[str, Any]:
    """What a program holds, by name, and where."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    values = [node.meta.get("val") for node in program.graph.nodes]
    devices = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    devices |= {str(torch.device(node.kwargs["device"]).type) for node in nodes if node.kwargs.get("device")}
    return {
        "ops": [name_of(node.target) for node in calls(program.graph)],
        "devices": sorted(devices - {"meta"}),
        "draws": program.draws,
        "flops": program.flops,
        "roles": [port.role.value for port in program.outputs],
        "ports": sorted({str(port.dtype) for port in (*program.inputs, *program.outputs)}),
        "dtypes": [str(node.meta["val"].dtype) for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)],
    }


def both(
    module: nn.Module, preferred: int, device: torch.device = CUDA, bf16: bool = False, save: bool = False
) -> dict[str, Any]:
    """The forward and the backward of a module over (2, 16, 32), where attention prefers that kernel."""
    os.environ["RELAY_FAKE_SDPA"] = str(preferred)
    compute = torch.bfloat16 if bf16 else torch.float32
    example = torch.zeros(2, 16, 32, requires_grad=True)
    captured = capture(CaptureRequest(Of(module), [example], "layer", compute_dtype=compute, device=device, save=save))
    assert captured.backward is not None
    return {"forward": describe(captured.forward), "backward": describe(captured.backward)}


def whole_model() -> list[str]:
    """The ops of all programs of a GPT that a trainer prepares for a device which says it is CUDA."""
    from tests.support.stubs.stub_accelerator import StubAccelerator

    names: set[str] = set()

    class OnCuda(StubAccelerator):
        def traced_for(self) -> str:
            return "cuda:0"

    class Listening(TorchDevice):
        def compile(self, program: Program) -> Kernel:
            names.update(describe(program)["ops"])
            names.update(f"on {kind}" for kind in describe(program)["devices"])
            return super().compile(program)

    registry.open = lambda name, capacity=None: Listening("stub:0", OnCuda(), capacity)
    trainer = relay.Trainer(GPT(layers=2, hidden=16, heads=2, sequence=8, dropout=0.1), device="stub:0", microbatches=1)
    ids = torch.randint(0, 256, (2, 8))
    trainer.prepare({"input_ids": ids, "labels": ids})
    trainer.close()
    return sorted(names)


def of_a_shape() -> dict[str, Any]:
    """The backward of a layer of a model that is only numbers, as calibration captures it."""
    compiled = compiled_model_of(ModelShape(2, 32, 2, 64), 2, 16, torch.float32, traced_for=CUDA).stages
    assert compiled[1].backward is not None
    return describe(compiled[1].backward.program)


def main() -> None:
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("relay").addHandler(handler)
    heard: list[str] = []
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    ctypes.CDLL(None).fake_cuda()
    importlib.import_module("relay.capture.capture").missing = lambda device: ""  # type: ignore[assignment]
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_: True
    torch.cuda.device = contextlib.nullcontext  # type: ignore[misc,assignment]
    torch.manual_seed(0)
    block = GPT(layers=1, hidden=32, heads=2, sequence=16).blocks[0]
    found: dict[str, Any] = {
        "flash": both(block, 1),
        "efficient": both(block, 2),
        "cudnn": both(block, 3),
        "on the cpu": both(block, 1, torch.device("cpu")),
        "kept": both(block, 1, save=True),
        "kept, efficient": both(block, 2, save=True),
        "dropout": both(encoder(0.3), 1),
        "dropout on the cpu": both(encoder(0.3), 1, torch.device("cpu")),
        "batch norm": both(nn.Sequential(nn.Conv1d(16, 16, 3), nn.BatchNorm1d(16)), 1),
        "rms norm": both(nn.RMSNorm(32), 1),
        "bf16": both(encoder(0.0), 1, bf16=True),
        "bf16 on the cpu": both(encoder(0.0), 1, torch.device("cpu"), bf16=True),
        "positions": both(Positions(), 1),
        "shape": {"backward": of_a_shape()},
        "model": whole_model(),
    }
    found["said before"] = list(heard)
    found["keeps its own"] = both(KeepsItsOwn(), 1)
    found["said"] = heard[len(found["said before"]) :]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
