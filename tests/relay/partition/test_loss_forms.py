"""A loss that cannot be put together from micro-batches is said to be one; all others are the whole batch's."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import relay

Build = Callable[..., relay.Trainer]
Loss = Callable[[Tensor, Tensor], Tensor]

CLASS_WEIGHTS = torch.tensor([0.1, 2.0, 1.0])


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets that are numbers, and targets that are classes, of which some are masked."""
    generator = torch.Generator().manual_seed(3)
    classes = torch.randint(0, 3, (12,), generator=generator)
    classes[[0, 1, 5, 9]] = -100
    return torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator), classes


INPUTS, NUMBERS, CLASSES = drawn()


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 16), *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)), nn.Linear(16, 3)]


class Whole(nn.Module):
    """The same as one model that works its loss out itself."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers())
        self.loss = loss

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(self.layers(inputs), targets)}


def hand_masked(output: Tensor, target: Tensor) -> Tensor:
    counted = (target[:, 0] > -0.5).float()
    return ((output - target).square().mean(1) * counted).sum() / counted.sum()


WHOLE: dict[str, tuple[Loss, Tensor]] = {
    "a cross-entropy with masked targets": (F.cross_entropy, CLASSES),
    "a multiple of one": (lambda output, target: 2 * F.cross_entropy(output, target), CLASSES),
    "with class weights": (lambda output, target: F.cross_entropy(output, target, CLASS_WEIGHTS), CLASSES),
    "its sum": (lambda output, target: F.cross_entropy(output, target, reduction="sum"), CLASSES),
    "mse": (F.mse_loss, NUMBERS),
    "huber": (F.huber_loss, NUMBERS),
    "a mean by hand": (lambda output, target: (output - target).square().mean(), NUMBERS),
    "a sum over their number": (lambda output, target: (output - target).square().sum() / len(output), NUMBERS),
    "two means": (lambda output, target: F.mse_loss(output, target) / 2 + 0.1 * output.square().mean(), NUMBERS),
    "means in a stack": (
        lambda output, target: torch.stack([F.mse_loss(output, target), output.square().mean()]).sum(), NUMBERS,
    ),
    "batchmean": (
        lambda output, target: F.kl_div(output.log_softmax(1), target.softmax(1), reduction="batchmean"), NUMBERS,
    ),
}  # fmt: skip

CUT: dict[str, tuple[Loss, Tensor]] = {
    "a mask by hand": (hand_masked, NUMBERS),
    "a cross-entropy beside a mean": (
        lambda output, target: F.cross_entropy(output, target) + 0.1 * output.square().mean(), CLASSES,
    ),
    "two cross-entropies": (
        lambda output, target: F.cross_entropy(output, target) + F.cross_entropy(-output, target, CLASS_WEIGHTS),
        CLASSES,
    ),
    "a root": (lambda output, target: F.mse_loss(output, target).sqrt(), NUMBERS),
    "a deviation": (lambda output, target: output.std() + F.mse_loss(output, target), NUMBERS),
    "a sum over another number": (lambda output, target: (output - target).square().sum() / 1000, NUMBERS),
}  # fmt: skip


def plain(loss: Loss, targets: Tensor) -> float:
    return float(loss(nn.Sequential(*layers())(INPUTS), targets).detach())


@pytest.mark.parametrize("whole", [False, True], ids=["list", "whole"])
@pytest.mark.parametrize("name", WHOLE)
def test_a_mean_or_a_sum_is_the_whole_batchs_and_nothing_is_said(build: Build, name: str, whole: bool) -> None:
    loss, targets = WHOLE[name]
    trainer = build(Whole(loss), microbatches=4) if whole else build(layers(), loss=loss, microbatches=4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*micro-batches may not be")
        found = trainer.step({"inputs": INPUTS, "targets": targets} if whole else (INPUTS, targets))
    assert found.loss == pytest.approx(plain(loss, targets), rel=1e-5)


@pytest.mark.parametrize("whole", [False, True], ids=["list", "whole"])
@pytest.mark.parametrize("name", CUT)
def test_a_loss_that_is_another_for_a_batch_that_is_cut_is_said_to_be_once(
    build: Build, name: str, whole: bool
) -> None:
    loss, targets = CUT[name]
    batch = {"inputs": INPUTS, "targets": targets} if whole else (INPUTS, targets)
    for microbatches in (1, 3):
        options = {"microbatches": microbatches}
        trainer = build(Whole(loss), **options) if whole else build(layers(), loss=loss, **options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            first = trainer.step(batch).loss
            trainer.step(batch)
        found = [str(warning.message) for warning in caught if "micro-batches may not be" in str(warning.message)]
        if microbatches == 1:
            assert not found
            assert first == pytest.approx(plain(loss, targets), rel=1e-5)
        else:
            assert len(found) == 1
            assert first != pytest.approx(plain(loss, targets), rel=1e-5)
