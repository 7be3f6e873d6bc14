"""Batch norms that average over all batches (`momentum=None`) train on devices of core graphs as in PyTorch."""

import copy
import importlib
from contextlib import closing

import pytest
import torch
from torch import nn

import relay
from tests.support import devices


@pytest.mark.parametrize("name", ["numpy", "opencl", "onnx:cpu"])
def test_a_batch_norm_without_momentum_trains_as_in_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.require(name)
    capture, traces = importlib.import_module("relay.capture.capture"), list[str]()
    trace = capture._trace
    monkeypatch.setattr(capture, "_trace", lambda request: traces.append(request.name) or trace(request))
    compiled: list[int] = []
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten(), nn.Linear(36, 2)]
    plain, inputs = nn.Sequential(*copy.deepcopy(layers)), torch.randn(6, 2, 5, 5)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    trainer = relay.Trainer(layers, nn.functional.mse_loss, optimizer=relay.SGD(lr=0.1), device=name, microbatches=1)
    with closing(trainer):
        for step in range(3):
            batch = (inputs * (step + 1), torch.full((6, 2), float(step)))
            loss = nn.functional.mse_loss(plain(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert trainer.step(batch).loss == pytest.approx(loss.item(), rel=1e-5)
            compiled.append(len(traces))
        assert len(set(compiled)) == 1, "the model is compiled once"
        for mine, expected in zip(trainer.state_dict().values(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
