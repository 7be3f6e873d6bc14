"""Convolutional networks on devices that execute core programs train as plain PyTorch does in float64.

Each network starts with a convolution of the data, whose input has no gradient, and uses every kind of convolution in
PyTorch: strided, dilated, grouped, depthwise and transposed, with and without a bias.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import relay
from tests.support import devices, reference
from tests.support.zoo import small_models

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
DEVICES = ["numpy", "onnx:cpu", "opencl"]


def net(space: int, bias: bool) -> list[nn.Module]:
    """A list of layers over `space` dimensions, the first two fed the data or what has no parameters before it."""
    conv, transposed = CONVOLUTIONS[space], TRANSPOSED[space]
    torch.manual_seed(space)
    return [
        conv(3, 4, 3, padding=1, bias=bias),
        nn.Sequential(nn.Tanh(), conv(4, 6, 2, stride=2, bias=not bias)),
        nn.Sequential(conv(6, 4, 3, padding=2, dilation=2, groups=2, bias=bias), nn.Tanh()),
        nn.Sequential(conv(4, 4, 3, padding="same", groups=4, bias=bias), nn.Tanh()),
        nn.Sequential(transposed(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, bias=bias), nn.Tanh()),
        nn.Sequential(transposed(6, 2, 2, dilation=2, bias=not bias), nn.Flatten(), nn.LazyLinear(4)),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [True, False], ids=["with bias", "without"])
@pytest.mark.parametrize("space", [1, 2, 3])
@pytest.mark.sample("1-without-onnx:cpu", "2-with bias-opencl", "2-without-numpy", "3-with bias-onnx:cpu")
def test_every_convolution_has_pytorchs_loss_and_gradients(space: int, bias: bool, device: str) -> None:
    devices.require(device)
    data = torch.randn(4, 3, *[6, 5, 4][:space], generator=torch.Generator().manual_seed(7))
    wanted = torch.full((4, 4), 3.0)  # far away for all samples: the sums that biases' gradients are do not cancel
    layers = net(space, bias)
    plain = nn.Sequential(*layers)
    plain(data)  # gives the last layer its shape
    layers = list(copy.deepcopy(plain))
    plain.double()
    loss = F.mse_loss(plain(data.double()), wanted.double())
    loss.backward()  # type: ignore[no-untyped-call]
    expected = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}

    before = reference.copy_of(nn.Sequential(*layers).state_dict())
    trainer = relay.Trainer(
        layers, loss=F.mse_loss, device=device, optimizer=relay.SGD(lr=small_models.STEEP), microbatches=2
    )
    try:
        assert abs(trainer.step((data, wanted)).loss - loss.item()) < 1e-5 * abs(loss.item())
        after = reference.copy_of(trainer.state_dict())
    finally:
        trainer.close()
    found = {name: (before[name] - after[name]).double() / small_models.STEEP for name in expected}
    assert small_models.gradient_error(found, expected) < 1e-5
