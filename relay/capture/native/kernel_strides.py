"""Fake tensors whose strides are those that PyTorch's CPU kernels give, also where PyTorch foretells others.

A trace decides by strides: whether `reshape` is a view, whether `contiguous` copies, which kernel a product takes. For
most ops PyTorch foretells the strides of results exactly. For those of `MISTAKEN` it does not (its Python form of the
op lays the result out otherwise than the kernel does), where an operand is not contiguous. Such an op is run once, on
zeros that lie as its operands do, to see how the results lie.

Values are never computed here. Other devices than the CPU keep what PyTorch foretells. Invariant: shapes and dtypes
are PyTorch's own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

MISTAKEN = frozenset(
    {
        aten._batch_norm_with_update.default,
        aten._batch_norm_with_update_functional.default,
        aten._log_softmax_backward_data.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_functional.default,
        aten._softmax_backward_data.default,
        aten._upsample_nearest_exact1d.default,
        aten.as_strided_scatter.default,
        aten.batch_norm_backward.default,
        aten.binary_cross_entropy_backward.default,
        aten.channel_shuffle.default,
        aten.copysign.Tensor,
        aten.div.Tensor_mode,
        aten.elu_backward.default,
        aten.hardswish_backward.default,
        aten.hardtanh_backward.default,
        aten.huber_loss_backward.default,
        aten.ldexp.Tensor,
        aten.log_sigmoid_forward.default,
        aten.logaddexp.default,
        aten.logit_backward.default,
        aten.max_unpool2d.default,
        aten.mse_loss_backward.default,
        aten.native_batch_norm.default,
        aten.native_batch_norm_backward.default,
        aten.native_dropout_backward.default,
        aten.native_group_norm_backward.default,
        aten.native_layer_norm_backward.default,
        aten.nll_loss2d_forward.default,
        aten.normal.Tensor_Tensor,
        aten.pow.Scalar,
        aten.reflection_pad2d_backward.default,
        aten.reflection_pad3d.default,
        aten.reflection_pad3d_backward.default,
        aten.replication_pad2d_backward.default,
        aten.replication_pad3d.default,
        aten.replication_pad3d_backward.default,
        aten.smooth_l1_loss_backward.default,
        aten.softplus_backward.default,
        aten.special_xlog1py.default,
        aten.upsample_nearest1d.default,
        aten.xlogy.Tensor,
    }
)
"""Found by holding every op of PyTorch's own samples against its kernel (`tests/relay/capture/sweep`)."""


MAKES_SPARSE = frozenset(
    {
        aten._to_sparse,
        aten._to_sparse_csr,
        aten._to_sparse_csc,
        aten._to_sparse_bsr,
        aten._to_sparse_bsc,
        aten._sparse_coo_tensor_with_dims_and_tensors,
        aten._sparse_compressed_tensor_unsafe,
        aten.sparse_sampled_addmm,
    }
)
"""Ops whose fake results autograd cannot record. For compressed layouts it ends the process, for coordinates it loses
the gradient."""


def kernel_strides_mode(**options: Any) -> FakeTensorMode:
    """A FakeTensorMode with the strides of the CPU's kernels, made with PyTorch's own options.

    PyTorch looks rules up by the exact class of a mode, so this is an instance with one method of its own.
    """
    mode = FakeTensorMode(**options)
    mode.dispatch = functools.partial(_dispatch, mode, mode.dispatch)  # type: ignore[method-assign]
    return mode


def _dispatch(mode: FakeTensorMode, foretell: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """What an op gives for fake tensors; `foretell` is PyTorch's own answer."""
    if func is aten._grouped_mm.default and (args[0].dtype, args[0].device.type) == (torch.float32, "cpu"):
        return _grouped_product(mode, foretell, types, args, kwargs or {})
    try:
        foretold = foretell(func, types, args, kwargs or {})
    except ValueError:  # some Python forms refuse views that the kernel has no need of
        if func not in MISTAKEN:
            raise
        with mode:
            given = pytree.tree_map_only(torch.Tensor, _contiguous, (args, kwargs or {}))
        foretold = foretell(func, types, *given)
    if getattr(func, "overloadpacket", None) in MAKES_SPARSE:
        raise NotImplementedError(f"{func} makes a sparse tensor of a dense one, which traces cannot differentiate")
    if func not in MISTAKEN:
        return foretold
    given, structure = pytree.tree_flatten((args, kwargs or {}))
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    if any(one.device.type != "cpu" for one in tensors) or all(one.is_contiguous() for one in tensors):
        return foretold
    described = tuple(_Zeros.like(one) if isinstance(one, torch.Tensor) else one for one in given)
    found = iter(_strides_of_results(func, described, structure))

    def relaid(result: FakeTensor) -> torch.Tensor:
        strides = next(found)
        if strides == tuple(result.stride()):
            return result
        with mode:
            return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)

    return pytree.tree_map_only(torch.Tensor, relaid, foretold)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _grouped_product(mode: FakeTensorMode, foretell: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """What a grouped matrix product of float32 gives, which the CPU computes and PyTorch's own answer refuses."""
    with mode:
        narrow = [
            torch.empty_strided(one.shape, one.stride(), dtype=torch.bfloat16, device=one.device) for one in args[:2]
        ]
        foretold = foretell(aten._grouped_mm.default, types, (*narrow, *args[2:]), kwargs)
        given, structure = pytree.tree_flatten((args, kwargs))
        described = tuple(_Zeros.of_one_group(one) if isinstance(one, torch.Tensor) else one for one in given)
        (strides,) = _strides_of_results(aten._grouped_mm.default, described, structure)
        return torch.empty_strided(foretold.shape, strides, dtype=torch.float32, device=args[0].device)


class _Zeros(tuple[Any, ...]):
    """How a tensor of zeros is to be made: shape, strides, dtype."""

    @classmethod
    def like(cls, tensor: torch.Tensor) -> _Zeros:
        return cls((tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype))

    @classmethod
    def of_one_group(cls, tensor: torch.Tensor) -> _Zeros:
        """An operand of a grouped product, or its offsets, for the first group alone; strides do not depend on others.

        All matrices of a large model's experts together are more than a host can hold.
        """
        shape = tuple(tensor.shape)
        return cls(((1, *shape[1:]) if len(shape) != 2 else shape, tuple(tensor.stride()), tensor.dtype))

    def make(self) -> torch.Tensor:
        shape, strides, dtype = self
        # Memory that is only read stays the system's page of zeros, whatever its size.
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
        return torch.zeros(extent, dtype=dtype).as_strided(shape, strides)


@functools.lru_cache(maxsize=4096)
def _strides_of_results(op: Any, given: tuple[Any, ...], structure: pytree.TreeSpec) -> tuple[tuple[int, ...], ...]:
    """The strides of the tensors that the CPU's kernel of `op` returns."""
    with _disable_current_modes(), torch.no_grad():
        made = [one.make() if isinstance(one, _Zeros) else one for one in given]
        args, kwargs = pytree.tree_unflatten(made, structure)
        results = op(*args, **kwargs)
    return tuple(tuple(one.stride()) for one in pytree.tree_leaves(results) if isinstance(one, torch.Tensor))
