"""An fp16 step that overflows leaves no trace, and training goes on as with PyTorch's GradScaler."""

import warnings

import pytest
import torch
from torch import Tensor, nn

import relay
from tests.support import mixed_reference, reference
from tests.support.zoo.plain_models import Build, everything, regression


class Multiplied(nn.Module):
    """A layer with running statistics that multiplies by a buffer: 1, until a test makes gradients overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("factor", torch.ones(()))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.norm(torch.tanh(self.linear(value))) * self.factor


def multiplied() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 8), Multiplied(), Multiplied(), Multiplied(), nn.Linear(8, 3)]


def clamped_loss(output: Tensor, target: Tensor) -> Tensor:
    """Finite for any finite output, and so small that nothing overflows at the first scale unless a test makes it."""
    return nn.functional.mse_loss(torch.tanh(output), target) / 128


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize("how", ["a layer", "one sample of one micro-batch"])
@pytest.mark.sample("a layer-cpu", "one sample of one micro-batch-cpu:discrete")
def test_an_overflow_applies_nothing_halves_the_scale_and_training_goes_on_as_with_a_grad_scaler(
    build: Build, how: str, device: str
) -> None:
    ours, plain = multiplied(), multiplied()
    batches = [regression(12, seed=seed) for seed in range(8)]
    if how != "a layer":
        batches[3][0][7] = 1e6  # infinite in fp16; in the third of four micro-batches

    def disturb(modules: list[nn.Module], number: int) -> None:
        if how == "a layer":
            with torch.no_grad():
                modules[2].factor.fill_(1e30 if number == 3 else 1.0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # plain PyTorch's schedulers warn about a skipped first step
        statistics = [module.norm for module in plain[1:4]]
        kept: list[dict[str, Tensor]] = []

        def before(number: int) -> None:
            # GradScaler does not undo BatchNorm's statistics; the relay's "nothing of the step" does.
            if number == 4:
                for norm, state in zip(statistics, kept, strict=True):
                    norm.load_state_dict(state)
            kept[:] = [reference.copy_of(norm.state_dict()) for norm in statistics]
            disturb(plain, number)

        found = mixed_reference.train(
            plain, batches, precision="fp16", loss=clamped_loss, before_step=before, schedule=decay
        )
    assert found.skipped == [number == 3 for number in range(8)], "the test's own overflow"

    trainer = build(ours, loss=clamped_loss, precision="fp16", device=device)
    scheduler = decay(trainer.optimizer)
    losses = []
    for number, batch in enumerate(batches):
        trainer.synchronize()
        disturb(ours, number)
        if number == 3:
            before_it, rate, scale = everything(trainer), trainer.param_groups[0]["lr"], trainer.loss_scale
        metrics = trainer.step(batch)
        losses.append(metrics.loss)
        assert metrics.skipped == found.skipped[number]
        assert trainer.loss_scale == found.scales[number]
        if not metrics.skipped:
            scheduler.step()
        if number == 3:
            after = everything(trainer)
            assert [name for name in after if not torch.equal(after[name], before_it[name])] == []
            assert trainer.param_groups[0]["lr"] == rate
            assert trainer.loss_scale == scale / 2
    assert [loss for number, loss in enumerate(losses) if number != 3] == [
        loss for number, loss in enumerate(found.losses) if number != 3
    ]
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_a_scheduler_hooked_to_the_optimizer_follows_real_steps_only(build: Build) -> None:
    ours = multiplied()
    trainer = build(ours, loss=clamped_loss, precision="fp16")
    scheduler = decay(trainer.optimizer)
    trainer.optimizer.register_step_post_hook(lambda *_: scheduler.step())
    rates = []
    for number in range(5):
        with torch.no_grad():
            ours[2].factor.fill_(1e30 if number in (1, 2) else 1.0)
        trainer.step(regression(12, seed=number))
        rates.append(scheduler.last_epoch)
    assert rates == [1, 1, 1, 2, 3]


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_an_overflow_is_noticed_although_clipping_by_value_would_hide_it(build: Build, device: str) -> None:
    def modules() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(6, 3)]

    # Gradients of one sign: what overflows is infinite, not NaN, and clipping would make it finite.
    batches = [(regression(12, seed=seed)[0].abs(), torch.full((12, 3), 30.0)) for seed in range(3)]
    ours, plain = modules(), modules()
    found = mixed_reference.train(plain, batches, precision="fp16", loss=nn.functional.mse_loss, clip_value=0.1)
    assert found.skipped[0], "the test's own overflow"
    trainer = build(ours, loss=nn.functional.mse_loss, precision="fp16", clip_grad_value=0.1, device=device)
    metrics = [trainer.step(batch) for batch in batches]
    assert [step.skipped for step in metrics] == found.skipped
    assert [step.loss for step in metrics] == found.losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_the_scale_doubles_after_as_many_good_steps_as_grad_scaler_takes(build: Build) -> None:
    trainer = build(multiplied(), loss=clamped_loss, precision="fp16")
    assert trainer._scale is not None
    assert trainer._scale.growth_interval == torch.amp.GradScaler("cpu").get_growth_interval()
    assert trainer.loss_scale == torch.amp.GradScaler("cpu").get_scale()
    trainer._scale.growth_interval = 3
    scales = []
    for number in range(7):
        trainer.step(regression(12, seed=number))
        scales.append(trainer.loss_scale / 65536)
    assert scales == [1, 1, 2, 2, 2, 4, 4]


def test_a_run_that_overflows_at_every_scale_ends_with_an_error_that_says_so(build: Build) -> None:
    ours = multiplied()
    trainer = build(ours, loss=clamped_loss, precision="fp16")
    trainer.step(regression(12))
    with torch.no_grad():
        ours[2].factor.fill_(float("inf"))
    before = everything(trainer)
    skipped = 0
    with pytest.raises(relay.LossScaleExhausted, match="bf16"):  # noqa: PT012
        while skipped < 100:
            assert trainer.step(regression(12, seed=2)).skipped
            skipped += 1
    assert skipped == 30  # from 2**16 to 2**-14
    after = everything(trainer)
    assert [name for name in after if not torch.equal(after[name], before[name])] == []
