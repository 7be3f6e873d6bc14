"""What is checked of a batch's loss before anything is compiled or run: whether its micro-batches can make it.

Errors say what to do. How a loss is found to be what it is stands in `relay.partition`. Nothing is changed here.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from relay.data.loss_weight import LossPlan
from relay.data.microbatches import Batch
from relay.errors import BatchError, CaptureError, MicroBatchTooSmall, PartitionError
from relay.runtime.stages import CompiledModel


def check_loss(
    name: str,
    plans: Sequence[LossPlan],
    microbatches: int,
    warned: bool,
    over_batch: bool = False,
    of_processes: bool = False,
) -> bool:
    """Refuse a loss that the micro-batches of model `name` cannot make, and warn of one that cannot be followed.

    It does not warn if it has `warned` before. Returns whether it has by now. With `over_batch` the loss is that of a
    head over the whole batch, and the plans are about what comes before it; `of_processes` is set where other processes
    have other shares of the batch. Raises PartitionError.
    """
    for plan in plans:
        if plan.problem is not None and of_processes:
            raise PartitionError(
                f"The loss of {name} mixes samples: {plan.problem}. Several processes cannot train it, since each sees "
                "its own share of the batch. Train it in one process; or, if each micro-batch is meant to have its own "
                "loss, say by loss_weight= what each counts."
            )
        if plan.problem is not None:
            raise PartitionError(
                f"The loss of {name} mixes samples: {plan.problem}. The losses of {microbatches} micro-batches do "
                "not add up to that of the whole batch. Give one batch to be cut, with loss_over='batch' (or 'auto'), "
                "which runs the loss over all of it; or use microbatches=1; or, if each micro-batch is meant to have "
                "its own loss, say by loss_weight= what each counts."
            )
        if plan.form() != plans[0].form():
            raise PartitionError(
                f"The loss of {name} is computed in another way for one micro-batch than for the others, so they "
                "do not add up to the loss of the batch. Use microbatches=1, or say by loss_weight= what each "
                "micro-batch counts."
            )
    unknown = next((plan.unknown for plan in plans if plan.unknown is not None), None)
    if unknown is not None and not warned:
        doubt = (
            f"The loss of {name} in {microbatches} micro-batches may not be that of the whole batch, because it "
            f"cannot be followed: {unknown}. "
        )
        advice = (
            "It is right if nothing there mixes samples, and if the loss is a mean over samples. Otherwise use "
            "loss_over='batch', which runs what follows the last layer over the whole batch; or microbatches=1; or say "
            "by loss_weight= what each micro-batch counts."
        )
        if over_batch:
            advice = "It is right if nothing before the head mixes samples. Otherwise use microbatches=1."
        warnings.warn(doubt + advice, stacklevel=5)
    return warned or unknown is not None


def too_small(failure: CaptureError, size: int, whole: int, whole_model: bool) -> MicroBatchTooSmall:
    """The error for code that fails for a micro-batch of `size` samples, and not for the batch of `whole` samples."""
    over_batch = (
        "a whole model's own loss is part of that code, so give it as a list of modules with loss= to use "
        "loss_over='batch'"
        if whole_model
        else "if it is the loss, loss_over='batch' runs it over the whole batch"
    )
    return MicroBatchTooSmall(
        f"{str(failure).rstrip('.')}. This is so for a micro-batch of {size} of the {whole} samples, and not for the "
        f"whole batch. Use fewer micro-batches, such as microbatches=1; {over_batch}.",
        layer=failure.layer,
        op=failure.op,
    )


def refuse_mixed_output(name: str, plan: LossPlan, microbatches: int) -> None:
    """Refuse to join an output of micro-batches that is another one for the whole batch."""
    if plan.mixed_output is not None:
        raise PartitionError(
            f"An output of {name} mixes samples: {plan.mixed_output}. In {microbatches} micro-batches it is not what "
            "it is for the whole batch. Use loss_over='batch' (or 'auto'), or microbatches=1."
        )


def refuse_pieces(given: Batch, weights: Sequence[float] | None) -> None:
    """Refuse batches of their own, or weights, where there is to be one loss over one batch."""
    if given.whole is None or weights is not None:
        raise BatchError(
            "With loss_over='batch' the loss is that of one batch, and pieces= are batches of their own"
            + (", each with a weight." if weights is not None else ".")
            + " Give them as one batch, which is cut into micro-batches; or use loss_over='microbatch' and say "
            "by loss_weight= what each of them counts, if their losses add up to the one you mean."
        )


def refuse_other_layers(compiled: Sequence[CompiledModel]) -> None:
    """Refuse micro-batches for which the model calls other layers than for the first."""
    for other in compiled[1:]:
        if other is not compiled[0] and other.signature() != compiled[0].signature():
            raise PartitionError(
                "The model calls different layers for different micro-batches (a smaller last one, or one with "
                "different numbers in it), so they cannot share a step. Make the batch a multiple of "
                "microbatches, or use microbatches=1."
            )
