"""The norms of blocks: the same to the bit however the blocks lie on ranks and threads, and numpy's to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from relay.distributed.block_norms import block_count, block_norms, block_of, joined
from relay.distributed.ownership import Ownership

SIZES = [1, 63, 64, 65, 1000, 70_001, 3_000_017]


@pytest.mark.parametrize("size", SIZES)
def test_the_norm_depends_on_neither_the_number_of_ranks_nor_that_of_threads(size: int) -> None:
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(size))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 7, 64):
            torch.set_num_threads(1 + count % 2)
            ranges = Ownership({"first": 65, "this": size}, 0, count, whole=False).ranges("this")
            parts = [block_norms(gradient[start:stop], size) for start, stop in ranges]
            assert [len(part) for part in parts] == [block_count(stop - start, size) for start, stop in ranges]
            found.append(joined(torch.cat(parts)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found)
    assert float(found[0]) == pytest.approx(float(np.linalg.norm(gradient.double().numpy())), rel=1e-5)


@pytest.mark.parametrize("whole", [False, True])
def test_every_element_has_one_owner_and_shares_are_of_equal_size(whole: bool) -> None:
    sizes = {f"parameter {number}": size for number, size in enumerate(SIZES * 3)}
    ownership = Ownership(sizes, 0, 5, whole)
    owned = [0] * 5
    for name, size in sizes.items():
        ranges = ownership.ranges(name)
        assert ranges[0][0] == 0
        assert sum(stop - start for start, stop in ranges) == size
        for rank, (start, stop) in enumerate(ranges):
            owned[rank] += stop - start
            assert whole or start % block_of(size) == 0 or start == stop
    assert max(owned) - min(owned) <= (max(SIZES) if whole else 2 * sum(map(block_of, sizes.values())))
