"""Every error of a device has a name: what a driver or a backend raises is a HalError with the device and the call."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import relay
from hal import probing, registry
from hal.errors import CompileError, DeviceLost, HalError, Unavailable
from relay import cli
from tests.support.stubs import misbehaving

ERRORS: dict[str, type[HalError]] = {
    **dict.fromkeys(("OpenRaises", "OpenExits", "OpenGivesNothing", "OpenNamesAnother"), Unavailable),
    **dict.fromkeys(("CompileRaises", "CompileGivesNothing"), CompileError),
    "DeviceIsLost": DeviceLost,
}
SILENT = ("KernelDoesNothing", "HalfTheBits", "HalfTheElements")  # no error: the self-test is what notices these


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(fault, f"{misbehaving.__name__}:{fault}", probing.GROUP) for fault in misbehaving.RUNS]
    monkeypatch.setattr(registry, "entry_points", lambda *, group: points)


def train_one_step(device: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)]
    trainer = relay.Trainer(layers, loss=nn.functional.mse_loss, device=device, microbatches=1)
    trainer.step((torch.randn(4, 4), torch.randn(4, 2)))
    trainer.close()


@pytest.mark.parametrize("fault", [fault for fault in misbehaving.RUNS if fault not in SILENT])
def test_a_step_on_a_device_that_fails_raises_a_named_error(fault: str) -> None:
    with pytest.raises(HalError) as raised:
        train_one_step(fault)
    assert isinstance(raised.value, ERRORS.get(fault, HalError))
    assert misbehaving.RUNS[fault][1] in str(raised.value)
    if fault not in ("DeviceIsLost", "RunRaises", "RunExits"):
        assert fault in str(raised.value), "the device is named"


@pytest.mark.parametrize("fault", ["CompileRaises", "RunExits", "CloseRaises", "DeviceIsLost"])
@pytest.mark.sample("RunExits", "DeviceIsLost")
def test_the_command_ends_with_one_line(fault: str, tmp_path: Path) -> None:
    sizes = ["--layers", "2", "--hidden", "16", "--heads", "2", "--seq", "16", "--steps", "1", "--no-sample"]
    result = CliRunner().invoke(cli.main, ["train", "--device", fault, "--out", str(tmp_path / "run"), *sizes])
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("relay: ")
    assert misbehaving.RUNS[fault][1] in last
    if fault == "DeviceIsLost":
        assert "The run ended after step 0: nothing was saved" in last
