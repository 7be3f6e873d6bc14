"""Layers that share a slot, and segments that keep their tensors: every bit stays, and every byte is foreseen.

The reference is plain PyTorch, or the relay as it is without either, which other tests hold to plain PyTorch.
"""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import relay
from hal import registry
from hal.errors import OutOfMemory
from relay.cli import main
from relay.models import GPT
from relay.option_schema import fixed_scale
from relay.simulation.described.transformer_shape import ModelShape
from tests.support import reference
from tests.support.zoo.plain_models import Build

STEPS = 3


def gpt(**changes: Any) -> GPT:
    torch.manual_seed(0)
    settings = {"vocabulary": 64, "layers": 4, "hidden": 16, "heads": 2, "sequence": 12, "tied": False}
    return GPT(**{**settings, **changes})


def trained(build: Build, make: Callable[[], Any], batches: list[Any], **options: Any) -> tuple[Any, dict[str, Tensor]]:
    trainer = build(make(), **options)
    losses = [trainer.step(batch).loss for batch in batches]
    return losses, reference.copy_of(trainer.state_dict())


def assert_same(ours: tuple[Any, dict[str, Tensor]], other: tuple[Any, dict[str, Tensor]]) -> None:
    assert ours[0] == other[0]
    reference.assert_same_state(ours[1], other[1])


OPTIONS = [
    {"layers_per_slot": 2},
    {"layers_per_slot": 3, "stash": "host", "slots": 1, "device": "cpu:discrete"},
    {"recompute": False},
    {"recompute": False, "layers_per_slot": 2, "stash": "host", "slots": 4, "device": "cpu:discrete"},
    {"recompute": 3, "layers_per_slot": 5, "device": "cpu:discrete"},
]


# **** every bit stays ****


@pytest.mark.parametrize("options", OPTIONS[2:], ids=str)
@pytest.mark.sample(2)
def test_the_relay_stays_plain_pytorch_with_a_ragged_last_piece(build: Build, options: dict[str, Any]) -> None:
    batches = reference.text_batches(STEPS, 7)  # pieces of 3, 3 and 1
    plain = gpt()
    losses = reference.train(plain, batches, 3)
    ours = trained(build, gpt, batches, microbatches=3, **options)
    assert_same(ours, (losses, reference.state_of(plain)))


def test_dropout_draws_the_same_masks_however_many_layers_share_a_slot(build: Build) -> None:
    make = functools.partial(gpt, dropout=0.3)
    batches = reference.text_batches(STEPS)
    expected = trained(build, make, batches, precision="bf16")
    for options in (OPTIONS[1], OPTIONS[3], OPTIONS[4]):
        assert_same(trained(build, make, batches, precision="bf16", **options), expected)


def mixed_list() -> list[nn.Module]:
    """Linear layers, activations and running statistics, none built as its neighbour is."""
    torch.manual_seed(0)
    return [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh(),
            nn.Linear(8, 3)]  # fmt: skip


def regression(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.sample(2)
def test_modules_of_a_list_share_a_slot_whatever_they_are(build: Build, options: dict[str, Any]) -> None:
    batches = [regression(seed) for seed in range(STEPS)]
    plain = mixed_list()
    losses = reference.train(plain, batches, 3, loss=nn.functional.mse_loss)
    ours = trained(build, mixed_list, batches, microbatches=3, loss=nn.functional.mse_loss, **options)
    assert_same(ours, (losses, reference.state_of(plain)))


def test_an_output_that_the_backward_reads_is_kept_once(build: Build) -> None:
    """ReLU's gradient asks for its result, which is the next segment's input and in the stash already."""

    def make() -> list[nn.Module]:
        return [nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)]

    batch = (torch.randn(8, 16), torch.randn(8, 16))
    peaks = [
        build(make(), loss=nn.functional.mse_loss, recompute=recompute).step(batch).device_peak_bytes
        for recompute in (True, False)
    ]
    assert peaks[1] <= peaks[0]


