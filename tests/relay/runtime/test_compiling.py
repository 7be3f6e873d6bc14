"""Compiling is paid once: by the first of layers that are alike, and by the first process where the driver keeps it."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import relay
from hal import registry
from hal.program import Program
from relay.models import GPT
from relay.runtime.compiling import capture_segments
from tests.support import devices, reference


def compiled(device_name: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What a step of a model with that many layers captures and compiles."""
    counts: Counter[str] = Counter()
    kernels: dict[int, Any] = {}
    opened: list[Any] = []

    def counting(what: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return function(*args, **kwargs)

        return counted

    def open_counting(name: str, capacity: int | None = None) -> Any:
        device: Any = original_open(name, capacity)
        compile_one = device.compile

        def compile_counting(program: Program) -> Any:
            kernel = compile_one(program)
            kernels[id(kernel)] = kernel
            return kernel

        device.compile = compile_counting
        opened.append(device)
        return device

    original_open = registry.open
    with monkeypatch.context() as patch:
        patch.setattr(registry, "open", open_counting)
        patch.setattr(capture_segments, "capture", counting("captures", capture_segments.capture))
        if device_name == "onnx:cpu":
            from backends.onnx import device as onnx_device

            patch.setattr(onnx_device, "Session", counting("sessions", onnx_device.Session))
        torch.manual_seed(0)
        model = GPT(vocabulary=32, layers=layers, hidden=8, heads=1, sequence=4, tied=False)
        trainer = relay.Trainer(model, device=device_name, microbatches=2)
        trainer.step(reference.text_batches(1, batch=4, length=4, vocabulary=32)[0])
        if device_name == "opencl":
            counts["built by the driver"] = opened[0].library.built
        trainer.close()
    counts["kernels"] = len(kernels)
    return counts


@pytest.mark.parametrize("device", ["cpu", "opencl", "onnx:cpu", "numpy", "sim"])
@pytest.mark.sample("cpu")
def test_a_model_of_48_layers_compiles_what_one_of_3_does(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.require(device)
    few = compiled(device, 3, monkeypatch)
    assert few["captures"] == 3  # the embedding, a layer, the head with the loss
    assert 0 < few["kernels"] <= 7
    assert compiled(device, 48, monkeypatch) == few


TRIAL = """
import torch
from hal import registry
from hal.kit.program_builder import GraphBuilder, run

device = registry.open("opencl")
builder = GraphBuilder("trial")
x, y = builder.input((8, 24)), builder.input((24, 40))
product = builder.call("aten.mm.default", x, y)
rows = builder.call("aten._softmax.default", builder.call("aten.mul.Scalar", product, 0.5), 1, False)
total = builder.call("aten.sum.dim_IntList", builder.call("aten.exp.default", product), [0], False)
run(device, builder.program([rows, total]), [torch.ones(8, 24), torch.ones(24, 40)])
print(device.library.built)
device.close()
"""


def test_a_second_process_finds_opencl_kernels_in_the_drivers_cache(tmp_path: Path) -> None:
    """Kernels are the same text in every process, whatever the seed of its hashes, so what was compiled is found."""
    devices.require("opencl")

    def written_after(hash_seed: int) -> set[tuple[str, int]]:
        folders = {"POCL_CACHE_DIR": str(tmp_path / "pocl"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        environment = {**os.environ, **folders, "PYTHONHASHSEED": str(hash_seed)}
        words = [sys.executable, "-c", TRIAL]
        result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stderr[-2000:]
        assert int(result.stdout) > 3
        # Binaries, whether PoCL keeps them itself or pyopencl does for other drivers.
        return {
            (str(file.relative_to(tmp_path)), file.stat().st_mtime_ns)
            for file in tmp_path.rglob("*")
            if file.suffix in (".so", ".bc") or file.name == "binary"
        }

    first = written_after(1)
    assert first
    assert written_after(2) == first
