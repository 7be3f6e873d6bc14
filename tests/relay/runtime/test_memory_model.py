"""What the relay promises about memory: bytes on the device, bytes over the link, bytes on the host."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from backends.cpu import CpuDevice
from hal.errors import OutOfMemory
from relay.models import GPT
from tests.support import reference
from tests.support.zoo.plain_models import Build

WIDTH = 16
LINEAR_BYTES = (WIDTH * WIDTH + WIDTH) * 4
"""One layer of `linears`; weight and bias both fill whole multiples of 64 bytes."""


def gpt(layers: int, hidden: int = 16) -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=32, layers=layers, hidden=hidden, heads=2, sequence=12, tied=False)


def text(batch: int = 8) -> dict[str, Tensor]:
    return reference.text_batches(1, batch, vocabulary=32)[0]


def linears(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def vectors(batch: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)


def training_state(model: nn.Module) -> int:
    """Weights, gradients and both moments in fp32."""
    return 16 * sum(parameter.numel() for parameter in model.parameters())


# **** the device ****


def peaks(build: Build, layers: int, steps: int = 2, **options: Any) -> int:
    trainer = build(gpt(layers), **options)
    return max(trainer.step(text()).device_peak_bytes for _ in range(steps))


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample("cpu:discrete")
def test_with_the_stash_on_the_host_the_device_peak_is_the_same_for_any_depth(build: Build, device: str) -> None:
    found = {layers: peaks(build, layers, stash="host", device=device) for layers in (4, 12, 48)}
    assert len(set(found.values())) == 1, found


def test_with_the_stash_on_the_device_the_peak_grows_with_depth(build: Build) -> None:
    shallow, deep = peaks(build, 4), peaks(build, 12)
    assert deep - shallow == 8 * 8 * 12 * 16 * 4  # eight more activations of (8, 12, 16) floats


def test_both_cpu_devices_account_alike(build: Build) -> None:
    for stash in ("device", "host"):
        assert peaks(build, 4, stash=stash) == peaks(build, 4, stash=stash, device="cpu:discrete")


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize("form", ["whole", "list"])
@pytest.mark.sample("whole-cpu:discrete")
def test_with_the_stash_on_the_host_the_peak_does_not_grow_with_the_number_of_micro_batches(
    build: Build, form: str, device: str
) -> None:
    found = {}
    for microbatches in (2, 4, 8):  # of two sequences each
        options = {"stash": "host", "device": device, "microbatches": microbatches}
        if form == "whole":
            step = build(gpt(4), **options).step(text(2 * microbatches))
        else:
            step = build(linears(4), loss=nn.functional.mse_loss, **options).step(vectors(2 * microbatches))
        found[microbatches] = step.device_peak_bytes
    assert len(set(found.values())) == 1, found


def test_training_steps_do_not_grow_the_device_or_the_host(build: Build) -> None:
    trainer = build(gpt(3), stash="host", device="cpu:discrete")
    seen = set()
    for _ in range(12):
        step = trainer.step(text())
        seen.add((step.device_peak_bytes, step.host_bytes))
    assert len(seen) == 1


def test_a_capacity_below_a_twentieth_of_the_training_state_is_enough(build: Build) -> None:
    model, plain = gpt(48, hidden=32), gpt(48, hidden=32)
    capacity = training_state(model) // 20 - 1
    batch = text(4)
    trainer = build(model, stash="host", capacity=capacity, device="cpu:discrete")
    found = trainer.step(batch)
    assert found.device_peak_bytes <= capacity
    assert found.loss == reference.train(plain, [batch])[0]
    reference.assert_same_state(model.state_dict(), plain.state_dict())


def test_a_capacity_of_exactly_the_peak_is_enough_and_a_byte_less_is_not(build: Build) -> None:
    peak = peaks(build, 3, steps=1)
    assert peaks(build, 3, capacity=peak) == peak
    with pytest.raises(OutOfMemory):
        peaks(build, 3, capacity=peak - 1)


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_a_capacity_below_one_layer_is_refused_with_the_bytes_needed_and_what_reduces_them(
    build: Build, device: str
) -> None:
    needed = peaks(build, 3, steps=1, device=device)
    model = gpt(3)
    before = reference.copy_of(model.state_dict())
    trainer = build(model, capacity="3kB", device=device)
    with pytest.raises(OutOfMemory) as caught:
        trainer.step(text())
    message = str(caught.value)
    assert f"{needed:,}" in message
    assert caught.value.capacity == 3000
    for option in ("stash='host'", "slots=1", "micro-batches", "capacity="):
        assert option in message
    reference.assert_same_state(model.state_dict(), before)


def test_options_that_are_used_up_are_not_advised(build: Build) -> None:
    trainer = build(gpt(3), capacity="3kB", stash="host", slots=1)
    with pytest.raises(OutOfMemory) as caught:
        trainer.step(text())
    assert "stash='host'" not in str(caught.value)
    assert "slots=" not in str(caught.value)


def test_evaluating_and_predicting_between_steps_stays_within_the_capacity(build: Build) -> None:
    batch = text()
    peak = peaks(build, 3, steps=1)
    trainer = build(gpt(3), capacity=peak)
    for _ in range(2):
        trainer.evaluate(batch)
        trainer.step(batch)


# **** the link ****


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize(("layers", "slots"), [(6, 1), (6, 2), (6, 4), (3, 8), (1, 2)])
@pytest.mark.sample(3)
def test_weights_are_sent_once_in_each_direction(build: Build, layers: int, slots: int, device: str) -> None:
    # Forward visits N layers. Backward visits the N - 1 below the last, which had its backward at the turn. Of those
    # the slots still hold slots - 1 then: the layers visited just before the last. Nothing is kept from the step
    # before, since every layer was updated. Micro-batches do not matter.
    loads = max(layers, 2 * layers - slots)
    for microbatches in (1, 4):
        trainer = build(
            linears(layers), loss=nn.functional.mse_loss, slots=slots, device=device, microbatches=microbatches
        )
        for _ in range(3):
            assert trainer.step(vectors()).weight_bytes == loads * LINEAR_BYTES


# **** kernels ****


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All programs that are given to a device."""
    seen: list[Any] = []
    original = CpuDevice.compile

    def counting(device: CpuDevice, program: Any) -> Any:
        seen.append(program)
        return original(device, program)

    monkeypatch.setattr(CpuDevice, "compile", counting)
    return seen


