"""The one table of ops that a core program may hold: shape and dtype rule, FLOPs, bytes and kind of each.

Devices that do not ask for native graphs get *core* programs, made of these ops and of nothing else. The table is
what a backend implements, what the simulator times, and what decides at compile time whether a program can run. It
computes nothing. Its shape and dtype rules are its own, written apart from PyTorch's, and the lowering compares the
two on every node. Everything may import it.

Invariants of a core program, so that a backend need not care about the rest of ATen:

  * Ops are functions of values. Strides mean nothing: `view` is a reshape of the elements in row-major order, and
    every other op's result is what its logical elements say. A backend may carry strides through the ops of kind
    VIEW, and copies only where its own layout makes it.
  * Arguments are positional, in the order of ATen's schema, with all defaults filled in as far as the rule of the
    row has them; `dtype` (of `full`, `arange` and `_to_copy`) and gelu's `approximate` are by keyword, and are always
    given. PyTorch can run the graph as well, with `view` read as `reshape`. Dimensions are not negative, sizes hold
    no -1, slice bounds lie within the dimension.
  * The tensor operands of an element-wise op have one dtype and broadcast; a Python number beside them is of their
    kind (an int for integers, else a float). Casts are `_to_copy` nodes. A condition is bool. Indices are int64.
  * Ops with several results (`native_layer_norm`, `topk`, ...) are followed by `operator.getitem`, which is not in
    the table. Of `convolution_backward`, the results that its mask leaves out are None, in the graph's
    `meta["val"]` and in what a backend computes, and they are never read.
  * Constants without data are ops (`full`, `arange`); constants with data are `get_attr` nodes.

Names are those of the overload, `aten.add.Tensor`; random ops are functions of `hal.random` and go by
`hal.random.keep_mask`. FLOPs are multiplications and additions (2 a multiply-add) and one for any other element-wise
operation; bytes are what an op reads and writes if no value stays in a cache.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hal.device import DeviceInfo
from hal.dtypes import NO_ADVICE, check_ports, require
from hal.errors import CompileError, Unsupported
from hal.ops import rules, window_rules
from hal.ops.rules import Result, Rule, Spec
from hal.program import Program

__all__ = [
    "OPS",
    "Kind",
    "Op",
    "Spec",
    "arguments_of",
    "calls",
    "check",
    "count_flops",
    "count_moved",
    "name_of",
    "spec_of",
]


class Kind(enum.Enum):
    """What an op is to a scheduler of memory and to a code generator."""

    VIEW = "view"
    """The same elements under another shape or order: no arithmetic, and no copy where strides can carry it."""
    ELEMENTWISE = "element-wise"
    REDUCTION = "reduction"
    SCAN = "scan"
    NORMALISATION = "normalisation"
    """Passes over rows: softmax, layer norm."""
    MATMUL = "matmul"
    GATHER = "gather"
    SCATTER = "scatter"
    MOVE = "move"
    """Elements put together or in another order: cat, flip, padding."""
    CREATE = "create"
    SORT = "sort"
    WINDOW = "window"
    """Convolution and pooling."""
    RANDOM = "random"


@dataclass(frozen=True)
class Op:
    """A row. `rule`, `flops` and `moved` are called with the op's own arguments, tensors as `Spec`."""

    name: str
    kind: Kind
    rule: Rule
    flops_rule: Callable[..., int] | None = None

    def results(self, *args: Any, **kwargs: Any) -> Result:
        """Shapes and dtypes of the results. ValueError where the arguments do not fit the op."""
        return self.rule(*args, **kwargs)

    def flops(self, *args: Any, **kwargs: Any) -> int:
        """Floating-point operations."""
        if self.flops_rule is not None:
            return self.flops_rule(*args, **kwargs)
        written = sum(spec.count for spec in _flat(self.rule(*args, **kwargs)))
        read = max((spec.count for spec in _flat((*args, *kwargs.values()))), default=0)
        if self.kind is Kind.ELEMENTWISE:
            return written
        if self.kind in (Kind.REDUCTION, Kind.SCAN):
            return read
        if self.kind is Kind.NORMALISATION:
            return 5 * read  # two passes of statistics and one of arithmetic, to the nearest small number
        return 0

    def moved(self, *args: Any, **kwargs: Any) -> int:
        """Bytes read and written."""
        if self.kind is Kind.VIEW:
            return 0
        written = sum(spec.size for spec in _flat(self.rule(*args, **kwargs)))
        operands = _flat((*args, *kwargs.values()))
        if self.kind is Kind.GATHER:  # of the first operand, only the elements that are taken
            return 2 * written + sum(spec.size for spec in operands[1:])
        return written + sum(spec.size for spec in operands)


