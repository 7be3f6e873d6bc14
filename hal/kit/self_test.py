"""The self-test of a device, from which a backend's probe is made.

It shows that kernels run and that their numbers come back (contract 10). It is no test of a device's accuracy or of its
contracts: those are the conformance suite's. Invariant: it never raises, and leaves nothing allocated.
"""

from __future__ import annotations

import torch

from hal.device import Backend, Device, KernelCall, Probe
from hal.kit.program_builder import QUEUE, GraphBuilder, fetch, for_device, upload
from hal.random import RandomKey, keep_mask

KEY = RandomKey(seed=11, step=1, segment=2, microbatch=0)
DRAW = 3  # any number of a random draw


def self_test(backend: Backend, name: str) -> Probe:
    """Probe a device: open it, send matrices, fill, multiply, draw random numbers, and read the results back.

    Args:
        backend: the backend of the device.
        name: the device string.
    """
    try:
        device = backend.open(name.partition(":")[2])
        try:
            wrong = _wrong_result(device)
        finally:
            device.close()
    except Exception as failure:  # contract 10: probing reports the reason and never raises
        return Probe(name, False, f"{type(failure).__name__}: {failure}")
    if wrong:
        return Probe(name, False, f"its self-test, {wrong}, gave wrong numbers")
    info = device.info
    return Probe(name, True, "", info.description, info.memory, info.tags, info.notes)


def _wrong_result(device: Device) -> str:
    """The part of the self-test that came out wrong; empty if none did.

    Every value is a whole number that fp32 holds exactly, or a mask: no device rounds them. The factors of the product
    are small enough for devices that multiply matrices in fewer bits; the sums need all of fp32's.
    """
    builder = GraphBuilder("self-test")
    left, right, large = (builder.input(shape) for shape in ((24, 16), (16, 8), (40,)))
    key = builder.random_key()
    product = builder.call("aten.mm.default", left, right)
    tripled = builder.call("aten.add.Tensor", large, builder.call("aten.mul.Scalar", large, 2.0))
    mask = builder.call("hal.random.keep_mask", key, DRAW, [24, 8], 0.5)
    kernel = device.compile(for_device(builder.program([product, tripled, mask], accumulates=False), device))

    numbers = torch.arange(384, dtype=torch.float32)
    factor, addend = numbers.remainder(7).sub(3).reshape(24, 16), 2.0**22 - 1 - 2 * numbers[:40]
    nowhere = [torch.full((24, 8), torch.nan), torch.full((40,), torch.nan), torch.zeros(24, 8, dtype=torch.bool)]
    buffer, views = upload(device, [factor, torch.zeros(16, 8), addend, *nowhere])
    try:
        queue = device.queue(QUEUE)
        filled = queue.fill(views[1], 2.0)
        queue.run(KernelCall(kernel, views[:3], views[3:], key=KEY), [filled]).wait()
        found_product, found_sums, found_mask = fetch(device, views[3:])
    finally:
        buffer.free()
    if not torch.equal(found_product, factor @ torch.full((16, 8), 2.0)):
        return "a product of two matrices"
    if not torch.equal(found_sums, addend * 3):
        return "sums of large whole numbers"
    if not torch.equal(found_mask, keep_mask(KEY, DRAW, (24, 8), 0.5)):
        return "a random mask"
    return ""