class Counting(nn.Module):
    """A block whose buffer changes in the forward, and decides what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        scaled = torch.tanh(self.inner(value)) * (1 + self.calls)
        self.calls += 1
        return value + scaled


class Tower(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(4))
        if shared:
            for layer in self.layers:
                layer.calls = self.layers[0].calls

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        value = inputs
        for layer in self.layers:
            value = layer(value)
        return {"loss": nn.functional.mse_loss(value, targets)}


@pytest.mark.parametrize("options", [*OPTIONS[1:4], {"slots": 3, "device": "cpu:discrete"}], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["own buffers", "a shared buffer"])
@pytest.mark.sample(3)
def test_buffers_change_once_and_in_order(build: Build, options: dict[str, Any], shared: bool) -> None:
    def make() -> Tower:
        torch.manual_seed(0)
        return Tower(shared)

    generator = torch.Generator().manual_seed(1)
    batches = [
        {"inputs": torch.randn(6, 8, generator=generator), "targets": torch.randn(6, 8, generator=generator)}
        for _ in range(2)
    ]
    expected = trained(build, make, batches, microbatches=3)
    assert_same(trained(build, make, batches, microbatches=3, **options), expected)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[3]], ids=str)
@pytest.mark.sample(2)
def test_layers_sit_out_come_and_go(build: Build, options: dict[str, Any]) -> None:
    batches = reference.text_batches(4)

    def run(**more: Any) -> tuple[Any, dict[str, Tensor]]:
        trainer = build(gpt(), clip_grad_norm=0.1, **more)
        losses = [trainer.step(batches[0], active_layers=[0, 2]).loss, trainer.step(batches[1]).loss]
        trainer.remove(1)
        torch.manual_seed(5)
        trainer.insert(2, GPT(vocabulary=64, layers=1, hidden=16, heads=2, sequence=12).blocks[0])
        losses += [trainer.step(batches[2]).loss, trainer.step(batches[3], active_layers=[0, 1, 3]).loss]
        losses.append(trainer.evaluate(batches[0]).loss)
        return losses, reference.copy_of(trainer.state_dict())

    assert_same(run(**options), run())


class Output(NamedTuple):
    loss: Tensor


class Deciding(nn.Module):
    """It looks at the batch: where nothing is masked it takes a shorter path."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, inputs: Tensor, mask: Tensor, targets: Tensor) -> Output:
        value = inputs if bool(mask.all()) else torch.tanh(inputs * mask)
        for layer in self.layers:
            value = layer(value)
        return Output(nn.functional.mse_loss(value, targets))


def test_a_path_that_the_batch_decides_is_still_looked_for(build: Build) -> None:
    torch.manual_seed(2)
    plain = Deciding()
    model = Deciding()
    model.load_state_dict(plain.state_dict())
    mask = torch.ones(4, 8)
    mask[0, 3:] = 0  # of the first piece alone
    batches = [{"inputs": torch.randn(4, 8), "mask": mask, "targets": torch.randn(4, 8)}] * 2
    losses = reference.train(plain, batches, 2)
    ours = trained(build, lambda: model, batches, microbatches=2, layers_per_slot=2, recompute=False)
    assert_same(ours, (losses, reference.state_of(plain)))


def test_a_checkpoint_goes_on_under_any_layout(build: Build, tmp_path: Path) -> None:
    batches = reference.text_batches(4)
    make = functools.partial(gpt, dropout=0.2)
    whole = build(make())
    losses = [whole.step(batch).loss for batch in batches]
    first = build(make(), layers_per_slot=1)
    for batch in batches[:2]:
        first.step(batch)
    first.save(tmp_path / "saved")
    second = build(make(), layers_per_slot=2, recompute=False, stash="host")
    second.load(tmp_path / "saved")
    assert [second.step(batch).loss for batch in batches[2:]] == losses[2:]
    reference.assert_same_state(second.state_dict(), whole.state_dict())


