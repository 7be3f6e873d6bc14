"""Draws by one Triton kernel: the bits of the contract in Triton's interpreter, and code for cards without one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from backends.torch_device import random as device_random
from hal import random as counter_random
from hal.random import RandomKey

ROOT = Path(__file__).resolve().parents[3]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which CUDA builds of PyTorch bring"
)
KEY = RandomKey(2**64 - 3, 2**32 - 1, 5, 7)

INTERPRETED = """
import torch
from backends.torch_device import triton_random as fused
from hal import random
from hal.random import RandomKey

cpu = torch.device("cpu")
for key in (RandomKey(2**64 - 3, 2**32 - 1, 2**20 - 1, 7), RandomKey(1, 0, 0, 0), RandomKey(5, 1, 1, 2**31)):
    for shape in ((), (1,), (5,), (0, 3), (3, 1000), (4097,)):
        for probability in (0.0, 0.1, 0.5, 1.0):
            mask = fused.keep_mask(key, 3, shape, probability, cpu)
            assert torch.equal(mask, random.keep_mask(key, 3, shape, probability)), (key, shape, probability)
        assert torch.equal(fused.uniform(key, 2, shape, cpu), random.uniform(key, 2, shape)), (key, shape)
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import triton
from backends.torch_device import triton_random as fused

for capability in (75, 80, 90):
    for kernel, pointer in ((fused.write_mask, "*i1"), (fused.write_uniform, "*fp32")):
        signature = {name: "i32" for name in kernel.arg_names} | {"made": pointer, "BLOCKS": "constexpr"}
        source = ASTSource(kernel, signature=signature, constexprs={"BLOCKS": fused.BLOCKS})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        assert compiled.asm["cubin"], capability
"""


def run(script: str, folder: Path, **environment: str) -> None:
    """A process of its own: Triton reads its settings as it is imported."""
    given = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(folder), **environment}
    done = subprocess.run([sys.executable, "-c", script], env=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@needs_triton
def test_a_kernel_of_triton_draws_the_bits_of_the_contract(tmp_path: Path) -> None:
    run(INTERPRETED, tmp_path, TRITON_INTERPRET="1")


@needs_triton
def test_the_kernels_compile_for_cards_that_are_not_here(tmp_path: Path) -> None:
    run(COMPILED, tmp_path)


class Card:
    """Something whose type is that of CUDA's devices, on which PyTorch makes tensors of the CPU."""

    type = "cuda"


def stand_in(monkeypatch: pytest.MonkeyPatch, mask: object) -> None:
    monkeypatch.setattr(device_random, "_fused", lambda: SimpleNamespace(keep_mask=mask, uniform=mask))
    monkeypatch.setattr(device_random, "_failed", [])
    drawn = device_random._drawn
    monkeypatch.setattr(device_random, "_drawn", lambda *given: drawn(*given[:-1], torch.device("cpu")))


def test_on_cuda_a_draw_is_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, lambda key, number, shape, *rest: counter_random.keep_mask(key, number, shape, 0.25))
    monkeypatch.setattr(device_random, "_drawn", None)
    for draw in (device_random.keep_mask, device_random.uniform):
        found = draw(KEY, 3, (5, 7), *((0.25,) if draw is device_random.keep_mask else ()), Card())  # type: ignore[operator]
        assert torch.equal(found, counter_random.keep_mask(KEY, 3, (5, 7), 0.25))


def test_where_triton_fails_the_same_bits_are_drawn_without_it_and_that_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    def fails(*given: object) -> torch.Tensor:
        tried.append(1)
        raise RuntimeError("no C compiler\nwas found")

    stand_in(monkeypatch, fails)
    for _ in range(3):
        found = device_random.keep_mask(KEY, 3, (5, 7), 0.25, Card())  # type: ignore[arg-type]
        assert torch.equal(found, counter_random.keep_mask(KEY, 3, (5, 7), 0.25))
    assert tried == [1]
    assert caplog.text.count("no C compiler") == 1


def test_a_card_that_fails_in_a_draw_is_no_reason_to_draw_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    stand_in(monkeypatch, fails)
    with pytest.raises(torch.AcceleratorError):
        device_random.keep_mask(KEY, 3, (5, 7), 0.25, Card())  # type: ignore[arg-type]