@pytest.mark.parametrize("layers", [2, 12])
def test_layers_that_are_alike_are_captured_and_compiled_once(build: Build, compiled: list[Any], layers: int) -> None:
    build(gpt(layers)).step(text())
    # Forward and backward of the embedding and of the block, and one for the head with the loss.
    assert len({program.fingerprint for program in compiled}) == 5
    assert len({id(program) for program in compiled}) == 5


class Activated(nn.Module):
    """A layer with an activation whose options are bound, as GELUs of transformers have them."""

    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.activation = functools.partial(nn.functional.gelu, approximate=approximate)

    def forward(self, states: Tensor) -> Tensor:
        return self.activation(self.linear(states))


def test_layers_with_equally_bound_functions_share_programs_and_others_do_not(
    build: Build, compiled: list[Any]
) -> None:
    kinds = ["tanh", "none", "tanh", "none", "tanh"]
    torch.manual_seed(0)
    layers = [Activated(kind) for kind in kinds]
    plain = copy.deepcopy(layers)
    trainer = build(layers, loss=nn.functional.mse_loss, microbatches=1)
    loss = trainer.step(vectors()).loss
    inputs, targets = vectors()
    assert loss == nn.functional.mse_loss(nn.Sequential(*plain)(inputs), targets).item()
    # Two each for the first layer (whose inputs have no gradient), one layer of either kind, and the head with the loss
    assert len({id(program) for program in compiled}) == 2 + 2 + 2 + 1


# **** the host ****


def rows_of(trainer: relay.Trainer) -> dict[str, int]:
    return {state: size for state, _, size in trainer.ledger.rows()}


def test_the_hosts_ledger_is_exact(build: Build) -> None:
    trainer = build(linears(3), loss=nn.functional.mse_loss)
    step = trainer.step(vectors())
    assert rows_of(trainer) == {
        "weights": 3 * LINEAR_BYTES,
        "first moments": 3 * LINEAR_BYTES,
        "second moments": 3 * LINEAR_BYTES,
        "step counts": 6 * 4,
    }
    assert step.host_bytes == trainer.ledger.total == 9 * LINEAR_BYTES + 24


def test_a_device_with_memory_of_its_own_needs_two_layers_of_gradients_in_transit(build: Build) -> None:
    trainer = build(linears(3), loss=nn.functional.mse_loss, device="cpu:discrete")
    trainer.step(vectors())
    assert rows_of(trainer)["gradients in transit"] == 2 * LINEAR_BYTES
    assert trainer.ledger.total == 11 * LINEAR_BYTES + 24


def test_a_stash_on_the_host_holds_the_batch_the_activations_and_one_gradient(build: Build) -> None:
    trainer = build(linears(5), loss=nn.functional.mse_loss, stash="host")
    trainer.step(vectors(8))
    activation = 8 * WIDTH * 4  # all micro-batches of one activation
    assert rows_of(trainer)["stash of boundary activations"] == (2 + 4 + 1) * activation


def test_frozen_layers_cost_the_host_their_weights_alone(build: Build) -> None:
    layers = linears(4)
    layers[0].requires_grad_(False)
    layers[2].requires_grad_(False)
    trainer = build(layers, loss=nn.functional.mse_loss)
    trainer.step(vectors())
    assert rows_of(trainer)["weights"] == 4 * LINEAR_BYTES
    assert rows_of(trainer)["first moments"] == 2 * LINEAR_BYTES


@pytest.mark.parametrize(
    ("options", "row", "copies"),
    [
        ({"exact_ties": False}, "gradient sums of tied parameters", 1),
        ({"stash": "host"}, "tied gradients of each micro-batch", 4),
    ],
)
def test_a_tied_parameter_is_held_once_with_one_sum_of_gradients_or_one_for_each_micro_batch(
    build: Build, options: dict[str, Any], row: str, copies: int
) -> None:
    torch.manual_seed(0)
    tied = GPT(vocabulary=32, layers=2, hidden=16, heads=2, sequence=12, tied=True)
    trainer = build(tied, **options)
    trainer.step(text())
    assert rows_of(trainer)[row] == copies * 32 * 16 * 4
    assert rows_of(trainer)["weights"] == 4 * sum(parameter.numel() for parameter in tied.parameters())


def test_the_state_of_a_torch_optimizer_is_in_the_ledger(build: Build) -> None:
    momentum = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    trainer = build(linears(3), loss=nn.functional.mse_loss, optimizer=momentum)
    for _ in range(2):
        trainer.step(vectors())
    assert rows_of(trainer) == {"weights": 3 * LINEAR_BYTES, "momentum_buffer": 3 * LINEAR_BYTES}
