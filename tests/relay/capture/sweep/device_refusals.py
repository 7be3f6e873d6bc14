"""What devices that execute core graphs, and the simulator, refuse of PyTorch's own samples. The list may only shorten.

A sample may be refused because of an op of `OPS`, which the table of `hal.ops` does not have, or in the words of
`REASONS`. The sweep fails where a sample is refused for another reason, and where an op of the list has become one of
the table.
"""

from __future__ import annotations

OPS = frozenset(
    {
        "aten._batch_norm_with_update_functional.default",
        "aten._cdist_forward.default",
        "aten._efficientzerotensor.default",
        "aten._fft_r2c.default",
        "aten._linalg_det.default",
        "aten._linalg_eigh.default",
        "aten._linalg_slogdet.default",
        "aten._linalg_solve_ex.default",
        "aten._linalg_svd.default",
        "aten._pdist_forward.default",
        "aten._upsample_bilinear2d_aa.default",
        "aten.adaptive_max_pool3d.default",
        "aten.addbmm.default",
        "aten.addmv.default",
        "aten.angle.default",
        "aten.as_strided_copy.default",
        "aten.cholesky.default",
        "aten.cholesky_inverse.default",
        "aten.cholesky_solve.default",
        "aten.complex.default",
        "aten.digamma.default",
        "aten.dist.default",
        "aten.erfinv.default",
        "aten.fmax.default",
        "aten.fmin.default",
        "aten.fractional_max_pool2d.default",
        "aten.fractional_max_pool3d.default",
        "aten.frexp.Tensor",
        "aten.i0.default",
        "aten.index_reduce.default",
        "aten.lgamma.default",
        "aten.linalg_cholesky_ex.default",
        "aten.linalg_householder_product.default",
        "aten.linalg_inv_ex.default",
        "aten.linalg_lu.default",
        "aten.linalg_lu_factor_ex.default",
        "aten.linalg_lu_solve.default",
        "aten.linalg_matrix_exp.default",
        "aten.linalg_pinv.atol_rtol_tensor",
        "aten.linalg_qr.default",
        "aten.linalg_solve_triangular.default",
        "aten.lu_unpack.default",
        "aten.mode.default",
        "aten.multilabel_margin_loss_forward.default",
        "aten.nanmedian.default",
        "aten.nanmedian.dim",
        "aten.narrow_copy.default",
        "aten.nextafter.default",
        "aten.ormqr.default",
        "aten.permute_copy.default",
        "aten.polygamma.default",
        "aten.put.default",
        "aten.round.decimals",
        "aten.scatter_reduce.two",
        "aten.segment_reduce.default",
        "aten.special_i0e.default",
        "aten.special_i1.default",
        "aten.special_i1e.default",
        "aten.special_ndtri.default",
        "aten.triangular_solve.default",
        "aten.unbind_copy.int",
        "aten.view_as_complex.default",
        "aten.view_copy.default",
    }
)
"""Ops of ATen that have neither a row in the table nor a decomposition into ops that have."""

REASONS = {
    "makes its shapes or its control flow depend on the data": "a graph has fixed shapes and no branches",
    "has an effect besides its result": "it checks data on the host, as factorizations of matrices do",
    "it cannot be captured (RuntimeError: Sparse": "sparse compressed tensors",
    "makes a sparse tensor of a dense one": "sparse tensors",
    "returns a tensor of layout torch.sparse": "sparse tensors",
    "an uninitialized parameter": "lazy modules, whose parameters have no shape yet",
    "has no counter-based form": "random numbers of other distributions than those of `hal.random`",
    "in float64, and device": "what a layer makes in float64 by name",
    "values of float64": "what a layer makes in float64 by name",
    "complex64": "complex numbers",
    "complex32": "complex numbers",
    "complex128": "complex numbers",
}
"""Words of the error, and what the samples have that are refused in these words."""


def allowed(error: str) -> bool:
    """Whether a refusal is one of the list: the error names an op of `OPS`, or has words of `REASONS`."""
    return any(words in error for words in REASONS) or any(f"the op {op}" in error for op in OPS)
