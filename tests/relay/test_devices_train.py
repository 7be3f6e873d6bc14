"""Every device that needs no accelerator trains what plain PyTorch trains: GPT, BERT with masks and dropout, Llama.

In float32, with the same dropout masks: the gradients of a step, and the losses of twenty. Adam's first steps are the
gradients' signs nearly, which amplifies rounding where gradients are near zero: hence its wider bound.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from relay.cli import main
from tests.support import devices, matrix
from tests.support.zoo import small_models
from tests.support.zoo.table import Entry, Group, cases, entries

DEVICES = ["cpu", "opencl", "onnx:cpu", "numpy", "sim"]


@pytest.mark.parametrize("device", [*DEVICES, "numpy:float64"])
@pytest.mark.parametrize("entry", cases(Group.DEVICE))
@pytest.mark.sample("gpt-cpu", "gpt-opencl", "bert-onnx:cpu", "bert-sim", "llama-numpy", "llama-numpy:float64")
def test_gradients_of_a_step_are_those_of_plain_pytorch(entry: Entry, device: str) -> None:
    devices.require(device)
    ours = small_models.relayed(entry.name, "steep", 1, device)
    plain = small_models.plain(entry.name, "steep", 1)
    assert small_models.gradient_error(ours.gradients, plain.gradients) < entry.tolerance


@pytest.mark.parametrize(
    ("device", "which", "optimizer"), matrix.sampled(["sgd", "adamw"], DEVICES, entries(Group.DEVICE))
)
@pytest.mark.sample("cpu-bert-adamw", "onnx:cpu-gpt-sgd", "numpy-bert-sgd", "sim-llama-sgd")
def test_losses_of_twenty_steps_are_those_of_plain_pytorch(which: str, optimizer: str, device: str) -> None:
    within = {"sgd": 1e-5, "adamw": 1e-3}[optimizer]
    devices.require(device)
    ours = small_models.relayed(which, optimizer, 20, device)
    plain = small_models.plain(which, optimizer, 20)
    assert small_models.loss_error(ours.losses, plain.losses) < within
    assert ours.losses[-1] != ours.losses[0]


TEXT = "the relay carries one layer at a time to the device, and the next one while it computes. " * 40


def trained(device: str, folder: Path) -> dict[str, Any]:
    """What `relay train` says of a short run."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    words = f"--data {folder / 'text.txt'} --out {folder / device.replace(':', '-')} --device {device} --json"
    words += " --no-sample --layers 2 --hidden 16 --heads 2 --seq 16 --batch 4 --microbatches 2 --steps 12 --lr 0.01"
    result = CliRunner().invoke(main, ["train", *words.split()])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.mark.parametrize("device", ["opencl", "onnx:cpu", "numpy", "sim"])
@pytest.mark.sample("onnx:cpu")
def test_relay_train_runs_the_main_job_as_on_the_cpu(device: str, tmp_path: Path) -> None:
    devices.require(device)
    ours, theirs = trained(device, tmp_path), trained("cpu", tmp_path)
    assert ours["loss_last"] < ours["loss_first"] - 0.5
    for figure in ("loss_first", "loss_last", "held_out_after"):
        assert ours[figure] == pytest.approx(theirs[figure], abs=1e-3)
