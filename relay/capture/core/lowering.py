"""The core lowering: a graph rewritten to the closed set of ops of `hal.ops`, in the one form that it promises.

Tracing with `decompositions()` under `attention()` and `cumulative_averages()` gives core ATen ops, in any of their
overloads. `simplify` rewrites them to the form that backends are promised (see `hal.ops`): positional arguments,
operands of one dtype, views as reshapes. It also removes ops without effect (copies, views of the same shape, sums of
one element) and merges equal ops. It does not fuse or reorder. An op without a row in the table is left, for the device
to refuse by name.

Invariant: the shape and dtype that the table of `hal.ops` gives for a node equal those of PyTorch's tracing.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from hal.ops import OPS, Kind, name_of, spec_of
from hal.ops.rules import Spec
from relay.capture.core.arithmetic import ARITHMETIC
from relay.capture.core.average_pooling import AVERAGES
from relay.capture.core.builder import Builder, part_spec
from relay.capture.core.call import Call, with_defaults
from relay.capture.core.elementwise import elementwise
from relay.capture.core.fused_losses import fused_losses
from relay.capture.core.grid_sample import SAMPLING
from relay.capture.core.indexing import INDEXING
from relay.capture.core.mathematics import MATHEMATICS
from relay.capture.core.pooling_and_losses import FURTHER
from relay.capture.core.reductions import REDUCTIONS
from relay.capture.core.scans import SCANS
from relay.capture.core.special import ERROR_FUNCTIONS
from relay.capture.core.strides import STRIDES
from relay.capture.core.views import VIEWS
from relay.capture.native.python_kernels import WRONG
from relay.errors import CaptureError

aten = torch.ops.aten

_FURTHER = [
    aten.linalg_vector_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten.elu.default,
    aten.leaky_relu.default,
    aten.hardtanh.default,
    aten.rrelu_with_noise_backward.default,
]
"""Core ATen ops that the remaining ops of the table can express."""

REWRITES: dict[Any, Callable[[Builder, Call], Any]] = {**VIEWS, **ARITHMETIC, **MATHEMATICS, **REDUCTIONS, **INDEXING}
"""Rewrites of ATen ops to core form. Ops that have a row in `hal.ops` and no entry here need none."""

_KEPT = [aten._safe_softmax.default]
"""Ops not to decompose. Core ATen splits _safe_softmax into seven passes over the scores; backends need one."""


class Lowering(enum.Enum):
    """The kind of graph that a device executes."""

    NATIVE = "native"
    """The ops that PyTorch's autograd runs on the device that the graph is traced for, fused ops included."""
    PORTABLE = "portable"
    """The ops that autograd runs, with attention as matrix products, for devices that cannot be traced for."""
    CORE = "core"
    """Decomposed to the ops of `hal.ops`."""


def attention() -> contextlib.AbstractContextManager[Any]:
    """A context that traces attention as matrix products, as the decomposition of the fused kernel is wrong."""
    context: contextlib.AbstractContextManager[Any] = sdpa_kernel(SDPBackend.MATH)
    return context


