"""Values of a batch beside dense tensors of floats: refused by name with the way out, or as in plain PyTorch."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import relay
from relay.errors import BatchError
from tests.support.zoo.plain_models import Build

ROWS = 6
NUMBERS = torch.arange(ROWS) / 4


class Weighed(nn.Module):
    """Two layers, and a sum over samples that are weighed by whatever `extra` holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, inputs: Tensor, extra: Any) -> dict[str, Tensor]:
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        weights = [one.abs() if one.is_complex() else one.float() for one in extra.values()]
        return {"loss": (inputs.square().sum(1) * sum(weights)).sum()}


def batch(extra: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    return {"inputs": torch.randn(ROWS, 4), "extra": extra}


class Pair(NamedTuple):
    first: Tensor
    second: Any


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class Own(torch.Tensor):
    """A class of tensors with kernels of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*(nested|quantize|CSR)")
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(ROWS).to_sparse(), r"'extra' .*sparse_coo.*to_dense"),
        (lambda: {"a": torch.eye(ROWS).to_sparse_csr()}, r"'extra'\['a'\] .*sparse_csr.*to_dense"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)] * ROWS), "'extra' .*nested tensor.*Pad it"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)] * ROWS, layout=torch.jagged), "nested tensor.*Pad it"),
        (lambda: torch.quantize_per_tensor(NUMBERS, 0.1, 0, torch.quint8), r"quantized tensor.*dequantize\(\)"),
        (lambda: NUMBERS.to("meta"), "'extra' .*device 'meta'"),
        (lambda: torch.Tensor._make_subclass(Own, NUMBERS), "'extra' .*is a Own"),
        (lambda: NUMBERS.numpy(), r"'extra' .*numpy.ndarray of shape \(6,\).*as_tensor"),
        (lambda: Pair(NUMBERS, [np.zeros(2000)]), r"'extra'.second\[0\] .*numpy.ndarray of shape \(2000,\)"),
        (lambda: Holder(np.zeros(2000)), "'extra'.value .*numpy.ndarray"),
    ],
)
def test_a_value_that_no_program_takes_is_refused_by_name_with_what_to_give(
    build: Build, make: Any, words: str, microbatches: int
) -> None:
    with pytest.raises(BatchError, match=words):
        build(Weighed(), microbatches=microbatches).step(batch(make()))


def test_tensors_of_every_dtype_train_as_in_pytorch(build: Build) -> None:
    extra = {
        "complex": torch.complex(NUMBERS, 1 - NUMBERS), "bytes": (4 * NUMBERS).to(torch.uint8), "flags": NUMBERS > 0.5,
        "uint16": (4 * NUMBERS).int().to(torch.uint16), "fp8": NUMBERS.to(torch.float8_e4m3fn),
        "double": NUMBERS.double(), "bf16": NUMBERS.bfloat16(), "expanded": torch.tensor(2.0).expand(ROWS),
    }  # fmt: skip
    plain = Weighed()
    expected = plain(**batch(extra))["loss"]
    expected.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    trainer = build(Weighed(), microbatches=3, optimizer=relay.SGD(lr=0.1))
    assert trainer.step(batch(extra)).loss == pytest.approx(expected.item(), rel=1e-6)
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(trainer.state_dict()[name], weight, rtol=1e-5, atol=1e-6)
