"""Diffusion transformers described by their sizes: FLUX, Qwen-Image and Wan, on torch's meta device.

Sizes and parts are those of the configurations and classes in diffusers (transformer_flux.py, transformer_qwenimage.py,
transformer_wan.py), which need not be installed. A sample is one image or video: latents of a VAE in patches, with
embedded text, of which neither encoder is part. The loss is the mean squared error of the predicted velocity.

Invariant: every model has as many parameters as its class in diffusers.

B samples, N patches, T tokens of text, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relay.simulation.described.example_batch import Unit
from relay.simulation.described.meta_model import MetaModel

FREQUENCIES = 256
"""Sines and cosines of the time step."""

CHANNELS = 64
"""Numbers in a patch of latents: 16 channels, 2 x 2."""


@dataclass(frozen=True)
class DiffusionShape:
    """The sizes of a diffusion transformer, and what a sample is usually.

    `double` blocks have weights of their own for text and image, `single` blocks read both in one row. With `crossed`
    blocks attend to the image, and then to the text. `pooled` is the width of a text's one vector, 0 without; `guided`
    models embed the strength of guidance too.
    """

    heads: int
    text: int
    double: int = 0
    single: int = 0
    crossed: int = 0
    ffn: int = 0
    pooled: int = 0
    guided: bool = False
    patches: int = 4096
    sample: str = "images of 1024 x 1024"
    head_size: int = 128
    text_tokens: int = 512

    @property
    def hidden(self) -> int:
        """The hidden size."""
        return self.heads * self.head_size


_VIDEO: dict[str, Any] = {"patches": 32760, "sample": "videos of 81 frames of 832 x 480"}
DIFFUSION_MODELS = {
    "flux.1-dev": DiffusionShape(24, 4096, double=19, single=38, pooled=768, guided=True),
    "flux.1-schnell": DiffusionShape(24, 4096, double=19, single=38, pooled=768),
    "qwen-image": DiffusionShape(24, 3584, double=60),
    "wan-2.1-1.3b": DiffusionShape(12, 4096, crossed=30, ffn=8960, **_VIDEO),
    "wan-2.1-14b": DiffusionShape(40, 4096, crossed=40, ffn=13824, **_VIDEO),
}
"""Shapes by name, from transformer/config.json of black-forest-labs/FLUX.1-dev and FLUX.1-schnell, Qwen/Qwen-Image,
Wan-AI/Wan2.1-T2V-1.3B-Diffusers and Wan2.1-T2V-14B-Diffusers."""


def diffusion_model(name: str, batch: int, patches: int | None = None) -> MetaModel:
    """The model of that name, with a batch of so many samples. `patches` of a sample differ with its resolution."""
    shape = DIFFUSION_MODELS[name]
    count = shape.patches if patches is None else patches
    with torch.device("meta"):
        module = DiffusionTransformer(shape)
        latents = torch.empty(batch, count, CHANNELS)
        example = {
            "latents": latents, "text": torch.empty(batch, shape.text_tokens, shape.text),
            "time": torch.empty(batch, FREQUENCIES), "velocity": latents,
        }  # fmt: skip
        if shape.pooled:
            example["pooled"] = torch.empty(batch, shape.pooled)
        if shape.guided:
            example["guidance"] = torch.empty(batch, FREQUENCIES)
    of = shape.sample if patches is None else f"{shape.sample.partition(' ')[0]} of another size"
    note = f"Samples are {of}: {count:,} patches and {shape.text_tokens} tokens of text. VAE and encoder run before."
    return MetaModel(module, example, (note,), Unit(shape.sample.partition(" ")[0], 1))


def _two_layers(inside: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inside, hidden), nn.SiLU(), nn.Linear(hidden, hidden))


def _feed_forward(hidden: int, wide: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden, wide), nn.GELU(approximate="tanh"), nn.Linear(wide, hidden))


def _normed(stream: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A norm without weights, and then what the time step says: the modulation of adaptive layer norms."""
    return F.layer_norm(stream, stream.shape[-1:]) * (1 + scale) + shift


