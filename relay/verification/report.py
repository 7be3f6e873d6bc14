"""What a comparison with plain PyTorch found, as plain data and in words.

Nothing is compared here. Invariant: `equal` is true if and only if there is no first difference.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """One tensor that differs from plain PyTorch's.

    Attributes:
        step: the number of the step.
        layer: the layer that it belongs to, by the relay's name; empty if it belongs to the whole step.
        tensor: the name of the parameter or buffer; "loss" or "loss scale" otherwise.
        kind: "loss", "gradient", "missing gradient", "update" (the gradients are equal, the weights after the update
            are not), "buffer", "skip" (one of the two left the step out) or "loss scale".
        magnitude: the largest absolute difference of an element.
        largest: the largest absolute value in plain PyTorch's tensor.
    """

    step: int
    layer: str
    tensor: str
    kind: str
    magnitude: float
    largest: float

    def __str__(self) -> str:
        what = {
            "loss": "the loss",
            "gradient": f"the gradient of {self.tensor!r}",
            "missing gradient": f"the gradient of {self.tensor!r}, which only one of the two has,",
            "update": f"{self.tensor!r} after the update, from equal gradients,",
            "buffer": f"the buffer {self.tensor!r}",
            "skip": "whether the step is skipped: it",
            "loss scale": "the loss scale",
        }[self.kind]
        where = f"in layer {self.layer!r} " if self.layer else ""
        return f"step {self.step}: {where}{what} differs by {self.magnitude:.3g} (largest value {self.largest:.3g})"


@dataclass(frozen=True)
class Verification:
    """The result of `trainer.verify`.

    Attributes:
        steps: how many steps were compared. It ends with the first step that differs.
        equal: whether everything that was compared is equal, or within the tolerance where there is one.
        tolerance: 0.0 if everything was compared by `torch.equal`. Otherwise the largest difference of an element that
            is allowed, relative to the largest value of its tensor, for what `loose` names.
        loose: what was compared to the tolerance, in words; empty if nothing was.
        compared: what was compared, in words.
        device: the device of the trainer.
        plain_device: the device that plain PyTorch ran on.
        first: the first difference in the order in which a step computes; None if there is none.
        differing: how many tensors differ in that step.
    """

    steps: int
    equal: bool
    tolerance: float
    loose: str
    compared: str
    device: str
    plain_device: str
    first: Difference | None = None
    differing: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        beside = f"{self.device!r} beside plain PyTorch on {self.plain_device!r}"
        steps = f"{self.steps} step{'' if self.steps == 1 else 's'}"
        how = "to the last bit (torch.equal)"
        if self.loose:
            how = f"to {self.tolerance:g} of each tensor's largest value ({self.loose}), the rest to the last bit"
        if self.first is None:
            return f"Verified: {steps} on {beside} agree {how}. Compared: {self.compared}."
        more = f" In this step {self.differing} tensors differ." if self.differing > 1 else ""
        return f"Not equal: {steps} on {beside}. First difference, {self.first}.{more} Compared {how}: {self.compared}."