def _flat(value: Any) -> list[Spec]:
    if isinstance(value, Spec):
        return [value]
    if isinstance(value, (tuple, list)):
        return [spec for item in value for spec in _flat(item)]
    return []


# -- the table ----------------------------------------------------------------------------------------------------


def _rows() -> list[Op]:
    rows: list[Op] = []

    def add(kind: Kind, rule: Rule, names: str, flops: Callable[..., int] | None = None) -> None:
        for name in names.split():
            rows.append(Op(name if name.startswith("hal.") else f"aten.{name}", kind, rule, flops))

    add(Kind.VIEW, rules.view, "view.default")
    add(Kind.VIEW, rules.permute, "permute.default")
    add(Kind.VIEW, rules.expand, "expand.default")
    add(Kind.VIEW, rules.squeeze, "squeeze.dims")
    add(Kind.VIEW, rules.unsqueeze, "unsqueeze.default")
    add(Kind.VIEW, rules.select, "select.int")
    add(Kind.VIEW, rules.sliced, "slice.Tensor")

    add(Kind.ELEMENTWISE, rules.unary_floating, "exp.default expm1.default log.default log1p.default sqrt.default")
    add(Kind.ELEMENTWISE, rules.unary_floating, "rsqrt.default reciprocal.default sin.default cos.default tan.default")
    add(Kind.ELEMENTWISE, rules.unary_floating, "tanh.default sigmoid.default erf.default floor.default ceil.default")
    add(Kind.ELEMENTWISE, rules.unary_floating, "trunc.default round.default")
    add(Kind.ELEMENTWISE, rules.gelu, "gelu.default")
    add(Kind.ELEMENTWISE, rules.same, "neg.default abs.default sign.default relu.default")
    add(Kind.ELEMENTWISE, rules.logical, "logical_not.default logical_and.default logical_or.default")
    add(Kind.ELEMENTWISE, rules.bits, "bitwise_not.default bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor")
    add(Kind.ELEMENTWISE, rules.binary, "add.Tensor sub.Tensor mul.Tensor maximum.default minimum.default")
    add(Kind.ELEMENTWISE, rules.binary, "floor_divide.default")
    add(Kind.ELEMENTWISE, rules.binary_floating, "div.Tensor pow.Tensor_Tensor atan2.default fmod.Tensor")
    add(Kind.ELEMENTWISE, rules.compare, "eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor")
    add(Kind.ELEMENTWISE, rules.scalar, "add.Scalar mul.Scalar div.Scalar pow.Tensor_Scalar")
    add(Kind.ELEMENTWISE, rules.scalar, "fmod.Scalar remainder.Scalar")
    add(Kind.ELEMENTWISE, rules.scalar_first, "pow.Scalar")
    add(Kind.ELEMENTWISE, rules.compare_scalar, "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar")
    add(Kind.ELEMENTWISE, rules.where, "where.self")
    add(Kind.ELEMENTWISE, rules.clamp, "clamp.default")
    add(Kind.ELEMENTWISE, rules.cast, "_to_copy.default")

    add(Kind.REDUCTION, rules.total, "sum.dim_IntList")
    add(Kind.REDUCTION, rules.mean, "mean.dim")
    add(Kind.REDUCTION, rules.extreme, "amax.default amin.default")
    add(Kind.REDUCTION, rules.any_of, "any.dim")
    add(Kind.REDUCTION, rules.argument, "argmax.default argmin.default")
    add(Kind.REDUCTION, rules.product, "prod.dim_int")
    add(Kind.SCAN, rules.scan, "cumsum.default cumprod.default")
    add(Kind.NORMALISATION, rules.softmax, "_softmax.default _log_softmax.default")
    add(Kind.NORMALISATION, rules.safe_softmax, "_safe_softmax.default")  # rows of nothing but -inf give zeros
    add(Kind.NORMALISATION, rules.layer_norm, "native_layer_norm.default")
    add(Kind.MATMUL, rules.mm, "mm.default", rules.mm_flops)
    add(Kind.MATMUL, rules.bmm, "bmm.default", rules.mm_flops)
    add(Kind.MATMUL, rules.addmm, "addmm.default", rules.addmm_flops)

    add(Kind.GATHER, rules.embedding, "embedding.default")
    add(Kind.GATHER, rules.index, "index.Tensor")
    add(Kind.GATHER, rules.gather, "gather.default")
    add(Kind.SCATTER, rules.index_put, "index_put.default")
    add(Kind.SCATTER, rules.scatter, "scatter.src scatter_add.default")
    add(Kind.SCATTER, rules.scatter_value, "scatter.value")
    add(Kind.SCATTER, rules.slice_scatter, "slice_scatter.default")
    add(Kind.SCATTER, rules.select_scatter, "select_scatter.default")
    add(Kind.MOVE, rules.cat, "cat.default")
    add(Kind.MOVE, rules.pad, "constant_pad_nd.default")
    add(Kind.MOVE, rules.flip, "flip.default")
    add(Kind.CREATE, rules.full, "full.default")
    add(Kind.CREATE, rules.arange, "arange.start_step")
    add(Kind.SORT, rules.topk, "topk.default")
    add(Kind.SORT, rules.sort, "sort.default")
    add(Kind.WINDOW, window_rules.convolution, "convolution.default", window_rules.convolution_flops)
    backward, backward_flops = window_rules.convolution_backward, window_rules.convolution_backward_flops
    add(Kind.WINDOW, backward, "convolution_backward.default", backward_flops)
    add(Kind.WINDOW, window_rules.max_pool, "max_pool2d_with_indices.default")
    add(Kind.WINDOW, window_rules.max_pool_backward, "max_pool2d_with_indices_backward.default")
    add(Kind.RANDOM, rules.mask, "hal.random.keep_mask")
    add(Kind.RANDOM, rules.numbers, "hal.random.uniform hal.random.normal")
    return rows


