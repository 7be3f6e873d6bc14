"""Products that are added to their memory: the same numbers, to the bit, as PyTorch's product and a sum after it."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from backends.torch_device.program import lower
from hal.program import Port, Program, Role


def added(inner: int, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What a program adds to its output, what PyTorch does, and the calls of the program that add."""
    given = torch.randn(inner, rows), torch.randn(inner, columns)
    graph = make_fx(lambda left, right: (left.t() @ right,), tracing_mode="fake")(*given).graph
    inputs = tuple(Port(Role.VALUE, number, tuple(one.shape), one.dtype) for number, one in enumerate(given))
    output = Port(Role.PARAMETER_GRADIENT, 0, (rows, columns), torch.float32, True)
    program = Program("product", graph, inputs, (output,), {}, False, 0, 0, 0, "product")
    before = torch.randn(rows, columns)
    wanted = before + given[0].t() @ given[1]
    function = lower(program, (True,))
    found = before.clone()
    function(*given, found)
    names = [str(node.target) for node in function.__self__.graph.nodes]  # type: ignore[attr-defined]
    return found, wanted, sum("addmm_" in name for name in names)


@pytest.mark.parametrize("rows", [1, 23, 4099])
@pytest.mark.parametrize("inner", [1, 2, 100, 256, 700])
def test_a_product_added_to_its_memory_is_equal_to_the_bit(inner: int, rows: int) -> None:
    torch.manual_seed(0)
    found, wanted, inside = added(inner, rows, 17)
    assert torch.equal(found, wanted)
    if torch.backends.mkl.is_available():  # other libraries may add in another order, and are tried too
        assert inside == (2 <= inner <= 256 and rows > 1)