def _rotated(states: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions; states (B, heads, N, size), angles (N, size / 2)."""
    first, second = states.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    return torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1).flatten(-2)


class Projections(nn.Module):
    """Queries, keys and values, and their norms: one for each head, or one for all heads together."""

    def __init__(self, shape: DiffusionShape, whole: bool = False) -> None:
        super().__init__()
        self.heads, self.whole = shape.heads, whole
        self.query, self.key, self.value = (nn.Linear(shape.hidden, shape.hidden) for _ in range(3))
        width = shape.hidden if whole else shape.head_size
        self.query_norm, self.key_norm = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)

    def forward(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key = self.query(queries), self.key(keys)
        if self.whole:
            query, key = self._split(self.query_norm(query)), self._split(self.key_norm(key))
        else:
            query, key = self.query_norm(self._split(query)), self.key_norm(self._split(key))
        return query, key, self._split(self.value(keys))

    def _split(self, states: Tensor) -> Tensor:
        return states.unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, N, H) -> (B, heads, N, H / heads)


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class DoubleBlock(nn.Module):
    """Text and image, each with weights of its own, attend to both (Esser et al., arXiv 2403.03206)."""

    def __init__(self, shape: DiffusionShape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.image_modulation, self.text_modulation = nn.Linear(hidden, 6 * hidden), nn.Linear(hidden, 6 * hidden)
        self.image_projections, self.text_projections = Projections(shape), Projections(shape)
        self.image_out, self.text_out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.image_feed, self.text_feed = _feed_forward(hidden, 4 * hidden), _feed_forward(hidden, 4 * hidden)

    def forward(self, image: Tensor, text: Tensor, time: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        of_image = self.image_modulation(F.silu(time))[:, None].chunk(6, -1)
        of_text = self.text_modulation(F.silu(time))[:, None].chunk(6, -1)
        states = _normed(image, of_image[1], of_image[0])
        words = _normed(text, of_text[1], of_text[0])
        both = zip(self.text_projections(words, words), self.image_projections(states, states), strict=True)
        query, key, value = (torch.cat(pair, 2) for pair in both)
        mixed = _attended(_rotated(query, angles), _rotated(key, angles), value)
        length = text.shape[1]
        image = image + of_image[2] * self.image_out(mixed[:, length:])
        text = text + of_text[2] * self.text_out(mixed[:, :length])
        image = image + of_image[5] * self.image_feed(_normed(image, of_image[4], of_image[3]))
        text = text + of_text[5] * self.text_feed(_normed(text, of_text[4], of_text[3]))
        return image, text


class SingleBlock(nn.Module):
    """Text and image in one row; attention and feed-forward network side by side."""

    def __init__(self, shape: DiffusionShape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.modulation, self.projections = nn.Linear(hidden, 3 * hidden), Projections(shape)
        self.feed_in, self.out = nn.Linear(hidden, 4 * hidden), nn.Linear(5 * hidden, hidden)

    def forward(self, stream: Tensor, time: Tensor, angles: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(F.silu(time))[:, None].chunk(3, -1)
        states = _normed(stream, scale, shift)
        query, key, value = self.projections(states, states)
        mixed = _attended(_rotated(query, angles), _rotated(key, angles), value)
        wide = F.gelu(self.feed_in(states), approximate="tanh")
        return stream + gate * self.out(torch.cat([mixed, wide], 2))


class CrossedBlock(nn.Module):
    """A video attends to itself, and then to the text (Wan, arXiv 2503.20314)."""

    def __init__(self, shape: DiffusionShape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.modulation = nn.Parameter(torch.empty(1, 6, hidden))
        self.projections, self.out = Projections(shape, whole=True), nn.Linear(hidden, hidden)
        self.cross_norm = nn.LayerNorm(hidden)
        self.cross_projections, self.cross_out = Projections(shape, whole=True), nn.Linear(hidden, hidden)
        self.feed = _feed_forward(hidden, shape.ffn)

    def forward(self, stream: Tensor, text: Tensor, time: Tensor, angles: Tensor) -> Tensor:
        shift, scale, gate, feed_shift, feed_scale, feed_gate = (self.modulation + time).chunk(6, 1)
        states = _normed(stream, scale, shift)
        query, key, value = self.projections(states, states)
        mixed = _attended(_rotated(query, angles), _rotated(key, angles), value)
        stream = stream + gate * self.out(mixed)
        stream = stream + self.cross_out(_attended(*self.cross_projections(self.cross_norm(stream), text)))
        return stream + feed_gate * self.feed(_normed(stream, feed_scale, feed_shift))


class DiffusionTransformer(nn.Module):
    """The denoiser of a latent diffusion model, with its loss."""

    def __init__(self, shape: DiffusionShape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.head_size = shape.head_size
        self.patches_in = nn.Linear(CHANNELS, hidden)
        self.time_in = _two_layers(FREQUENCIES, hidden)
        self.pooled_in = _two_layers(shape.pooled, hidden) if shape.pooled else None
        self.guidance_in = _two_layers(FREQUENCIES, hidden) if shape.guided else None
        self.text_norm = None
        if shape.crossed:
            self.text_in: nn.Module = _two_layers(shape.text, hidden)
            self.time_out = nn.Linear(hidden, 6 * hidden)
            self.last_modulation: Any = nn.Parameter(torch.empty(1, 2, hidden))
        else:
            if not shape.pooled:
                self.text_norm = nn.RMSNorm(shape.text, eps=1e-6)
            self.text_in = nn.Linear(shape.text, hidden)
            self.last_modulation = nn.Linear(hidden, 2 * hidden)
        self.double_blocks = nn.ModuleList(DoubleBlock(shape) for _ in range(shape.double))
        self.single_blocks = nn.ModuleList(SingleBlock(shape) for _ in range(shape.single))
        self.crossed_blocks = nn.ModuleList(CrossedBlock(shape) for _ in range(shape.crossed))
        self.patches_out = nn.Linear(hidden, CHANNELS)

    def forward(
        self, latents: Tensor, text: Tensor, time: Tensor, velocity: Tensor, pooled: Tensor | None = None,
        guidance: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        image, at = self.patches_in(latents), self.time_in(time)
        if self.pooled_in is not None:
            at = at + self.pooled_in(pooled)
        if self.guidance_in is not None:
            at = at + self.guidance_in(guidance)
        text = self.text_in(text if self.text_norm is None else self.text_norm(text))
        if self.crossed_blocks:
            angles = self._angles(image.shape[1])
            modulation = self.time_out(F.silu(at)).unflatten(1, (6, -1))
            for block in self.crossed_blocks:
                image = block(image, text, modulation, angles)
            shift, scale = (self.last_modulation + at[:, None]).chunk(2, 1)
        else:
            angles = self._angles(text.shape[1] + image.shape[1])
            for block in self.double_blocks:
                image, text = block(image, text, at, angles)
            if self.single_blocks:
                stream = torch.cat([text, image], 1)
                for block in self.single_blocks:
                    stream = block(stream, at, angles)
                image = stream[:, text.shape[1] :]
            scale, shift = self.last_modulation(F.silu(at))[:, None].chunk(2, -1)
        return {"loss": F.mse_loss(self.patches_out(_normed(image, scale, shift)), velocity)}

    def _angles(self, length: int) -> Tensor:
        """(N, size / 2): the angles of rotary positions."""
        half = self.head_size // 2
        rates = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
        return torch.arange(length, dtype=torch.float32)[:, None] * rates
