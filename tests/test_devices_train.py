"""Every device that needs no accelerator trains what plain PyTorch trains: GPT, BERT with masks and dropout, Llama.

In float32, with the same dropout masks: the gradients of a step, and the losses of twenty. Adam's first steps are the
gradients' signs nearly, which amplifies rounding where gradients are near zero: hence its wider bound.
"""

import pytest
import small_models

from hal import registry

DEVICES = ["cpu", "opencl", "onnx:cpu", "numpy", "sim"]
MODELS = ["gpt", "bert", "llama"]
PROBES = registry.devices()


def require(device: str) -> None:
    """Skip where there is no such device, with the reason."""
    family = device.partition(":")[0]
    known = [probe for probe in PROBES if probe.name.partition(":")[0] == family]
    if not any(probe.available for probe in known):
        pytest.skip(f"no {device} works here: " + "; ".join(f"{probe.name}: {probe.reason}" for probe in known))


@pytest.mark.parametrize("device", [*DEVICES, "numpy:float64"])
@pytest.mark.parametrize("which", MODELS)
def test_gradients_of_a_step_are_those_of_plain_pytorch(which: str, device: str) -> None:
    require(device)
    ours = small_models.relayed(which, "steep", 1, device)
    plain = small_models.plain(which, "steep", 1)
    assert small_models.gradient_error(ours.gradients, plain.gradients) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize(("optimizer", "within"), [("sgd", 1e-5), ("adamw", 1e-3)])
def test_losses_of_twenty_steps_are_those_of_plain_pytorch(
    which: str, optimizer: str, within: float, device: str
) -> None:
    require(device)
    ours = small_models.relayed(which, optimizer, 20, device)
    plain = small_models.plain(which, optimizer, 20)
    assert small_models.loss_error(ours.losses, plain.losses) < within
    assert ours.losses[-1] != ours.losses[0]
