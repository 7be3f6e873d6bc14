"""Programs for CUDA hold the ops that PyTorch would run there, traced with fake CUDA tensors on any machine."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest
import torch
from torch import nn

from relay.capture import CaptureRequest, capture
from tests.support.stubs import fake_cuda

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not fake_cuda.compiler() or torch.version.cuda is not None,
    reason="the stand-in is C++, preloaded on Linux, for a PyTorch built without CUDA",
)

FUSED = {
    "flash": "aten._scaled_dot_product_flash_attention",
    "efficient": "aten._scaled_dot_product_efficient_attention",
    "cudnn": "aten._scaled_dot_product_cudnn_attention",
}


@pytest.fixture(scope="module")
def found(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    kept = pytestconfig.cache.mkdir("fake_cuda") if pytestconfig.pluginmanager.hasplugin("cacheprovider") else None
    try:
        return fake_cuda.run(kept or tmp_path_factory.mktemp("fake_cuda"))
    except fake_cuda.Unbuildable as failure:
        if torch.__version__.startswith(fake_cuda.WRITTEN_FOR):
            raise
        pytest.skip(f"the stand-in was written for PyTorch {fake_cuda.WRITTEN_FOR}: {failure}")


@pytest.mark.parametrize("which", sorted(FUSED))
def test_attention_is_the_kernel_that_the_device_prefers(found: dict[str, Any], which: str) -> None:
    for program in found[which].values():
        assert f"{FUSED[which]}.default" in program["ops"]
        assert not [name for name in program["ops"] if "softmax" in name or "for_cpu" in name or "mkldnn" in name]
        assert program["devices"] == ["cuda"]
    assert f"{FUSED[which]}_backward.default" in found[which]["backward"]["ops"]


@pytest.mark.parametrize("which", sorted(FUSED))
def test_fused_attention_counts_the_operations_of_the_one_on_the_cpu(found: dict[str, Any], which: str) -> None:
    for kind, program in found[which].items():
        assert program["flops"] == found["on the cpu"][kind]["flops"] > 0


def test_attention_that_drops_keeps_our_masks(found: dict[str, Any]) -> None:
    for kind, program in found["dropout"].items():
        assert program["devices"] == ["cuda"]
        assert program["draws"]
        masks = program["ops"].count("hal.random.keep_mask")
        assert masks == found["dropout on the cpu"][kind]["ops"].count("hal.random.keep_mask") > 0
        assert not [name for name in program["ops"] if "dot_product" in name]


@pytest.mark.parametrize("which", ["kept", "kept, efficient"])
def test_a_segment_that_keeps_runs_its_attention_once_and_keeps_no_seeds(found: dict[str, Any], which: str) -> None:
    forward, backward = found[which]["forward"], found[which]["backward"]
    fused = [name for name in forward["ops"] if "dot_product" in name]
    assert len(fused) == 1
    assert fused[0] not in backward["ops"]
    assert forward["ports"] == backward["ports"] == ["torch.float32"]
    assert len(forward["roles"]) > 3


def test_batch_norm_changes_its_statistics_in_the_forward_alone(found: dict[str, Any]) -> None:
    forward, backward = found["batch norm"]["forward"], found["batch norm"]["backward"]
    assert forward["roles"].count("buffer update") == 3
    assert "buffer update" not in backward["roles"]
    assert forward["devices"] == backward["devices"] == ["cuda"]


def test_autocast_is_that_of_the_device(found: dict[str, Any]) -> None:
    """CUDA's list runs layer norm in float32, whose result the CPU's leaves in bfloat16 where its input is that."""
    on_cuda, on_cpu = found["bf16"]["forward"], found["bf16 on the cpu"]["forward"]
    assert "torch.bfloat16" in on_cuda["dtypes"]
    assert f"{FUSED['flash']}.default" in on_cuda["ops"]
    assert on_cuda["dtypes"].count("torch.float32") >= on_cpu["dtypes"].count("torch.float32")


def test_what_a_layer_makes_itself_is_made_on_the_device(found: dict[str, Any]) -> None:
    for program in found["positions"].values():
        assert program["devices"] == ["cuda"]


def test_layers_for_calibration_are_captured_for_the_device(found: dict[str, Any]) -> None:
    program = found["shape"]["backward"]
    assert f"{FUSED['flash']}_backward.default" in program["ops"]
    assert program["devices"] == ["cuda"]


def test_all_programs_of_a_model_are_for_the_device(found: dict[str, Any]) -> None:
    assert f"{FUSED['flash']}_backward.default" in found["model"]
    assert [name for name in found["model"] if name.startswith("on ")] == ["on cuda"]
    assert not [name for name in found["model"] if "cpu" in name or "mkldnn" in name]
    assert found["said before"] == []


def test_a_layer_that_cannot_be_traced_there_has_portable_programs_and_a_reason(found: dict[str, Any]) -> None:
    for program in found["keeps its own"].values():
        assert not [name for name in program["ops"] if "dot_product" in name]
    (reason,) = found["said"]
    assert "layer" in reason
    assert "cuda:0" in reason


def test_a_device_that_pytorch_does_not_find_has_portable_programs_and_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (nn.functional.scaled_dot_product_attention(x, x, x),)

    for name in ("cuda:0", "fpga"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "relay"):
            example = torch.zeros(1, 2, 4, 8, requires_grad=True)
            program = capture(CaptureRequest(Attention(), [example], "attends", device=torch.device(name))).forward
        assert [name for node in program.graph.nodes for name in [str(node.target)] if "softmax" in name]
        assert "attends" in caplog.text
        assert name in caplog.text
