"""Layers get what PyTorch's kernels give, and not what the Python forms give that tracing has for some ops.

Every overload that has such a form in this release of PyTorch has a case here, compared with eager PyTorch to the bit.
Another release with another set is noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relay.capture.native.python_kernels import KEPT, own_kernels, python_forms
from tests.relay.capture.sweep.comparison import Verdict, verdict
from tests.relay.capture.sweep.sample_layers import Operator, Sample

aten = torch.ops.aten

VALUE = (2, 3, 6, 8)
TARGETS = torch.tensor([1, 0, 2])
TARGET_LISTS = torch.tensor([[0, 1, -1, 2], [2, -1, 0, 1], [1, 3, 0, -1]])


def resized(op: Any, dims: int, *options: Any) -> Callable[[Tensor], Tensor]:
    """`op` makes an image of the last dims of a value larger, by factors that are no whole numbers."""
    larger = [9, 11, 13][:dims]

    def resize(value: Tensor) -> Tensor:
        image = value.reshape(2, 3, *([48] if dims == 1 else [6, 8] if dims == 2 else [2, 3, 8]))
        return op(image, larger, *options)

    return resize


def recurrent(op: Any, gates: int, cell: bool, packed: bool) -> Callable[..., Any]:
    """A recurrent layer of one direction, of width 5."""
    weights = [torch.randn(5 * gates, 8), torch.randn(5 * gates, 5), torch.randn(5 * gates), torch.randn(5 * gates)]

    def run(value: Tensor) -> Any:
        sequence = value.reshape(6, 6, 8)
        states = [torch.zeros(1, 6, 5)] * (2 if cell else 1)
        state = states if cell else states[0]
        if packed:
            sizes = torch.full((6,), 6)
            return op(sequence.reshape(36, 8), sizes, state, weights, True, 1, 0.0, True, False)
        return op(sequence, state, weights, True, 1, 0.0, True, False, False)

    return run


def batch_norm(value: Tensor) -> Any:
    weight, bias, mean, deviation = (torch.full((3,), number) for number in (1.5, 0.5, 0.0, 1.0))
    return aten.native_batch_norm.default(value, weight, bias, mean, deviation, True, 0.1, 1e-5)[0]


def rows(value: Tensor) -> Tensor:
    return value.reshape(12, 24)[:3, :4].contiguous()


def written(op: Any) -> Callable[[Tensor], Tensor]:
    def run(value: Tensor) -> Tensor:
        first = rows(value.detach())
        return op(first, first.t(), out=torch.empty(3, 3)) * value.sum()

    return run


CASES: dict[str, Callable[[Tensor], Any]] = {
    "aten::_upsample_bicubic2d_aa.vec": resized(aten._upsample_bicubic2d_aa.vec, 2, False, None),
    "aten::_upsample_bilinear2d_aa.vec": resized(aten._upsample_bilinear2d_aa.vec, 2, False, None),
    "aten::_upsample_nearest_exact1d": resized(aten._upsample_nearest_exact1d.default, 1),
    "aten::_upsample_nearest_exact1d.vec": resized(aten._upsample_nearest_exact1d.vec, 1, None),
    "aten::_upsample_nearest_exact2d": resized(aten._upsample_nearest_exact2d.default, 2),
    "aten::_upsample_nearest_exact2d.vec": resized(aten._upsample_nearest_exact2d.vec, 2, None),
    "aten::_upsample_nearest_exact3d": resized(aten._upsample_nearest_exact3d.default, 3),
    "aten::_upsample_nearest_exact3d.vec": resized(aten._upsample_nearest_exact3d.vec, 3, None),
    "aten::broadcast_tensors": lambda value: aten.broadcast_tensors.default([value, value[0]]),
    "aten::dropout": lambda value: aten.dropout.default(value, 0.15, True),
    "aten::empty.out": lambda value: aten.empty.out([3], out=torch.ones(3)).zero_() + value.sum(),
    "aten::gru.data": recurrent(aten.gru.data, 3, False, True),
    "aten::gru.input": recurrent(aten.gru.input, 3, False, False),
    "aten::hardshrink": lambda value: aten.hardshrink.default(value, 0.3),
    "aten::istft": lambda value: aten.istft.default(
        aten.stft.center(value.flatten(), 16, None, None, torch.ones(16), True, "reflect", False, True, True),
        16, None, None, torch.ones(16),
    ),
    "aten::lstm.data": recurrent(aten.lstm.data, 4, True, True),
    "aten::lstm.input": recurrent(aten.lstm.input, 4, True, False),
    "aten::matmul": lambda value: aten.matmul.default(value, value.transpose(2, 3)),
    "aten::matmul.out": written(aten.matmul.out),
    "aten::multi_margin_loss": lambda value: aten.multi_margin_loss.default(rows(value), TARGETS, 1, 0.7, None, 1),
    "aten::multilabel_margin_loss_forward": lambda value: aten.multilabel_margin_loss_forward.default(
        rows(value), TARGET_LISTS, 1
    )[0],
    "aten::native_batch_norm": batch_norm,
    "aten::one_hot": lambda value: aten.one_hot.default(TARGETS, 4) * rows(value),
    "aten::pad_sequence": lambda value: aten.pad_sequence.default([rows(value), rows(value)[:2]], True, 0.5),
    "aten::rnn_relu.data": recurrent(aten.rnn_relu.data, 1, False, True),
    "aten::rnn_relu.input": recurrent(aten.rnn_relu.input, 1, False, False),
    "aten::rnn_tanh.data": recurrent(aten.rnn_tanh.data, 1, False, True),
    "aten::rnn_tanh.input": recurrent(aten.rnn_tanh.input, 1, False, False),
    "aten::softshrink": lambda value: aten.softshrink.default(value, 0.3),
    "aten::stft.center": lambda value: aten.stft.center(
        value.flatten(), 16, None, None, torch.ones(16), True, "reflect", False, True, True
    ),
    "aten::tensor_split.tensor_indices_or_sections": lambda value: aten.tensor_split.tensor_indices_or_sections(
        value, torch.tensor([1, 2]), 1
    ),
    "aten::unsafe_chunk": lambda value: aten.unsafe_chunk.default(value, 3, 1),
    "aten::upsample_bicubic2d": resized(aten.upsample_bicubic2d.default, 2, False),
    "aten::upsample_bicubic2d.vec": resized(aten.upsample_bicubic2d.vec, 2, False, None),
    "aten::upsample_bilinear2d": resized(aten.upsample_bilinear2d.default, 2, False),
    "aten::upsample_bilinear2d.vec": resized(aten.upsample_bilinear2d.vec, 2, False, None),
    "aten::upsample_linear1d.vec": resized(aten.upsample_linear1d.vec, 1, False, None),
    "aten::upsample_nearest1d": resized(aten.upsample_nearest1d.default, 1),
    "aten::upsample_nearest1d.vec": resized(aten.upsample_nearest1d.vec, 1, None),
    "aten::upsample_nearest2d": resized(aten.upsample_nearest2d.default, 2),
    "aten::upsample_nearest2d.vec": resized(aten.upsample_nearest2d.vec, 2, None),
    "aten::upsample_nearest3d": resized(aten.upsample_nearest3d.default, 3),
    "aten::upsample_nearest3d.vec": resized(aten.upsample_nearest3d.vec, 3, None),
    "aten::upsample_trilinear3d.vec": resized(aten.upsample_trilinear3d.vec, 3, False, None),
}  # fmt: skip
if hasattr(aten, "_upsample_lanczos2d_aa"):
    CASES["aten::_upsample_lanczos2d_aa.vec"] = resized(aten._upsample_lanczos2d_aa.vec, 2, False, None)

NOT_ON_THE_CPU = {"aten::cudnn_batch_norm"}

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
if RELEASE >= (2, 14):
    CASES["aten::to_dense"] = lambda value: aten.to_dense.default(value)
if RELEASE <= (2, 11):
    del CASES["aten::one_hot"]  # it has no Python form there


def compared(function: Callable[[Tensor], Any]) -> Verdict:
    def make() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        layer = Operator(function, ((torch.randn(VALUE, requires_grad=True),), {}))
        return layer, layer.take_example()

    return verdict(Sample("case", make))


def test_every_op_with_a_python_form_is_compared() -> None:
    """Where this fails PyTorch has another set of Python forms than those compared here: give the new ones a case."""
    assert {op.name() for op in python_forms()} == set(CASES) | NOT_ON_THE_CPU


ALIKE = ("aten::upsample_", "aten::rnn_", "aten::unsafe_chunk")


def sampled() -> list[Any]:
    """Every op, of which `make test-full` alone has those that are alike: resizing in one way or another, and so on."""
    return [
        pytest.param(name, marks=pytest.mark.exhaustive)
        if name.startswith(ALIKE) and name != "aten::upsample_bicubic2d"
        else name
        for name in CASES
    ]


@pytest.mark.parametrize("name", sampled())
@pytest.mark.sample(4)
def test_a_layer_with_the_op_trains_as_in_pytorch(name: str) -> None:
    assert compared(CASES[name]).kind == "equal", compared(CASES[name])


def test_only_the_forms_listed_are_traced_in_native_graphs_and_all_are_back_afterwards() -> None:
    before = {op.name() for op in python_forms()}
    with own_kernels(native=True):
        assert {op.name() for op in python_forms()} == set(KEPT)
    assert {op.name() for op in python_forms()} == before
