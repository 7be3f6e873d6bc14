"""Layers that stay on the device: no number changes, and their weights cross the link only when they have changed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from hal.errors import OutOfMemory
from relay.models import GPT
from tests.relay.runtime.test_adversaries import UNIFIED
from tests.support import reference
from tests.support.scenarios import SCENARIOS, differences
from tests.support.zoo.plain_models import Build

WIDTH = 16
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
"""Bytes of one layer of `linears`; both tensors fill whole multiples of 64."""

ALL = 5
"""The segments of `gpt()`: the embedding, three layers, and the head."""


def gpt(layers: int = 3, tied: bool = False) -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=32, layers=layers, hidden=16, heads=2, sequence=12, tied=tied)


def text(seed: int = 5, batch: int = 8) -> dict[str, Tensor]:
    return reference.text_batches(1, batch, vocabulary=32, seed=seed)[0]


def linears(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def vectors(seed: int = 1, batch: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, WIDTH, generator=generator), torch.randn(batch, WIDTH, generator=generator)


# **** no number changes ****


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample("cpu:discrete")
def test_training_with_any_number_of_resident_layers_is_plain_training(build: Build, device: str) -> None:
    batches = [text(seed) for seed in range(3)]
    plain = gpt()
    expected = reference.train(plain, batches)
    for resident in (0, 1, 2, ALL, "auto"):
        model = gpt()
        trainer = build(model, device=device, resident_layers=resident, capacity="1MB")
        assert [trainer.step(batch).loss for batch in batches] == expected
        reference.assert_same_state(model.state_dict(), plain.state_dict())


def orders(seeds: int) -> list[str]:
    return ["order=late", *(f"order=random,seed={seed}" for seed in range(seeds))]


SAMPLE = {"clipped, activations on the host": 2, "running statistics": "auto", "looked at between steps": 2}
"""Scenarios in which a copy on the device could be old, and how many layers are resident."""


@pytest.mark.parametrize(("scenario", "resident"), SAMPLE.items())
def test_some_orders_of_execution_give_the_numbers_of_a_run_without_resident_layers(
    scenario: str, resident: int | str
) -> None:
    for order in orders(2):
        assert not differences(scenario, f"sim:generic,{order},poison=on", resident_layers=resident)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:layer")  # experts run eagerly, which is what is wanted
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_order_of_execution_gives_the_numbers_of_a_run_without_resident_layers(scenario: str) -> None:
    runs = [(f"sim:generic,{order},poison=on", resident) for order in orders(10) for resident in (2, "auto")]
    runs += [(f"sim:{UNIFIED},{order},poison=on", 2) for order in orders(3)]
    wrong = {run: found for run in runs if (found := differences(scenario, run[0], resident_layers=run[1]))}
    assert not wrong


@pytest.mark.exhaustive
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
@pytest.mark.parametrize("layers", range(1, 13))
@pytest.mark.parametrize("clip", [None, 0.5])
def test_ten_orders_with_any_number_of_slots_and_layers_are_plain_training(
    build: Build, slots: int, layers: int, clip: float | None
) -> None:
    batches = [vectors(seed) for seed in range(3)]

    def trained(device: str, resident: int) -> list[Tensor]:
        modules = linears(layers)
        trainer = build(
            modules, loss=nn.functional.mse_loss, device=device, slots=slots, microbatches=2, resident_layers=resident,
            clip_grad_norm=clip, defer_updates=clip is not None,
        )  # fmt: skip
        for batch in batches:
            trainer.step(batch)
        trainer.synchronize()
        return list(reference.copy_of(nn.Sequential(*modules).state_dict()).values())

    expected = trained("cpu:discrete", 0)
    for order in orders(10):
        for resident in {1, layers // 2, layers}:
            found = trained(f"sim:generic,{order},poison=on", resident)
            assert all(map(torch.equal, found, expected)), (order, resident)


@pytest.mark.parametrize(("slots", "layers"), [(1, 4), (2, 1), (5, 3)])
@pytest.mark.sample(2)
def test_some_orders_with_some_numbers_of_slots_and_layers_are_plain_training(
    build: Build, slots: int, layers: int
) -> None:
    plain = linears(layers)
    batches = [vectors(seed) for seed in range(2)]
    reference.train(plain, batches, 2, loss=nn.functional.mse_loss)
    for order in orders(2):
        for resident in {layers // 2, layers}:
            modules = linears(layers)
            device = f"sim:generic,{order},poison=on"
            trainer = build(
                modules, loss=nn.functional.mse_loss, device=device, slots=slots, microbatches=2,
                resident_layers=resident,
            )  # fmt: skip
            for batch in batches:
                trainer.step(batch)
            reference.assert_same_state(reference.state_of(modules), reference.state_of(plain))


def test_gradients_in_a_region_that_layers_share_are_plain_gradients(build: Build) -> None:
    batches = [vectors(seed) for seed in range(3)]
    plain = linears(6)
    reference.train(plain, batches, 2, loss=nn.functional.mse_loss)
    for order in orders(3):
        modules = linears(6)
        trainer = build(
            modules, loss=nn.functional.mse_loss, device=f"sim:generic,{order},poison=on", microbatches=2,
            resident_layers=4, capacity=20 * LAYER,
        )  # fmt: skip
        found = [trainer.step(batch) for batch in batches][-1]
        assert found.resident_layers == 4
        reference.assert_same_state(reference.state_of(modules), reference.state_of(plain))


# **** what crosses the link ****


def test_bytes_over_the_link_fall_in_proportion_from_none_to_all(build: Build) -> None:
    layers, found = 11, {}
    for tenths in range(11):
        trainer = build(
            linears(layers), loss=nn.functional.mse_loss, device="cpu:discrete", slots=1,
            resident_layers=round(tenths * (layers - 1) / 10),
        )  # fmt: skip
        for number in range(2):  # the first step sends the resident layers
            found[tenths] = trainer.step(vectors(number)).weight_bytes
    # The last layer is sent once a step in any case, the others twice or, resident, once.
    assert found == {tenths: (2 * layers - 1 - tenths) * LAYER for tenths in range(11)}


def test_a_resident_layer_that_is_frozen_is_never_sent_again(build: Build) -> None:
    modules = linears(6)
    for module in modules[:5]:
        module.requires_grad_(False)
    trainer = build(modules, loss=nn.functional.mse_loss, device="cpu:discrete", resident_layers=6)
    assert [trainer.step(vectors(number)).weight_bytes for number in range(3)] == [6 * LAYER, LAYER, LAYER]


class Adapted(nn.Module):
    """A frozen layer with a trained correction of low rank between its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH)
        for frozen in (self.first, self.second):
            frozen.requires_grad_(False)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.second(self.first(value) + self.up(self.down(value))))


