"""Frozen linear layers in 4 or 8 bits: packed once on the host, sent packed, unpacked on the device.

Linear layers are `nn.Linear` and the Conv1D of transformers' GPT-2, whose weight is transposed.

A packed layer holds codes and one bfloat16 scale for 64 weights, as buffers. Its forward unpacks them by plain tensor
operations (a lookup and a product), so every device computes it, and a layer computes the same in a model that is held
in memory whole. Invariant: a layer that is packed has no gradient.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import nn

BLOCK = 64
"""Weights that share a scale."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The sixteen values of nf4 (Dettmers et al., arXiv 2305.14314, appendix E)."""


class Packed(NamedTuple):
    """How many layers were packed, and their bytes before and after."""

    layers: int
    before: int
    after: int


class QuantizedLinear(nn.Module):
    """A frozen `nn.Linear` whose weight is packed. `weight` is the unpacked one, in the dtype that it had."""

    def __init__(self, linear: Any, kind: str) -> None:
        super().__init__()
        self.out_features, self.in_features = self.shape = linear.weight.shape
        self.kind = kind
        self.dtype = linear.weight.dtype
        codes, scales = _pack(linear.weight.detach(), kind)
        self.codes: torch.Tensor
        self.scales: torch.Tensor
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        if kind != "int8":
            self.table: torch.Tensor
            self.register_buffer("table", _table(kind, linear.weight.device), persistent=False)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach(), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        values = self.codes if self.kind == "int8" else self.table[self.codes.long()]
        scaled = values.reshape(-1, BLOCK).float() * self.scales.float()
        return scaled.reshape(self.shape).to(self.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(inputs, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"

    def unpacked(self) -> nn.Module:
        """A plain linear layer with the weights that this one computes with."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        linear.weight = nn.Parameter(self.weight, requires_grad=False)
        linear.bias = self.bias  # type: ignore[assignment]
        return linear


class QuantizedConv1D(QuantizedLinear):
    """The same of a Conv1D of transformers: its weight has inputs first."""

    def __init__(self, linear: Any, kind: str) -> None:
        super().__init__(linear, kind)
        self.in_features, self.out_features = self.shape

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        product = torch.addmm(self.bias, inputs.view(-1, inputs.size(-1)), self.weight)  # type: ignore[arg-type]
        return product.view(*inputs.shape[:-1], self.out_features)

    def unpacked(self) -> nn.Module:
        """A Conv1D with the weights that this one computes with."""
        from transformers.pytorch_utils import Conv1D

        with torch.device("meta"):
            layer = Conv1D(self.out_features, self.in_features)
        layer.weight = nn.Parameter(self.weight, requires_grad=False)
        layer.bias = self.bias  # type: ignore[assignment]
        return layer


def quantized_class(module: nn.Module) -> type[QuantizedLinear] | None:
    """The class that packs a layer of this kind; None for a layer that is not linear."""
    kind = type(module)
    if kind is nn.Linear:
        return QuantizedLinear
    of_library = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    return QuantizedConv1D if of_library else None


def pack_frozen(model: nn.Module, kind: str) -> Packed:
    """Replace the frozen linear layers of a model by packed ones, but not the head. Returns what was gained."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    layers = before = after = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            packs = quantized_class(child)
            if packs is None or child is head:
                continue
            weight: Any = child.weight
            if weight.requires_grad or uses[id(weight)] > 1 or weight.numel() % BLOCK:
                continue
            packed = packs(child, kind)
            setattr(parent, name, packed)
            layers += 1
            before += weight.nbytes
            after += packed.codes.nbytes + packed.scales.nbytes
    return Packed(layers, before, after)


def unpack(model: nn.Module) -> None:
    """Replace packed layers by plain ones."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantizedLinear):
                setattr(parent, name, child.unpacked())


@functools.cache
def _table(kind: str, device: torch.device) -> torch.Tensor:
    """The values of each code: of nf4 both that are in a byte. All layers share it."""
    codes = torch.arange(256)
    if kind == "nf4":
        values = torch.tensor(NF4)
        return torch.stack([values[codes // 16], values[codes % 16]], dim=1).to(device)
    values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    return torch.where(values.isnan(), 0.0, values).to(device)


def _pack(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of a weight and the scale of each block."""
    if weight.is_meta:
        size = weight.numel() // (2 if kind == "nf4" else 1)
        integers = torch.int8 if kind == "int8" else torch.uint8
        scales = torch.empty(weight.numel() // BLOCK, 1, dtype=torch.bfloat16, device="meta")
        return torch.empty(size, dtype=integers, device="meta"), scales
    blocks = weight.float().reshape(-1, BLOCK)
    largest = {"nf4": 1.0, "int8": 127.0, "fp8": 448.0}[kind]
    scales = (blocks.abs().amax(dim=1, keepdim=True) / largest).to(torch.bfloat16)
    units = blocks / torch.where(scales == 0, 1.0, scales.float())
    if kind == "int8":
        return units.round().clamp(-127, 127).to(torch.int8).flatten(), scales
    if kind == "fp8":
        return units.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).flatten(), scales
    values = torch.tensor(NF4)
    codes = torch.bucketize(units.flatten(), (values[1:] + values[:-1]) / 2).to(torch.uint8)
    return codes[0::2] * 16 + codes[1::2], scales
