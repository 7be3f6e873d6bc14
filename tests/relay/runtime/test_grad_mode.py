"""A step trains, and an evaluation evaluates, in whatever mode of PyTorch the caller is; what cannot be is refused."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay

MODES: list[Callable[[], contextlib.AbstractContextManager[Any]]] = [torch.no_grad, torch.inference_mode]
CALLS: dict[str, Callable[[relay.Trainer, tuple[Tensor, Tensor]], object]] = {
    "prepare": lambda trainer, batch: trainer.prepare(batch),
    "evaluate": lambda trainer, batch: trainer.evaluate(batch),
    "predict": lambda trainer, batch: trainer.predict(batch[0]),
    "step": lambda trainer, batch: trainer.step(batch),
}


class Chooses(nn.Module):
    """Runs eagerly, with autograd in the visit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, values: Tensor) -> Tensor:
        return self.norm(self.first(values) if values.sum() > 0 else self.second(values))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 5), Chooses(), nn.Sequential(nn.ReLU(), nn.Linear(5, 3))]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def plain_losses(steps: int) -> list[float]:
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = batch()
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@pytest.mark.filterwarnings("ignore:layer")
@pytest.mark.parametrize("mode", MODES, ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize(("first", "device"), [*((call, "cpu") for call in CALLS), ("step", "cpu:discrete")])
@pytest.mark.sample(3)
def test_a_step_trains_whatever_mode_the_caller_is_in(
    mode: Callable[[], contextlib.AbstractContextManager[Any]], first: str, device: str
) -> None:
    steps = [False, True, False]
    with mode():
        trainer = relay.Trainer(
            layers_outside(), nn.functional.cross_entropy, device=device, optimizer=relay.SGD(lr=0.1), microbatches=1
        )
        within = batch()  # made in that mode, as it would be in a loop that is all in it
        if first != "step":
            CALLS[first](trainer, within)
        losses = [trainer.step(within).loss]
    for inside in steps[:2]:
        with mode() if inside else contextlib.nullcontext():
            losses.append(trainer.step(within).loss)
    trainer.close()
    assert losses == plain_losses(3)


def layers_outside() -> list[nn.Module]:
    """Modules whose parameters are plain tensors, also where the caller is in inference mode."""
    with torch.inference_mode(False), torch.enable_grad():
        return layers()


@pytest.mark.parametrize("call", CALLS)
def test_autocast_around_a_call_is_refused_with_what_to_do(call: str) -> None:
    with relay.Trainer(layers()[:1], nn.functional.cross_entropy, microbatches=1) as trainer:
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="precision='bf16'"):
            CALLS[call](trainer, batch())
        trainer.step((batch()[0], batch()[1]))


def test_a_model_made_in_inference_mode_is_refused_by_the_name_of_a_parameter() -> None:
    with torch.inference_mode():
        made = layers()
    with (
        relay.Trainer(made, nn.functional.cross_entropy) as trainer,
        pytest.raises(relay.PartitionError, match=r"'0\.weight' was made under torch.inference_mode"),
    ):
        trainer.step(batch())


@pytest.mark.parametrize("mode", MODES, ids=["no_grad", "inference_mode"])
def test_a_simulation_does_not_depend_on_the_mode(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    # A shape of its own for each, as what was traced is kept.
    shape: dict[str, Any] = {"layers": 2, "hidden": 64 if mode is torch.no_grad else 96, "heads": 2, "vocabulary": 100}
    with mode():
        inside = relay.simulate(**shape, seq=16, batch=4, device="v100-sxm2-16gb")
    assert inside.step_seconds == relay.simulate(**shape, seq=16, batch=4, device="v100-sxm2-16gb").step_seconds