@pytest.mark.parametrize("device", ["cpu:discrete", "sim:generic,order=late,poison=on"])
def test_of_a_layer_with_an_adapter_only_the_adapter_is_sent_again(build: Build, device: str) -> None:
    def made() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Adapted() for _ in range(3)]

    modules, plain = made(), made()
    batches = [vectors(number) for number in range(3)]
    trainer = build(modules, loss=nn.functional.mse_loss, device=device, resident_layers=3)
    sent = [trainer.step(batch).weight_bytes for batch in batches]
    adapter = 4 * 2 * 4 * WIDTH
    assert sent[1:] == [3 * adapter, 3 * adapter]
    reference.train(plain, batches, loss=nn.functional.mse_loss)
    reference.assert_same_state(reference.state_of(modules), reference.state_of(plain))


def test_the_simulated_step_has_the_bytes_and_the_memory_of_a_real_one(build: Build) -> None:
    from relay.simulation.described.transformer_shape import ModelShape

    for resident, capacity in ((2, None), (6, None), ("auto", 450_000), (4, 520_000)):
        torch.manual_seed(0)
        model = GPT(vocabulary=64, layers=4, hidden=32, heads=2, sequence=12, tied=False)
        options = {"microbatches": 2, "stash": "host", "resident_layers": resident, "precision": "fp32"}
        trainer = build(model, device="cpu:discrete", capacity=capacity, **options)
        for _ in range(2):
            real = trainer.step(reference.text_batches(1, batch=4)[0])
        found = relay.simulate(
            ModelShape(4, 32, 2, 64), device="generic", seq=12, batch=4, must_fit=None, capacity=capacity, **options
        )
        assert found.memory.device_total == real.device_peak_bytes
        assert found.memory.resident_layers == real.resident_layers
        if found.step is not None:
            assert found.step.weight_bytes == real.weight_bytes


