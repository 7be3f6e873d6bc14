"""How large a batch fits the device where the head over the whole batch does not: tried with fewer micro-batches.

Each try compiles the head for a smaller batch of micro-batches of the same size, whose layers are known. Nothing is
allocated. Invariant: the batch that is named fits beside all else that the run needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hal.errors import OutOfMemory
from hal.spec.units import format_size
from relay.runtime.memory_plan import kernel_workspace, planned_slot_sizes, plans_for, requirement_of
from relay.runtime.stages import CompiledModel


def with_largest_batch(
    failure: OutOfMemory,
    compiled: Sequence[CompiledModel],
    sizes: Sequence[int],
    of_first: Callable[[int], Sequence[CompiledModel]],
    stash: str,
    slots: int,
) -> OutOfMemory:
    """The error with how many samples would fit.

    `compiled` are the models of the micro-batches, with `sizes` samples each; `of_first` gives those of a batch of the
    first so many of them.
    """
    least, most = 0, len(sizes) - 1
    while least < most:
        middle = (least + most + 1) // 2
        models = of_first(middle)
        needed = requirement_of(models, plans_for(models, stash, True), slots, sum(planned_slot_sizes(models[0])))
        if needed.total <= failure.capacity:
            least = middle
        else:
            most = middle - 1
    head = compiled[0].stages[-1]
    fits = sum(sizes[:least])
    what = f"a batch of up to {fits} samples fits" if fits else "not even one of them fits"
    told = (
        f"The head over the whole batch ({head.segment.name!r}) takes all {sum(sizes)} samples at once, with up to "
        f"{format_size(kernel_workspace(compiled[0]))} of workspace. In micro-batches of {sizes[0]}, {what}. "
        "Only a smaller batch makes the head smaller; all else reduces what the layers need. "
    )
    return OutOfMemory(failure.what, failure.requested, failure.in_use, failure.capacity, told + failure.advice)
