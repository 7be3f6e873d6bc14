"""Several devices give the numbers of one, to the bit, and devices that cannot work together are refused by name."""

from typing import Any

import pytest
import torch
from torch import nn

import relay
from hal.errors import Unavailable
from hal.registry import names_in
from tests.support.scenarios import SCENARIOS, differences

COUNTS = (2, 3, 4, 8)  # with 8 there are fewer micro-batches than devices, and with some models fewer segments
SAMPLE = {
    "activations on the device": 8,
    "activations on the host, one slot": 3,
    "tied, activations on the host": 2,
    "running statistics, two slots, on the host": 4,
    "values that many layers use, on the host": 3,
}
"""What `make test` runs, and on how many devices."""

ignoring = pytest.mark.filterwarnings("ignore:layer", "ignore:The loss of")


def cases() -> list[Any]:
    return [
        pytest.param(scenario, count, marks=() if SAMPLE.get(scenario) == count else pytest.mark.exhaustive)
        for scenario in SCENARIOS
        for count in COUNTS
    ]


@ignoring
@pytest.mark.parametrize(("scenario", "count"), cases())
def test_several_devices_give_the_bits_of_one(scenario: str, count: int) -> None:
    assert differences(scenario, ["cpu:discrete"] * count) == []


GROUPS: list[tuple[str, int, dict[str, Any]]] = [
    ("activations on the device", 2, {"layers_per_visit": (2, 3), "resident_layers": 1}),
    ("running statistics, two slots, on the host", 2, {"layers_per_visit": (3, 2)}),
    ("kept on the device", 3, {"layers_per_visit": 2, "device_speeds": (1, 0.5, 1)}),
    ("activations on the host, one slot", 1, {"layers_per_visit": (2, 3)}),
]


@ignoring
@pytest.mark.parametrize(("scenario", "count", "options"), GROUPS)
def test_groups_of_layers_change_no_bit(scenario: str, count: int, options: dict[str, Any]) -> None:
    assert differences(scenario, ["cpu:discrete"] * count, **options) == []


ORDERS = ("order=late", *(f"order=random,seed={seed}" for seed in range(10)))


def adversaries() -> list[Any]:
    """Two or three devices in turn; `make test` has late and two random orders of one scenario each."""
    numbered = [(scenario, order) for scenario in SCENARIOS for order in ORDERS]
    few = [("activations on the device", ORDERS[2]), ("activations on the host, one slot", ORDERS[1])]
    few.append(("one slot, one micro-batch", ORDERS[0]))
    return [
        pytest.param(*case, 2 + number % 2, marks=() if case in few else pytest.mark.exhaustive)
        for number, case in enumerate(numbered)
    ]


@ignoring
@pytest.mark.parametrize(("scenario", "order", "count"), adversaries())
def test_several_devices_give_these_bits_in_every_order(scenario: str, order: str, count: int) -> None:
    assert differences(scenario, [f"sim:generic,{order},poison=on"] * count) == []


def small() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (["cpu", "cpu"], "names 'cpu' 2 times"),
        (["numpy", "cpu:discrete", "numpy"], "names 'numpy' 2 times"),
        (["cpu", "cpu:discrete"], "'cpu' works in host memory"),
        (["sim:m2-ultra-76c", "sim"], "'sim:m2-ultra-76c' works in host memory"),
        (["sim", "sim:generic,order=late"], "need the same order"),
        ([], "names no device"),
    ],
)
def test_devices_that_cannot_work_together_are_refused_by_name(devices: list[str], message: str) -> None:
    with pytest.raises((ValueError, Unavailable), match=message):
        relay.Trainer(small(), nn.functional.mse_loss, device=devices)


def test_speeds_are_given_for_each_device() -> None:
    with pytest.raises(ValueError, match="has 2 numbers, and"):
        relay.Trainer(small(), nn.functional.mse_loss, device="cpu:discrete", device_speeds=[1, 0.5])
    with pytest.raises(ValueError, match="layers_per_visit"):
        relay.Trainer(small(), nn.functional.mse_loss, device="cpu:discrete", layers_per_visit=(1, 2, 3))


def test_a_device_that_is_not_here_is_named_and_the_others_are_closed() -> None:
    with pytest.raises(Unavailable, match="cpu:elsewhere"):
        relay.Trainer(small(), nn.functional.mse_loss, device=["cpu:discrete", "cpu:elsewhere"])


def test_device_strings_are_joined_by_commas_and_may_have_commas_of_their_own() -> None:
    assert names_in("cpu:discrete, cpu:discrete") == ["cpu:discrete", "cpu:discrete"]
    assert names_in("sim:t4,order=late,seed=3,cpu:discrete,cuda:0,plain") == [
        "sim:t4,order=late,seed=3", "cpu:discrete", "cuda:0,plain",
    ]  # fmt: skip


def test_each_device_has_its_share_of_the_layers_and_none_more_than_its_capacity() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64) for _ in range(7)]
    batch = torch.randn(8, 64), torch.randn(8, 64)
    with relay.Trainer(layers, nn.functional.mse_loss, device="cpu:discrete,cpu:discrete", capacity="1MB") as trainer:
        metrics = trainer.step(batch)
        sent = sum(tensor.nbytes for tensor in trainer.state_dict().values())
        # 13 visits of 7 layers. At the turn two slots of one device hold the last layer and one before it, and those
        # of the other device the two between: three layers are not sent again.
        assert metrics.weight_bytes == (13 - 3) * sent // 7
        assert 0 < metrics.device_peak_bytes <= 2**20
        assert trainer.device_name == "cpu:discrete,cpu:discrete"
