"""Described diffusion transformers are those of diffusers, to the parameter."""

from typing import Any

import pytest
import torch

import relay
from relay.simulation.described import diffusion
from relay.simulation.described.diffusion import DIFFUSION_MODELS, DiffusionShape, DiffusionTransformer
from relay.simulation.described.transformer_shape import ShapeError

WAN: dict[str, Any] = {"num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "flux.1-dev": ("FluxTransformer2DModel", {"guidance_embeds": True}),
    "flux.1-schnell": ("FluxTransformer2DModel", {}),
    "qwen-image": ("QwenImageTransformer2DModel", {"num_layers": 60}),
    "wan-2.1-1.3b": ("WanTransformer3DModel", {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}),
    "wan-2.1-14b": ("WanTransformer3DModel", WAN),
}


def test_every_described_model_has_the_parameters_of_its_class_in_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    assert PUBLISHED.keys() == DIFFUSION_MODELS.keys()
    for name, (kind, options) in PUBLISHED.items():
        with torch.device("meta"):
            theirs = getattr(diffusers, kind)(**options)
            ours = DiffusionTransformer(DIFFUSION_MODELS[name])
        counts = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
        assert counts[0] == counts[1], name


@pytest.mark.parametrize(
    "shape",
    [
        DiffusionShape(2, 16, double=2, single=2, pooled=8, guided=True, patches=64, head_size=8, text_tokens=8),
        DiffusionShape(2, 16, crossed=2, ffn=64, patches=64, sample="videos", head_size=8, text_tokens=8),
    ],
    ids=["flux", "wan"],
)
def test_a_diffusion_transformer_is_simulated_by_samples(
    shape: DiffusionShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(diffusion.DIFFUSION_MODELS, "small", shape)
    found = relay.simulate("small", batch=2, device="h200-sxm")
    assert found.unit == shape.sample.partition(" ")[0]
    assert found.units == 2
    assert f"{shape.patches} patches and 8 tokens of text" in found.notes[0]
    longer = relay.simulate("small", batch=2, seq=128, device="h200-sxm")
    assert longer.shape.model_flops(1) > found.shape.model_flops(1)
    # Of every matrix 6 FLOPs a parameter and row of its stream; attention and what meets one row a sample aside
    count = found.memory.parameters
    assert found.shape.model_flops(1) < 1.5 * 6 * count * (shape.patches + shape.text_tokens)
    with pytest.raises(ShapeError, match="adapters are for a model"):
        relay.simulate("small", lora=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_diffusion_transformer_is_simulated(name: str) -> None:
    found = relay.simulate(name, batch=1, device="h200-sxm", host_memory="2TB", stash="host")
    assert found.fits
    assert 0 < found.mfu.middle < 1
