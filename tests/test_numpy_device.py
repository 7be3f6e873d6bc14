"""The numpy device trains what plain PyTorch trains, to float32 rounding, with the same dropout masks."""


import pytest
import small_models

DEVICES = ["numpy", "numpy:float64"]
MODELS = ["gpt", "bert", "llama"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", MODELS)
def test_gradients_of_a_step_are_those_of_plain_pytorch(which: str, device: str) -> None:
    ours = small_models.relayed(which, "steep", 1, device)
    plain = small_models.plain(which, "steep", 1)
    assert small_models.gradient_error(ours.gradients, plain.gradients) < 1e-5


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize(("optimizer", "within"), [("sgd", 1e-5), ("adamw", 1e-3)])
def test_losses_of_twenty_steps_are_those_of_plain_pytorch(which: str, optimizer: str, within: float) -> None:
    ours = small_models.relayed(which, optimizer, 20, "numpy")
    plain = small_models.plain(which, optimizer, 20)
    assert small_models.loss_error(ours.losses, plain.losses) < within
    assert ours.losses[-1] != ours.losses[0]