def test_all_layers_resident_take_the_time_of_one_transfer_of_the_weights_a_step() -> None:
    from tests.support.ideal_machines import ideal, run

    none, every = run(ideal(link=1e9)), run(ideal(link=1e9), resident_layers="auto")
    assert none.step is not None
    assert every.step is not None
    assert every.step.weight_bytes < 0.6 * none.step.weight_bytes
    assert every.step_seconds < none.step_seconds


# **** what changes between steps ****


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.sample("bf16")
def test_weights_that_the_user_changes_between_steps_are_sent_again(build: Build, precision: str) -> None:
    def run(resident: int) -> dict[str, Tensor]:
        model = gpt()
        trainer = build(model, device="cpu:discrete", resident_layers=resident, precision=precision)
        for number in range(3):
            trainer.step(text(number))
            with torch.no_grad():
                model.blocks[1].feed_in.weight.mul_(0.5)
        return reference.copy_of(model.state_dict())

    reference.assert_same_state(run(ALL), run(0))


def test_an_evaluation_between_steps_uses_the_resident_copies_and_the_new_weights(build: Build) -> None:
    model = gpt()
    trainer = build(model, device="cpu:discrete", resident_layers=ALL)
    for number in range(2):
        trainer.step(text(number))
        found = trainer.evaluate(text(7))
        with torch.no_grad():
            plain = sum(float(model(**piece).loss) / 4 for piece in reference.cut(text(7), 4))
        assert found.loss == pytest.approx(plain, rel=1e-6)
        assert trainer.evaluate(text(8)).weight_bytes == 0


def test_auto_counts_anew_for_an_evaluation_and_goes_back(build: Build) -> None:
    model, plain = gpt(8), gpt(8)
    trainer = build(model, device="cpu:discrete", resident_layers="auto", capacity=520_000)
    batches = [text(number, batch=32) for number in range(3)]
    counts = []
    for batch in batches:
        counts.append((trainer.step(batch).resident_layers, trainer.evaluate(text(9, batch=4)).resident_layers))
    assert 0 < counts[0][0] < counts[0][1]
    assert len(set(counts)) == 1
    reference.train(plain, batches)
    reference.assert_same_state(model.state_dict(), plain.state_dict())


def test_layers_are_inserted_and_removed_among_resident_ones(build: Build) -> None:
    def run(resident: int) -> list[Tensor]:
        modules = linears(4)
        trainer = build(modules, loss=nn.functional.mse_loss, device="cpu:discrete", resident_layers=resident)
        trainer.step(vectors(0))
        torch.manual_seed(3)
        trainer.insert(2, nn.Linear(WIDTH, WIDTH))
        trainer.step(vectors(1))
        trainer.remove(0)
        trainer.step(vectors(2))
        return list(reference.copy_of(trainer.state_dict()).values())

    assert all(map(torch.equal, run(3), run(0)))


def test_a_checkpoint_that_is_loaded_replaces_resident_weights(build: Build, tmp_path: Path) -> None:
    trainer = build(gpt(), device="cpu:discrete", resident_layers=ALL)
    trainer.step(text(0))
    trainer.save(tmp_path / "saved")
    losses = [trainer.step(text(number)).loss for number in (1, 2)]
    trainer.load(tmp_path / "saved")
    assert [trainer.step(text(number)).loss for number in (1, 2)] == losses


