"""Muon's Newton-Schulz iterations on the device: the numbers of torch's Muon, and the bytes that they need."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from hal import registry
from hal.conformance.faults import Faults, faulty
from relay.models import GPT
from relay.simulation.described.transformer_shape import ModelShape, ShapeError
from tests.support import devices, reference
from tests.support.zoo.plain_models import Build

MSE = nn.functional.mse_loss
LR = 0.05
ADAMW = {"lr": 3e-3, "weight_decay": 0.1}
ALL = 4
STEPS = 3


def stack() -> list[nn.Module]:
    """Wide and tall matrices, biases, a square one that is tied to nothing, and a head."""
    torch.manual_seed(0)
    middle = [nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 8)) for _ in range(2)]
    return [nn.Linear(8, 8), *middle, nn.Linear(8, 3)]


MATRICES = 8 * 8 + 4 * 8 * 20
"""The elements that Muon updates."""


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 3, generator=generator)


BATCHES = [batch(seed) for seed in range(STEPS)]


class Both:
    """torch's Muon for the matrices of layers and torch's AdamW for the others, as a script has them."""

    def __init__(self, model: Sequence[nn.Module]) -> None:
        everything = [one for module in model for one in module.parameters()]
        matrices = [one for module in model[:-1] for one in module.parameters() if one.ndim == 2]
        ids = {id(one) for one in matrices}
        others = [one for one in everything if id(one) not in ids]
        self.optimizers = torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(others, fused=True, **ADAMW)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def muon() -> relay.Muon:
    return relay.Muon(lr=LR, adamw=relay.AdamW(**ADAMW))


def plain(clip: float | None) -> dict[str, Tensor]:
    """The weights after `STEPS` steps of plain PyTorch."""
    model = stack()
    both = Both(model)
    parameters = [one for module in model for one in module.parameters()]
    for whole in BATCHES:
        both.zero_grad()
        for inputs, targets in zip(*(part.chunk(2) for part in whole), strict=True):
            (MSE(nn.Sequential(*model)(inputs), targets) / 2).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        both.step()
    return reference.copy_of(reference.state_of(model))


@pytest.fixture(scope="module")
def expected() -> dict[float | None, dict[str, Tensor]]:
    return {clip: plain(clip) for clip in (None, 0.05)}


def trained(build: Build, **options: Any) -> tuple[dict[str, Tensor], relay.Trainer, list[Any]]:
    model = stack()
    trainer = build(model, loss=MSE, optimizer=muon(), microbatches=2, **options)
    metrics = [trainer.step(one) for one in BATCHES]
    trainer.synchronize()
    return reference.copy_of(reference.state_of(model)), trainer, metrics


OPTIONS: list[dict[str, Any]] = [
    {},
    {"slots": 1},
    {"slots": 3, "resident_layers": 2},
    {"resident_layers": ALL},
]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_it_is_torchs_muon_to_the_bit(
    build: Build,
    expected: dict[float | None, dict[str, Tensor]],
    device: str,
    options: dict[str, Any],
    clip: float | None,
) -> None:
    for deferred in (False, True) if clip is not None else (False,):
        found, _, _ = trained(build, device=device, clip_grad_norm=clip, defer_updates=deferred, **options)
        reference.assert_same_state(found, expected[clip])


def orders(seeds: int) -> list[str]:
    return ["order=late", *(f"order=random,seed={seed}" for seed in range(seeds))]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("seeds", [1, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_it_is_in_every_order_of_execution(
    build: Build, expected: dict[float | None, dict[str, Tensor]], clip: float | None, seeds: int
) -> None:
    for order in orders(seeds):
        for options in OPTIONS:
            device = f"sim:generic,{order},poison=on"
            found, _, _ = trained(build, device=device, clip_grad_norm=clip, defer_updates=True, **options)
            reference.assert_same_state(found, expected[clip])


@pytest.mark.parametrize("clip", [None, 0.05])
def test_it_is_with_two_devices_that_take_layers_in_turn(
    build: Build, expected: dict[float | None, dict[str, Tensor]], clip: float | None
) -> None:
    found, _, _ = trained(build, device=["cpu:discrete"] * 2, clip_grad_norm=clip, defer_updates=True)
    reference.assert_same_state(found, expected[clip])


@pytest.mark.parametrize("device", ["numpy", "opencl:0", "onnx:cpu"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_devices_without_pytorch_agree_within_the_rounding_of_float32(
    build: Build, expected: dict[float | None, dict[str, Tensor]], device: str, clip: float | None
) -> None:
    devices.require(device)
    found, trainer, metrics = trained(build, device=device, clip_grad_norm=clip)
    for name, tensor in expected[clip].items():
        # Products are summed in another order, which now and then turns the last of bfloat16's 8 bits.
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-3), name
    if not trainer._session.device.info.unified:
        assert metrics[-1].optimizer_bytes == 2 * 2 * MATRICES


# **** bytes ****


@pytest.mark.parametrize("clip", [None, 0.05])
def test_each_matrix_crosses_the_link_once_each_way_in_bfloat16(build: Build, clip: float | None) -> None:
    for device, wanted in (("cpu", 0), ("cpu:discrete", 2 * 2 * MATRICES)):
        _, trainer, metrics = trained(build, device=device, clip_grad_norm=clip, defer_updates=True)
        assert [one.optimizer_bytes for one in metrics] == [wanted] * STEPS
        in_transit = [size for state, _, size in trainer.ledger.rows() if state == "matrices in transit"]
        assert in_transit == ([2 * 2 * 2 * 8 * 20] if wanted else [])  # two of the largest layer's


def test_the_ledger_before_the_first_step_is_that_after_it(build: Build) -> None:
    for clip in (None, 0.05):
        trainer = build(stack(), loss=MSE, optimizer=muon(), device="cpu:discrete", clip_grad_norm=clip)
        trainer.prepare(BATCHES[0])
        before = str(trainer.ledger)
        trainer.step(BATCHES[0])
        assert str(trainer.ledger) == before


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1, "resident_layers": 2}], ids=str)
def test_a_simulated_step_has_the_bytes_and_the_memory_of_a_real_one(build: Build, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=64, layers=4, hidden=32, heads=2, sequence=12, tied=False)
    common = {"microbatches": 2, "precision": "fp32", "optimizer": muon(), **options}
    trainer = build(model, device="cpu:discrete", defer_updates=True, **common)
    for _ in range(2):
        real = trainer.step(reference.text_batches(1, batch=4)[0])
    found = relay.simulate(ModelShape(4, 32, 2, 64), device="generic", seq=12, batch=4, must_fit=None, **common)
    assert found.memory.device_total == real.device_peak_bytes
    assert found.memory.host_total == real.host_bytes
    assert found.step is not None
    assert found.step.weight_bytes == real.weight_bytes
    assert found.step.optimizer_bytes == real.optimizer_bytes == 2 * 2 * 4 * 12 * 32 * 32


def test_a_plan_and_a_fit_know_what_it_needs_and_advise_no_narrow_states(build: Build) -> None:
    shape = ModelShape(4, 32, 2, 64)
    common: dict[str, Any] = {"precision": "fp32", "optimizer": muon()}
    one: dict[str, Any] = {"device": "generic", "stashes": ["host"], "slots": [2], "seq": 12, "batch": 2}
    planned = relay.plan(shape, **common, **one)
    torch.manual_seed(0)
    model = GPT(vocabulary=64, layers=4, hidden=32, heads=2, sequence=12, tied=False)
    trainer = build(model, device="cpu:discrete", **planned.options)
    for _ in range(2):
        real = trainer.step(reference.text_batches(1, batch=2)[0])
    expected = planned.expected
    assert expected.step is not None
    assert (expected.memory.device_total, expected.memory.host_total) == (real.device_peak_bytes, real.host_bytes)
    assert (expected.step.weight_bytes, expected.step.optimizer_bytes) == (real.weight_bytes, real.optimizer_bytes)
    same = relay.simulate(shape, device="generic", seq=12, batch=2, **planned.options)
    assert same.step_seconds == expected.step_seconds
    with pytest.raises(ShapeError, match="which has AdamW"):
        planned.as_toml()
    given: dict[str, Any] = {"device": "rtx-4090", "microbatches": 1, "allow_small_states": True}
    with pytest.raises(relay.NoFeasiblePlan, match="too little") as refused:
        relay.fit(shape, (2, 12), host_memory="100kB", **given, **common)
    assert "moments" not in str(refused.value)


def test_the_device_computes_the_iterations_in_simulated_time_too() -> None:
    shape = {"layers": 4, "hidden": 1024, "seq": 256, "batch": 4, "device": "a100-sxm-80gb"}
    found = {
        kind: relay.simulate(optimizer=optimizer, **shape)
        for kind, optimizer in (("AdamW", relay.AdamW()), ("Muon", muon()))
    }
    busy = {kind: one.step.timeline.busy["compute"] for kind, one in found.items() if one.step is not None}
    assert busy["Muon"] > busy["AdamW"]
    flops = {kind: one.step.timeline.flops for kind, one in found.items() if one.step is not None}
    # Five iterations of three products: of 1,024 x 3,072, 1,024 x 1,024 and, twice, 1,024 x 4,096 in each layer.
    products = sum(2 * long + 1 for long in (3, 1, 4, 4)) * 2 * 1024**3
    assert flops["Muon"] - flops["AdamW"] == pytest.approx(4 * 5 * products, rel=1e-6)


# **** what goes wrong ****


def test_a_device_lost_while_updates_wait_leaves_them_to_the_host(
    build: Build, expected: dict[float | None, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    monkeypatch.setattr(registry, "open", faulty(registry.open, faults))
    for device in ("cpu", "cpu:discrete"):
        for lost in (1, 6, 12, 18, 25):
            model = stack()
            trainer = build(
                model, loss=MSE, optimizer=muon(), microbatches=2, device=device, clip_grad_norm=0.05,
                defer_updates=True, on_device_lost="retry",
            )  # fmt: skip
            trainer.step(BATCHES[0])
            faults.restart(fail_at=lost, how="lost")
            for one in BATCHES[1:]:
                trainer.step(one)
            trainer.synchronize()
            reference.assert_same_state(reference.state_of(model), expected[0.05])
            faults.restart()


def test_an_evaluation_and_a_checkpoint_between_steps_see_the_updated_weights(build: Build, tmp_path: Path) -> None:
    def run(deferred: bool) -> tuple[list[float], dict[str, Tensor]]:
        trainer = build(
            stack(), loss=MSE, optimizer=muon(), device="cpu:discrete", clip_grad_norm=0.05, defer_updates=deferred
        )
        losses = []
        for number, one in enumerate(BATCHES):
            trainer.step(one)
            losses.append(trainer.evaluate(batch(9)).loss)
            trainer.step(one)
            trainer.save(tmp_path / f"{deferred} {number}", background=deferred)
        trainer.wait_saved()
        trainer.load(tmp_path / f"{deferred} 1")
        return losses, reference.copy_of(dict(trainer.state_dict()))

    losses, state = run(True)
    without, wanted = run(False)
    assert losses == without
    reference.assert_same_state(state, wanted)
