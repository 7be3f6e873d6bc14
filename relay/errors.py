"""The relay's own errors, one class for each way in which a caller can react.

Device errors are `hal.errors.HalError` and pass through unchanged. Invariant: none of these leaves a step half
applied or a file half written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


class RelayError(RuntimeError):
    """Base of the relay's own errors."""


class BatchError(RelayError, ValueError):
    """A batch that cannot be used: empty, or with tensors that cannot be cut into the micro-batches.

    What to do: change the batch or `microbatches=`.
    """


class IndexOutOfRange(BatchError, IndexError):
    """An index in a batch (a token, a class, a position) is outside of what it indexes.

    What to do: correct the batch, or enlarge the vocabulary or the number of classes.
    """


class PartitionError(RelayError):
    """A model that cannot be cut into layers, or whose loss is missing or not a scalar.

    What to do: give the model as a list of modules, or change what the message names.
    """


class LayerCallRefused(PartitionError):
    """A model that calls one of its layers in a way that no segment keeps, whatever runs the code around it.

    What to do: what the message names.
    """


class CaptureError(RelayError):
    """A layer that cannot be captured as a graph. `layer` and `op` name it (`op` may be empty).

    `by_data` is True if the values of the data decide what the layer does. Inside one layer that is no error (the layer
    runs eagerly); between layers it is. What to do: rewrite the layer without the op, or leave it out of the model.
    """

    def __init__(self, message: str, *, layer: str, op: str = "", by_data: bool = False) -> None:
        super().__init__(message)
        self.layer = layer
        self.op = op
        self.by_data = by_data


class MicroBatchTooSmall(CaptureError):
    """Code that runs for the whole batch and fails for a micro-batch, which has fewer samples.

    What to do: use fewer micro-batches, or run the loss over the whole batch (`loss_over="batch"`).
    """


class NonFiniteLoss(RelayError):
    """The loss of a step was NaN or infinite. Nothing of that step was applied: the parameters are as before it.

    `microbatches` are the losses of its micro-batches, where they are known: one without targets may have none, the
    mean of nothing. What to do: lower the learning rate, look at the batch, or skip it and continue
    (`on_nonfinite="skip"`).
    """

    def __init__(self, loss: float, step: int, microbatches: Sequence[float] = ()) -> None:
        wrong = sum(not math.isfinite(one) for one in microbatches)
        advice = "Look at the batch, or lower the learning rate."
        if 0 < wrong < len(microbatches):
            advice = (
                f"It is not finite in {wrong} of its {len(microbatches)} micro-batches. If those hold no targets, so "
                "that their loss is the mean of nothing, give loss_weight=, a function of a micro-batch that returns "
                "how many targets it holds, or use microbatches=1. Else look at the batch, or lower the learning rate."
            )
        super().__init__(
            f"The loss of step {step} is {loss}. Nothing of this step was applied; parameters and optimizer are as "
            f"they were before it. {advice}"
        )
        self.loss = loss
        self.step = step


class GradientOverflow(RelayError):
    """A gradient of a layer is not finite under a fixed loss scale. That layer was not updated; others may have been.

    What to do: load a checkpoint and lower `loss_scale`, or use `loss_scale="dynamic"`, which skips such steps.
    """

    def __init__(self, layer: str, scale: float) -> None:
        super().__init__(
            f"The gradients of {layer!r} overflowed under the fixed loss scale {scale:g}. That layer was not updated, "
            "but layers after it may have been. Load a checkpoint and lower loss_scale, or use loss_scale='dynamic'."
        )
        self.layer = layer


class InconsistentState(RelayError):
    """A step failed while layers were being updated: some are updated, others are not.

    What to do: load a checkpoint, or build a new trainer. This trainer refuses further steps.
    """


class LossScaleExhausted(RelayError):
    """fp16 gradients overflow at every loss scale, so the run cannot recover. Nothing was applied.

    What to do: train in bf16 or fp32, lower the learning rate, or look for a layer whose values grow without bound.
    """

    def __init__(self, scale: float) -> None:
        super().__init__(
            f"Gradients still overflow in fp16 at a loss scale of {scale:g}, so no scale helps: the model itself makes "
            "infinities or NaN. Use precision='bf16' or 'fp32', lower the learning rate, or load a checkpoint."
        )
        self.scale = scale


class ModelChanged(RelayError):
    """The model's tensors are not those that the trainer took over. Nothing was run.

    What to do: build a new trainer; one model has one trainer at a time.
    """

    def __init__(self, name: str, added: bool = False) -> None:
        if added:
            message = (
                f"The model's {name!r} is a parameter that was added after this trainer took the model over. Put "
                "layers in with trainer.insert or trainer.replace, or build a new trainer for the model as it is."
            )
        else:
            message = (
                f"The model's {name!r} is not the tensor that this trainer took over: it was replaced, cast or moved, "
                "or another trainer has the model now. Change weights in place (load_state_dict, copy_), or build a "
                "new trainer for the model as it is."
            )
        super().__init__(message)
        self.name = name


class StandingGradient(RelayError):
    """A parameter has a gradient in `.grad` before a step, which a backward of plain PyTorch would add to.

    What to do: clear it, or make what it is the gradient of a part of the loss.
    """

    def __init__(self, names: Sequence[str]) -> None:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        super().__init__(
            f"Parameter {names[0]!r}{more} has a gradient in .grad, to which backward() of plain PyTorch would add. A "
            "step of the trainer computes gradients of its own, and neither reads nor writes .grad. Clear it before "
            "the step: trainer.optimizer.zero_grad() sets it to None. Zeros are a gradient too, with which PyTorch's "
            "optimizer decays weights. The gradient of something else, a penalty on weights, say, belongs in the loss."
        )
        self.names = list(names)


class RanksDiffer(RelayError, ValueError):
    """Processes that train together differ: in their model, their options, their software, or what they call.

    It is raised on every rank. What to do: make what the message names equal on all ranks.
    """


class RankFailed(RelayError):
    """Another process of the group failed. `rank` is its number; the message has its first cause.

    What to do: correct that cause. Nothing of the step was applied, or later calls raise InconsistentState.
    """

    def __init__(self, rank: int, name: str, cause: str) -> None:
        super().__init__(f"{name} failed: {cause}")
        self.rank = rank


class RankLost(RelayError):
    """Another process of the group has ended, or cannot be reached. `rank` is its number.

    What to do: start all ranks again, as `torchrun --max-restarts` does, and load the newest checkpoint.
    """

    def __init__(self, rank: int, name: str, reason: str) -> None:
        super().__init__(
            f"{name} has ended or cannot be reached, so the other ranks cannot go on: {reason} Start all ranks again "
            "and load the newest checkpoint; torchrun --max-restarts starts them by itself."
        )
        self.rank = rank


class VerificationError(RelayError):
    """A comparison with plain PyTorch that cannot be made for this model or these options. Nothing has changed.

    What to do: what the message names, or compare another configuration of the same model.
    """


class CheckpointError(RelayError):
    """A checkpoint that cannot be written, read or used here. `file` and `field` say where (`field` may be empty).

    What to do: load another checkpoint (`relay inspect FOLDER` reports damage), or build the trainer that it belongs
    to. A checkpoint that is refused has changed nothing.
    """

    def __init__(self, message: str, *, file: str = "", field: str = "") -> None:
        where = f"{file}: " if file else ""
        super().__init__(f"{where}{field}: {message}" if field else f"{where}{message}")
        self.file = file
        self.field = field
