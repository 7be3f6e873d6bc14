"""What each op does to the rows of a batch: which rule is for which op.

A rule is given an op's call with its operands' labels and gives the label of what comes out, or None where it has no
answer; the op's parts are looked at then. Invariant: what a rule calls row-wise has one dimension of a size that comes
from the batch's length, and row i of it is computed from row i of the operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from relay.partition.batch_flow.elementwise import (
    BY_SHAPE,
    LINEAR,
    NUMBERED,
    SAME,
    by_shape,
    elementwise,
    from_free,
    numbered,
)
from relay.partition.batch_flow.labels import Kind
from relay.partition.batch_flow.layers import attention, distances, dropped, normalized, recurrent, triangle, windows
from relay.partition.batch_flow.lookups import bag, found_between, has_regular_offsets, indexed, looked_up, picked, put
from relay.partition.batch_flow.losses import CROSS_ENTROPIES, ELEMENT_LOSSES, SAMPLE_LOSSES, cross_entropy, loss
from relay.partition.batch_flow.op_call import Labels, OpCall, alike
from relay.partition.batch_flow.products import (
    FACTORS,
    LINEAR_SUMS,
    MATRIX_NUMBERS,
    SAMPLES_TOGETHER,
    contracted,
    of_matrices,
    product_of,
    reduced,
    together,
)
from relay.partition.batch_flow.views import (
    REORDERS,
    RESHAPES,
    along,
    by_numbers,
    joined,
    renormed,
    reordered,
    reshaped,
    spread,
)

FOURIER = {f"fft_{kind}{size}" for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft") for size in ("", "2", "n")}

LIKE_ANOTHER = {"type_as", "view_as", "reshape_as", "expand_as"}

RULES: dict[str, Callable[[OpCall], Any]] = {
    **dict.fromkeys(("masked_fill", "where", "copy", "fill", "lerp", "clamp", "nan_to_num", "isin"), elementwise),
    **dict.fromkeys(SAME, elementwise),
    **dict.fromkeys(LINEAR, elementwise),
    **dict.fromkeys(REORDERS, reordered),
    **dict.fromkeys(RESHAPES, reshaped),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to", "broadcast_tensors"), spread),
    **dict.fromkeys(
        ("softmax", "log_softmax", "_softmax", "_log_softmax", "_safe_softmax", "softmin", "cumsum", "cumprod", "sort",
         "topk", "argsort", "logcumsumexp", "cummax", "cummin", "flip", "glu", "msort"), along),
    **dict.fromkeys(("roll", "repeat", "tile", "repeat_interleave", "unfold", "pixel_shuffle"), by_numbers),
    **dict.fromkeys(("cat", "stack", "concat"), joined),
    **dict.fromkeys(
        (*LINEAR_SUMS, "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any", "all", "var", "std", "var_mean",
         "std_mean", "norm", "linalg_vector_norm", "logsumexp", "median", "nanmedian", "mode", "kthvalue", "quantile",
         "nanmean", "nanquantile", "aminmax"), reduced),
    **dict.fromkeys(FACTORS, product_of),
    "einsum": contracted,
    "renorm": renormed,
    **dict.fromkeys(("searchsorted", "bucketize"), found_between),
    **dict.fromkeys(MATRIX_NUMBERS, of_matrices),
    **dict.fromkeys(SAMPLES_TOGETHER, together),
    **dict.fromkeys((*ELEMENT_LOSSES, *SAMPLE_LOSSES), loss),
    **dict.fromkeys(CROSS_ENTROPIES, cross_entropy),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
         "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
         "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
         "upsample_nearest1d", "upsample_nearest2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_bicubic2d",
         "max_pool2d_with_indices", "max_pool1d_with_indices"), windows),
    **dict.fromkeys(
        ("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm",
         "_native_batch_norm_legit_functional", "native_group_norm", "_batch_norm_impl_index"), normalized),
    "scaled_dot_product_attention": attention,
    "cdist": distances,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    **dict.fromkeys(("tril", "triu"), triangle),
    **dict.fromkeys(FOURIER, along),
    "embedding": looked_up,
    **dict.fromkeys(("gather", "scatter", "scatter_add", "index_select", "scatter_reduce"), picked),
    "index": indexed,
    "index_put": put,
    "embedding_bag": bag,
    **dict.fromkeys(("dropout", "alpha_dropout", "feature_dropout", "native_dropout", "bernoulli"), dropped),
}  # fmt: skip


def label_of(call: OpCall) -> Labels | None:
    """The label of an op's result, or of each of its results; None where no rule knows."""
    if call.name in BY_SHAPE:
        return by_shape(call)
    if call.name in NUMBERED:
        return numbered(call)
    if call.name in LIKE_ANOTHER:  # the second tensor is there for its shape or dtype
        del call.operands[1:]
    if has_regular_offsets(call):  # they follow from the shape of the indices
        call.operands.remove(call.argument("offsets"))
    taken = [call.label(operand) for operand in call.operands]
    for kind in (Kind.MIXED, Kind.UNKNOWN):
        worst = next((label for label in taken if label.kind is kind and not label.numbers), None)
        if worst is not None:
            return alike(call, replace(worst, given=call.given, dim=-1))
    rule = elementwise if "other" in call.arguments and call.name in ("max", "min") else RULES.get(call.name)
    if rule is None and torch.Tag.pointwise in getattr(call.node.target, "tags", ()):
        rule = elementwise
    if all(label.kind is Kind.FREE for label in taken) and rule is not elementwise:
        return from_free(call)
    if rule is not elementwise and any(
        isinstance(large, float) and small != large for _, small, large in call.flow.pair.literals(call.node)
    ):
        return alike(call, call.mixed("computes with a number made from the batch's length"))
    return None if rule is None else rule(call)