def test_groups_built_alike_share_a_program(build: Build) -> None:
    trainer = build(gpt(layers=7), layers_per_slot=2, recompute=False)
    trainer.step(reference.text_batches(1)[0])
    compiled = next(iter(trainer._compiler.cache)).stages
    names = [stage.segment.name for stage in compiled]
    assert names[1:5] == ["blocks.0+blocks.1", "blocks.2+blocks.3", "blocks.4+blocks.5", "blocks.6"]
    assert len({id(stage.captured) for stage in compiled[1:5]}) == 2


@pytest.mark.parametrize("device", ["numpy", "onnx:cpu", "opencl:0"])
@pytest.mark.sample("onnx:cpu")
def test_devices_of_core_graphs_keep_too(build: Build, device: str) -> None:
    try:
        registry.open(device).close()
    except Exception as missing:
        pytest.skip(str(missing))
    make = functools.partial(gpt, layers=2, dropout=0.3)
    batches = reference.text_batches(2)
    expected, _ = trained(build, make, batches)
    options = {"recompute": False, "layers_per_slot": 2, "stash": "host"}
    losses, _ = trained(build, make, batches, device=device, **options)
    assert losses == pytest.approx(expected, rel=1e-5)


# **** every byte is foreseen ****

LAYOUTS = [
    {"layers_per_slot": 2, "stash": "host"},
    {"layers_per_slot": 2, "stash": "device", "recompute": False},
    {"recompute": 2, "stash": "host"},
    {"recompute": 2, "stash": "device", "slots": 3},
]


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("batch", [4, 5], ids=["even", "ragged"])
@pytest.mark.sample(3)
def test_simulated_memory_is_that_of_a_real_run(build: Build, options: dict[str, Any], batch: int) -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=64, layers=3, hidden=32, heads=2, sequence=12, tied=False)
    trainer = build(model, device="cpu:discrete", microbatches=2, **options)
    metrics = trainer.step(reference.text_batches(1, batch=batch)[0])
    found = relay.simulate(
        ModelShape(3, 32, 2, 64), device="generic", seq=12, batch=batch, microbatches=2, precision="fp32",
        **options,
    )  # fmt: skip
    assert found.memory.device_total == metrics.device_peak_bytes
    assert found.memory.host_total == metrics.host_bytes


def test_a_ragged_batch_leaves_the_memory_of_even_ones_as_it_was(build: Build) -> None:
    trainer = build(gpt(layers=3), recompute=False, stash="host", device="cpu:discrete", microbatches=2)
    even, ragged, again = (trainer.step(reference.text_batches(1, batch=batch)[0]).host_bytes for batch in (4, 5, 4))
    assert again == even < ragged


def peak(build: Build, layers: int = 4, **options: Any) -> int:
    return build(gpt(layers=layers), **options).step(reference.text_batches(1)[0]).device_peak_bytes


@pytest.mark.parametrize("layers_per_slot", [1, 2])
def test_what_is_kept_streams_through_the_device_too(build: Build, layers_per_slot: int) -> None:
    options = {"recompute": False, "stash": "host", "layers_per_slot": layers_per_slot, "device": "cpu:discrete"}
    assert len({peak(build, layers, **options) for layers in (4, 9)}) == 1


def test_a_capacity_of_exactly_the_peak_is_enough_and_a_byte_less_is_not(build: Build) -> None:
    options = {"recompute": 1, "layers_per_slot": 2, "stash": "host", "layers": 3}
    needed = peak(build, **options)
    assert peak(build, capacity=needed, **options) == needed
    with pytest.raises(OutOfMemory, match="recompute=True"):
        peak(build, capacity=needed - 1, **options)