def test_a_device_that_is_opened_again_gets_its_resident_layers_again(build: Build) -> None:
    model, plain = gpt(), gpt()
    trainer = build(model, device="cpu:discrete", resident_layers=2)
    trainer.step(text(0))
    trainer.reopen()
    assert trainer.step(text(1)).resident_layers == 2
    reference.train(plain, [text(0), text(1)])
    reference.assert_same_state(model.state_dict(), plain.state_dict())


def test_clipped_updates_of_resident_layers_hide_behind_the_next_forward(build: Build) -> None:
    model, plain = gpt(), gpt()
    batches = [text(number) for number in range(3)]
    trainer = build(
        model, device="sim:generic,order=late,poison=on", resident_layers=3, clip_grad_norm=0.05, defer_updates=True
    )
    for batch in batches:
        trainer.step(batch)
    trainer.synchronize()
    stepper = reference.adamw(list(plain.parameters()))
    for batch in batches:
        stepper.zero_grad()
        pieces = reference.cut(batch, 4)
        reference.gradients_of(reference.caller(plain, None), pieces, reference.by_samples(pieces))
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        stepper.step()
    reference.assert_same_state(model.state_dict(), plain.state_dict())


def test_bf16_with_resident_layers_is_bf16_without(build: Build) -> None:
    model = gpt()
    trainer = build(model, device="cpu:discrete", resident_layers=ALL, precision="bf16")
    for number in range(3):
        trainer.step(text(number))
    other = gpt()
    without = build(other, device="cpu:discrete", precision="bf16")
    for number in range(3):
        without.step(text(number))
    reference.assert_same_state(model.state_dict(), other.state_dict())


# **** what does not fit ****


def test_more_resident_layers_than_fit_are_refused_with_the_number_that_fits(build: Build) -> None:
    options: dict[str, Any] = {"device": "cpu:discrete", "capacity": 20 * LAYER, "loss": nn.functional.mse_loss}
    modules = linears(20)
    before = reference.copy_of(reference.state_of(modules))
    with pytest.raises(OutOfMemory, match="resident_layers=") as caught:
        build(modules, resident_layers=18, **options).step(vectors())
    reference.assert_same_state(reference.state_of(modules), before)
    most = int(str(caught.value).partition("resident_layers=")[2].split()[0])
    assert 0 < most < 18
    assert build(linears(20), resident_layers=most, **options).step(vectors()).resident_layers == most
    with pytest.raises(OutOfMemory):
        build(linears(20), resident_layers=most + 1, **options).step(vectors())


def test_more_resident_layers_than_the_model_has_are_refused_before_the_first_step(build: Build) -> None:
    model = gpt()
    before = reference.copy_of(model.state_dict())
    trainer = build(model, device="cpu:discrete", resident_layers=ALL + 1)
    with pytest.raises(ValueError, match=r"resident_layers=6 is more than the model has: 5 segments.*at most 5"):
        trainer.step(text())
    reference.assert_same_state(model.state_dict(), before)
    with pytest.raises(ValueError, match="at most 14"):
        relay.simulate(layers=12, hidden=64, device="generic", resident_layers=99)


def test_auto_leaves_its_margin_free_and_is_logged_once(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    capacity = 20 * LAYER
    trainer = build(
        linears(20), loss=nn.functional.mse_loss, device="cpu:discrete", capacity=capacity, resident_layers="auto"
    )
    with caplog.at_level("INFO", logger="relay"):
        peaks = [trainer.step(vectors(number)).device_peak_bytes for number in range(3)]
    assert max(peaks) <= 0.95 * capacity
    assert max(peaks) > 0.95 * capacity - 2 * LAYER
    lines = [record.getMessage() for record in caplog.records if "resident_layers='auto'" in record.getMessage()]
    assert len(lines) == 1
    assert "of 20 segments stay on the device while training" in lines[0]


@pytest.mark.parametrize("value", [-1, 1.5, "all", True])
def test_a_number_of_resident_layers_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="a whole number of at least 0, or 'auto'"):
        relay.Trainer(gpt(), resident_layers=value)
