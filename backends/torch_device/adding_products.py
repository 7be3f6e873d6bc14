"""Matrix products that are added to their memory inside the product: `addmm_` in place of `mm`, then `add_`.

That spares a pass over the gradient of a weight and a temporary of its size, for each chunk of positions and for each
micro-batch. It is done on the CPU in float32, and only where it keeps the bits. A product over few elements is summed
in registers and added once at the end, as `add_` would; over many it is added piece by piece. Which is which depends on
the library, so each kind of product is tried once on random numbers. Nothing else is decided here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.t.default, aten.squeeze.dim, aten.unsqueeze.default}
"""Views through which an output can be written in place, if both ends are contiguous (same elements, same order)."""

LEAST, MOST = 2, 256
"""How many elements are summed. Of one element the product would not be rounded before it is added."""
TRIED = 4096
"""Rows and columns that are tried at most. More of them change nothing in the order of one sum."""


def add_inside(graph: fx.Graph, value: fx.Node, target: fx.Node, device: torch.device) -> bool:
    """Let the product that makes `value` add to `target` itself; the caller erases the chain. False where it cannot."""
    producer = value
    while producer.target in RESHAPES and len(producer.users) == 1:
        producer = producer.args[0]  # type: ignore[assignment]
    if producer.target is not aten.mm.default or len(producer.users) != 1 or device.type != "cpu":
        return False
    final, made = value.meta["val"], producer.meta["val"]
    left, right = (operand.meta["val"] for operand in producer.args)  # type: ignore[union-attr]
    if made.dtype is not torch.float32 or not made.is_contiguous() or not final.is_contiguous():
        return False
    if not LEAST <= left.shape[1] <= MOST or not _keeps_bits(*_kind(left), *_kind(right), torch.get_num_threads()):
        return False
    with graph.inserting_before(producer):
        destination = target
        if made.shape != final.shape:
            destination = graph.call_function(aten.view.default, (target, list(made.shape)))
        graph.call_function(aten.addmm_.default, (destination, *producer.args))
    return True


def erase_chain(graph: fx.Graph, value: fx.Node) -> None:
    """Erase a product that nothing uses any more, and the views of it."""
    while value.target in {*RESHAPES, aten.mm.default} and not value.users:
        source: Any = value.args[0]
        made = value.target is aten.mm.default
        graph.erase_node(value)
        if made:
            return
        value = source


def _kind(operand: torch.Tensor) -> tuple[int, int, bool]:
    """The sizes of an operand as they are tried, and whether it is a transposed view."""
    rows, columns = operand.shape
    return min(rows, TRIED), min(columns, TRIED), operand.stride(0) == 1 and rows > 1


@functools.cache
def _keeps_bits(rows: int, inner: int, turned: bool, _: int, columns: int, other_turned: bool, threads: int) -> bool:
    """Whether such a product gives the same numbers added inside as added afterwards."""
    generator = torch.Generator().manual_seed(0)

    def drawn(first: int, second: int, turn: bool) -> torch.Tensor:
        shape = (second, first) if turn else (first, second)
        made = torch.randn(shape, generator=generator)
        return made.t() if turn else made

    left, right = drawn(rows, inner, turned), drawn(inner, columns, other_turned)
    before = drawn(rows, columns, False)
    return torch.equal(torch.addmm(before, left, right), before + left @ right)