@contextlib.contextmanager
def cumulative_averages() -> Iterator[None]:
    """A context that traces batch norms whose `momentum` is None: their factor is one divided by the count of batches.

    PyTorch's module makes a number of Python's of the count, which a graph cannot hold; here it stays a tensor.
    """
    forward = nn.modules.batchnorm._BatchNorm.forward

    def traced(self: Any, value: torch.Tensor) -> torch.Tensor:
        if self.momentum is not None or not self.training or self.running_mean is None:
            return forward(self, value)
        self._check_input_dim(value)
        self.num_batches_tracked.add_(1)
        dims = [dim for dim in range(value.dim()) if dim != 1]
        with torch.no_grad():
            factor = self.num_batches_tracked.to(torch.float32).reciprocal()
            variance, mean = torch.var_mean(value.detach().to(torch.float32), dims)
            for running, new in ((self.running_mean, mean), (self.running_var, variance)):
                running.copy_(factor * new + (1 - factor) * running)
        return nn.functional.batch_norm(value, None, None, self.weight, self.bias, True, 0.0, self.eps)

    nn.modules.batchnorm._BatchNorm.forward = traced  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.modules.batchnorm._BatchNorm.forward = forward  # type: ignore[method-assign]


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions for tracing under the core lowering, by overload."""
    table = dict(core_aten_decompositions())
    table.update(get_decompositions(_FURTHER))
    table.update({**FURTHER, **AVERAGES, **SCANS, **SAMPLING, **STRIDES, **ERROR_FUNCTIONS, **fused_losses()})
    table[aten.rrelu_with_noise_functional.default] = _rrelu
    for target in [*_KEPT, *WRONG]:
        table.pop(target, None)
    return table


def _rrelu(
    value: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    *_: Any,
) -> Any:
    """A leaky ReLU, outside of training. In training the op draws random numbers, and is left to be refused."""
    if training:
        return NotImplemented
    return torch.nn.functional.leaky_relu(value, (lower + upper) / 2), noise


def simplify(graph: fx.Graph, layer: str) -> fx.Graph:
    """The graph in the form that `hal.ops` promises. Raises CaptureError, naming `layer`, if an op has no such form."""
    with _disable_current_modes():  # constants are computed for real, also while fake tensors are in use
        return _simplified(graph, layer)


def _simplified(graph: fx.Graph, layer: str) -> fx.Graph:
    builder = Builder()
    environment: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copied = builder.graph.node_copy(node)
            copied.meta = {"val": node.meta.get("val")}
            environment[node] = copied
        elif node.op == "output":
            builder.graph.output(fx.node.map_arg(node.args[0], environment.__getitem__))
        else:
            environment[node] = _rewritten(builder, node, environment, layer)
    builder.graph.eliminate_dead_code()
    return builder.graph


def _rewritten(builder: Builder, node: fx.Node, environment: dict[fx.Node, Any], layer: str) -> Any:
    arguments: Any = fx.node.map_aggregate(
        (tuple(node.args), dict(node.kwargs)),
        lambda item: environment[item] if isinstance(item, fx.Node) else item,
    )
    args, kwargs = arguments
    if node.target is operator.getitem:
        return args[0][args[1]] if isinstance(args[0], tuple) else builder.item(args[0], args[1])
    wanted = spec_of(node.meta["val"])
    try:
        result = _rewrite(builder, node.target, list(args), dict(kwargs), wanted)
    except (ValueError, TypeError, IndexError, KeyError, ArithmeticError) as failure:
        raise CaptureError(
            f"layer {layer!r}: {node.target} with {node.args} {node.kwargs} has no core form: {failure}",
            layer=layer,
            op=str(node.target),
        ) from failure
    if result is None:
        assert callable(node.target)
        result = builder.graph.call_function(node.target, tuple(args), dict(kwargs))
        result.meta = {"val": node.meta["val"]}
        return result
    if not _agree(result, wanted):
        found = [None if part is None else part_spec(part) for part in _parts(result)]
        raise CaptureError(
            f"layer {layer!r}: the core form of {node.target} gives {found}, where PyTorch has {wanted}.",
            layer=layer,
            op=str(node.target),
        )
    return result


def _parts(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _agree(result: Any, wanted: Any) -> bool:
    """Whether the table and PyTorch agree on shapes and dtypes. Results that are not used may be None."""
    if not isinstance(result, tuple):
        return bool(part_spec(result) == wanted)
    return all(part is None or part_spec(part) == spec for part, spec in zip(result, wanted, strict=True))


_DIMENSIONS = {"dim", "dims", "dimension", "dim0", "dim1"}


def _without_dimensions(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(part_spec(node), Spec) and not part_spec(node).shape


def _rewrite(builder: Builder, target: Any, args: list[Any], kwargs: dict[str, Any], wanted: Any) -> Any:
    """The core form of one call, or None for an op without a row in the table.

    Along dimension 0 of a tensor without dimensions, which PyTorch allows, ops are those of one element along a
    dimension of length 1: rows of the table need not know of it.
    """
    names = {argument.name for argument in getattr(getattr(target, "_schema", None), "arguments", ())}
    if not args or not names & _DIMENSIONS or not _without_dimensions(args[0]):
        return _of_dimensions(builder, target, args, kwargs, wanted)
    lifted = [builder.view(item, [1]) if _without_dimensions(item) else item for item in args]
    blanks = [
        torch.empty_like(item.meta["val"], device="meta") if isinstance(item, fx.Node) else item for item in lifted
    ]
    found = _of_dimensions(builder, target, lifted, kwargs, spec_of(target(*blanks, **kwargs)))
    if found is None or isinstance(wanted, Spec):
        return found and builder.view(found, wanted.shape)
    parts = found if isinstance(found, tuple) else [builder.item(found, index) for index in range(len(wanted))]
    return tuple(part and builder.view(part, spec.shape) for part, spec in zip(parts, wanted, strict=True))


def _of_dimensions(builder: Builder, target: Any, args: list[Any], kwargs: dict[str, Any], wanted: Any) -> Any:
    """`_rewrite` for operands whose dimensions are there."""
    rewrite = REWRITES.get(target)
    if rewrite is not None:
        return rewrite(builder, Call(target, args, kwargs, wanted))
    name = name_of(target)
    row = OPS.get(name)
    if row is None:
        return None
    if not isinstance(target, torch._ops.OpOverload):
        return builder.call(target, *args, **kwargs)
    positional, named = with_defaults(target, args, kwargs, wanted)
    if row.kind is Kind.ELEMENTWISE:
        return elementwise(builder, target, positional, named, wanted)
    return builder.call(target, *positional, **named)
