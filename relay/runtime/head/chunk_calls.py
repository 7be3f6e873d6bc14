"""The kernel calls of a last segment that runs over chunks of positions.

The loss and the gradients of parameters are summed on the device, in fp32 where the masters are: the first chunk of the
step replaces what the memory holds, every further one is added. The gradient of the hidden states is written in its
place, chunk by chunk. Which events order the calls is decided elsewhere (`relay.runtime.schedule`).

Invariant: together the calls read and write what one call for the whole micro-batch would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from hal.device import KernelCall, View
from hal.program import Port
from relay.runtime.stages import StageProgram
from relay.runtime.stash.memory import Access


def chunk_calls(
    program: StageProgram, whole: KernelCall, accesses: Sequence[Access], first: bool
) -> Iterator[KernelCall]:
    """One call for each chunk of a micro-batch, in order.

    `whole` has the views of the whole micro-batch, of which those of `accesses` are in the stash. `first` tells whether
    it is the first micro-batch of the step.
    """
    chunks = program.chunks
    assert chunks is not None
    stashed = {id(view): access for access in accesses for view in access.views}
    for start, rows in chunks.rows():
        own = program if rows == chunks.size or program.rest is None else program.rest
        assert own.kernel is not None
        inputs = _parts(whole.inputs, own.program.inputs, stashed, start)
        outputs = _parts(whole.outputs, own.program.outputs, stashed, start)
        yield KernelCall(own.kernel, inputs, outputs, own.accumulate_chunk(first, start == 0), whole.key)


def _parts(views: Sequence[View], ports: Sequence[Port], stashed: Mapping[int, Access], start: int) -> list[View]:
    """The views of a chunk: of a value whose port has fewer rows, those from position `start` on."""
    found = []
    for view, port in zip(views, ports, strict=True):
        access = stashed.get(id(view))
        if access is not None and view.shape != port.shape:
            view = access.part(start * math.prod(port.shape[1:]), port.shape)
        found.append(view)
    return found