def test_sharing_a_slot_saves_boundary_values_and_keeping_saves_arithmetic() -> None:
    options: dict[str, Any] = {"layers": 8, "hidden": 256, "seq": 128, "batch": 4, "microbatches": 2}
    options["precision"] = "fp32"
    alone, pairs, saved = (
        relay.simulate(device="a100-sxm-80gb", stash="device", **options, **more)
        for more in ({}, {"layers_per_slot": 2}, {"recompute": False})
    )
    boundary = 4 * 256 * 128 * 4  # of all micro-batches
    stashes = [found.memory.device["stash of activations"] for found in (alone, pairs)]
    assert stashes[0] - stashes[1] == 4 * boundary
    recomputed = alone.timeline.flops - saved.timeline.flops
    # All forward products but each layer's last, which no gradient needs.
    assert recomputed == 8 * (2 * 8 * 256 * 256 + 4 * 128 * 256) * 4 * 128
    tokens = 4 * 128
    found = saved.memory.device["saved tensors for backward"] / (8 * tokens * 4)
    assert found == pytest.approx(15 * 256, rel=0.01)  # as docs/memory.md says
    assert saved.step_seconds < alone.step_seconds


# **** asked for ****


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers_per_slot": 0}, "layers_per_slot=0 must be a whole number of at least 1"),
        ({"recompute": -1}, "recompute=-1 must be True, False, or the number"),
        ({"recompute": "all"}, "recompute='all' must be True, False, or the number"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        relay.Trainer(gpt(), **options)


def test_a_plan_keeps_where_that_is_faster_and_fits(tmp_path: Path) -> None:
    options: dict[str, Any] = {"layers": 6, "hidden": 256, "heads": 4, "vocabulary": 256, "seq": 128, "batch": 8}
    options |= {"device": "v100-sxm2-16gb", "state_dtypes": ["fp32"], "slots": [2], "loss_scale": "fixed"}
    quick = relay.plan(**options, stashes=["device"])
    assert quick.expected.fits
    assert quick.options["recompute"] is not True
    for reason in quick.reasons:
        share = re.search(r"would give \+([0-9.]+)%", reason)
        assert share is None or float(share.group(1)) <= 2.1, reason
    text = quick.as_toml()
    assert f"recompute = {json.dumps(quick.options['recompute'])}" in text
    assert "loss_scale = 65536.0" in text


def test_the_command_takes_both_and_so_does_a_run_file(tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("the quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")
    file = tmp_path / "run.toml"
    file.write_text('layers_per_slot = 2\nrecompute = false\nloss_scale = "fixed"\n', encoding="utf-8")
    small = ["--layers", "3", "--hidden", "16", "--heads", "2", "--seq", "16", "--batch", "4", "--steps", "2"]
    common = ["train", "--data", str(data), *small, "--no-sample", "--json"]
    found = {}
    for name, more in {
        "file": [str(file)],
        "options": ["--layers-per-slot", "2", "--recompute", "none", "--loss-scale", "65536"],
        "plain": [],
    }.items():
        result = CliRunner().invoke(main, [*common, *more, "--out", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        found[name] = json.loads(result.stdout)
    for name in ("file", "options"):
        used = found[name]["options"]
        assert (used["layers_per_slot"], used["recompute"], fixed_scale(used["loss_scale"])) == (2, False, 65536.0)
        assert found[name]["loss_last"] == found["plain"]["loss_last"]
    wrong = CliRunner().invoke(main, [*common, "--recompute", "some", "--out", str(tmp_path / "wrong")])
    assert wrong.exit_code == 2
    assert "the number of segments that recompute" in wrong.output


def test_training_and_simulation_have_the_same_loss_scale_unless_told_otherwise() -> None:
    answer = CliRunner().invoke(main, ["simulate", "--model", "gpt2", "--device", "v100-sxm2-16gb", "--json"])
    run = json.loads(answer.stdout)["run"]
    assert (run["precision"], run["loss_scale"]) == ("fp16", "dynamic")
    with relay.Trainer(gpt(), precision="fp16") as trainer:
        assert trainer._scale is not None