OPS: dict[str, Op] = {row.name: row for row in _rows()}
"""Every op by name."""


# -- nodes and programs -------------------------------------------------------------------------------------------


def name_of(target: Any) -> str:
    """The table's name for what a node calls: `aten.add.Tensor`, `hal.random.keep_mask`."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"


def spec_of(value: Any) -> Any:
    """A node's `meta["val"]` as Spec, or as a tuple of them where the op has several results."""
    if isinstance(value, torch.Tensor):
        return Spec(tuple(value.shape), value.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(spec_of(item) for item in value)
    return value


def arguments_of(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments with tensors as Spec, as the rows of the table take them."""

    def spec(argument: fx.Node) -> Any:
        return spec_of(argument.meta.get("val"))

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), spec)
    return tuple(args), dict(kwargs)


def calls(graph: fx.Graph) -> list[fx.Node]:
    """The ops of a graph in order, `getitem` left out."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]


def count_flops(graph: fx.Graph) -> int:
    """FLOPs of the matrix products and convolutions of a core graph (`Program.flops`); ops not in the table are 0."""
    rows = [(OPS.get(name_of(node.target)), node) for node in calls(graph)]
    return sum(
        row.flops(*args, **kwargs)
        for row, (args, kwargs) in ((row, arguments_of(node)) for row, node in rows)
        if row is not None and row.kind in (Kind.MATMUL, Kind.WINDOW)
    )


def count_moved(graph: fx.Graph) -> int:
    """Bytes that the ops of a core graph read and write (`Program.moved`)."""
    total = 0
    for node in calls(graph):
        row = OPS.get(name_of(node.target))
        if row is not None:
            args, kwargs = arguments_of(node)
            total += row.moved(*args, **kwargs)
    return total


def check(
    program: Program,
    info: DeviceInfo,
    lacking: frozenset[str] = frozenset(),
    advice: Mapping[torch.dtype, str] = NO_ADVICE,
) -> None:
    """Hold a program to the table and to a device's dtypes, as `Device.compile` does first.

    `lacking` are ops that this device has not got, `advice` is what to do where it has not got a dtype.

    Raises Unsupported, naming the layer, for an op (named too) outside the table or lacking and for a dtype (named
    too) that `info` does not list, and CompileError for a node whose shapes or dtypes differ from the table's.
    """
    device = info.name
    for node in calls(program.graph):
        name = name_of(node.target)
        row = OPS.get(name)
        value = spec_of(node.meta.get("val"))
        if row is None or name in lacking:
            dtype = str(value.dtype) if isinstance(value, Spec) else ""
            raise Unsupported(
                f"{program.name!r} needs the op {name}, which device {device!r} does not have. Run it on a device that "
                "does (the CPU has all), or write the layer without it.",
                op=name,
                dtype=dtype,
                device=device,
            )
        args, kwargs = arguments_of(node)
        try:
            found = row.results(*args, **kwargs)
        except (ValueError, TypeError, IndexError) as failure:
            what = f"{program.name!r}: {name} with {args} {kwargs} is not well formed: {failure}"
            raise CompileError(what) from failure
        if found != value:
            raise CompileError(f"{program.name!r}: {name} gives {found}, and the graph says {value}")
        for spec in value if isinstance(value, tuple) else (value,):
            if spec is not None:
                require(info, spec.dtype, program.name, name, advice)
    check_ports(program, info, advice)
