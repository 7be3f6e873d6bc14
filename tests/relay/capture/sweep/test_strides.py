"""Strides in a trace are those of PyTorch's kernels, for every op that PyTorch's own samples reach.

The sample that runs by default takes every 150th operator and module; with RELAY_FULL_SWEEP=1 all of them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

import relay
from relay.capture.native.kernel_strides import MAKES_SPARSE, MISTAKEN, kernel_strides_mode
from relay.capture.native.python_kernels import own_kernels
from tests.relay.capture.sweep.op_calls import Call, layouts, recorded_calls
from tests.support import reference
from tests.support.zoo.plain_models import Build

FULL = os.environ.get("RELAY_FULL_SWEEP") == "1"
PARTS = [slice(first, None, 20) for first in range(20)] if FULL else [slice(7, None, 150)]
BY_DATA = (DataDependentOutputException, DynamicOutputShapeException)

# What the trace of a recurrent layer foretells of its workspace is wrong in number and length; such layers run eagerly.
EAGER = {torch.ops.aten.mkldnn_rnn_layer.default}


def lies(tensor: Tensor) -> Any:
    """Shape and dtype, and the strides of dimensions longer than one where there are elements."""
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
    return tuple(tensor.shape), tensor.dtype, strides if tensor.numel() else []


def mistakes(calls: list[Call], kind: Callable[..., FakeTensorMode]) -> Iterator[tuple[Any, str]]:
    """The ops whose results lie otherwise in a trace with fake tensors of that kind, and how."""
    for call in calls:
        if getattr(call.op, "overloadpacket", None) in MAKES_SPARSE or call.op in EAGER:
            continue  # such a layer runs eagerly
        for given in layouts(call):
            try:
                with torch.no_grad():
                    real = call.run(given)
            except (RuntimeError, ValueError):
                continue  # the kernel refuses such strides
            mode = kind(allow_non_fake_inputs=True, static_shapes=True)
            fakes = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in given]
            try:
                with torch.no_grad(), mode, own_kernels(native=True), enable_python_dispatcher():
                    fake = call.run(fakes)
            except BY_DATA:
                continue  # such a layer runs eagerly
            for mine, true in zip(fake, real, strict=True):
                if true.layout is torch.strided and lies(mine) != lies(true):
                    yield call.op, f"{call.op} foretells {lies(mine)}, not {lies(true)}"


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"from {part.start}")
def test_results_in_a_trace_lie_as_the_kernels_have_them(part: slice) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [text for _, text in mistakes(recorded_calls(part), kernel_strides_mode)]
    assert found == []


@pytest.mark.skipif(not FULL, reason="part of make test-full")
def test_pytorch_itself_mistakes_nearly_all_ops_of_the_list() -> None:
    """An op that PyTorch no longer mistakes goes off the list."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = recorded_calls()
        listed = [call for call in calls if call.op in MISTAKEN]
        found = {op for op, _ in mistakes(listed, FakeTensorMode)}
    reached = {call.op for call in listed}
    assert reached - found <= NOT_SEEN


aten = torch.ops.aten
NOT_SEEN: set[Any] = {
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._softmax_backward_data.default,
    aten._upsample_nearest_exact1d.default,
    aten.div.Tensor_mode,
    aten.ldexp.Tensor,
    aten.logaddexp.default,
    aten.max_unpool2d.default,
    aten.special_xlog1py.default,
    aten.upsample_nearest1d.default,
    aten.xlogy.Tensor,
}
"""Ops of the list whose mistake shows in other samples than those that are recorded."""


class Gates(nn.Module):
    """Slices, pads and transposes, as gated linear attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(32, 4), nn.Linear(2, 32)

    def forward(self, value: Tensor) -> Tensor:
        rows, length, _ = value.shape
        first, second = torch.split(self.narrow(value).view(rows, length, 2, 2), [1, 1], dim=3)
        first = first.reshape(rows, length, 2).sigmoid()
        second = nn.functional.softplus(second.reshape(rows, length, 2))
        padded = [nn.functional.pad(half.transpose(1, 2).contiguous(), (0, 4)) for half in (first, second)]
        return value + self.wide((padded[0] * padded[1])[..., :length].transpose(1, 2))


class OverTime(nn.Module):
    """A norm over a transposed value."""

    def __init__(self, norm: nn.Module, first: int = 1, second: int = 2) -> None:
        super().__init__()
        self.inner, self.norm, self.dims = nn.Linear(32, 32), norm, (first, second)

    def forward(self, value: Tensor) -> Tensor:
        return self.norm(self.inner(value).transpose(*self.dims)).transpose(*self.dims)


class Stack(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, inputs: Tensor) -> Any:
        for layer in self.layers:
            inputs = layer(inputs)
        return SimpleNamespace(loss=inputs.square().mean())


LAYERS = {
    "gates": Gates,
    "LayerNorm over time": lambda: OverTime(nn.LayerNorm(12)),
    "BatchNorm1d": lambda: OverTime(nn.BatchNorm1d(32)),
    "GroupNorm": lambda: OverTime(nn.GroupNorm(2, 32)),
    "LayerNorm, sequence first": lambda: OverTime(nn.LayerNorm(32), 0, 1),
    "encoder layer, sequence first": lambda: OverTime(nn.TransformerEncoderLayer(32, 2, 16, 0.0), 0, 1),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=list(LAYERS))
@pytest.mark.sample(3)
def test_layers_of_transposed_values_train_as_in_pytorch(build: Build, layer: Callable[[], nn.Module]) -> None:
    ours, plain = Stack(layer), Stack(layer)
    batches = [{"inputs": torch.randn(4, 12, 32)} for _ in range(2)]
    trainer = build(ours, microbatches=2, optimizer=relay.AdamW(lr=1e-3, weight_decay=0.01))
    losses = [trainer.step(batch).loss for batch in batches]
    assert losses == reference.train(plain, batches, 2)
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))
