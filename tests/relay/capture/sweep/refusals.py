"""The samples of PyTorch's that Relay refuses to train, and why. The list may only become shorter.

A name without a number stands for all samples of that operator or module. Each maps to words of the error: the sweep
fails where a listed sample trains, or is refused with other words, and where one that is not listed is refused.
"""

from __future__ import annotations

SPARSE = "returns a tensor of layout torch.sparse"
LAZY = "is a lazy module"
"""Plain PyTorch's optimizers refuse parameters without a shape too."""

MADE_UP = "made-up inputs"
"""The layer runs eagerly, and the op refuses most matrices: it fails on made-up ones, tried for the shapes it gives."""

REFUSED: dict[str, str] = {
    "linalg.cholesky": MADE_UP,
    "nn.LazyConv1d": LAZY,
    "nn.LazyConv2d": LAZY,
    "nn.LazyConv3d": LAZY,
    "nn.LazyConvTranspose1d": LAZY,
    "nn.LazyConvTranspose2d": LAZY,
    "nn.LazyConvTranspose3d": LAZY,
    "sparse.sampled_addmm": SPARSE,
}


def refusal_of(name: str) -> str | None:
    """Words of the error that a sample is expected to raise; None where it is expected to train."""
    return REFUSED.get(name, REFUSED.get(name.rpartition("/")[0]))
