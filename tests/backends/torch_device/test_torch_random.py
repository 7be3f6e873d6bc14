"""Draws made of PyTorch ops are those of `hal.random`, to the bit, and programs for accelerators draw with them."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from backends.torch_device import program
from backends.torch_device import random as torch_random
from hal import random as counter_random
from hal.random import RandomKey

KEYS = [RandomKey(0, 0, 0, 0), RandomKey(2**64 - 1, 2**32 - 1, 2**20 - 1, 2**32 - 1), RandomKey(7, 3, 2, 1)]
CPU = torch.device("cpu")


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0, 4), (4099,)])
@pytest.mark.parametrize("piece", [2**20, 100])
def test_draws_are_the_same_bits(
    key: RandomKey, shape: tuple[int, ...], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_random, "PIECE", piece)
    for probability in (0.0, 0.1, 1.0):
        mask = torch_random.keep_mask(key, 4095, shape, probability, CPU)
        assert torch.equal(mask, counter_random.keep_mask(key, 4095, shape, probability))
    assert torch.equal(torch_random.uniform(key, 7, shape, CPU), counter_random.uniform(key, 7, shape))


def test_a_program_for_an_accelerator_draws_there() -> None:
    device = torch.device("meta")
    for draw, arguments in ((counter_random.keep_mask, (0, (2, 3), 0.5)), (counter_random.normal, (0, (2, 3)))):
        graph = fx.Graph()
        drawn = graph.call_function(draw, (graph.placeholder("key"), *arguments))
        graph.output((drawn,))
        program.move_to_device(graph, device)
        (value,) = fx.GraphModule(torch.nn.Module(), graph)(KEYS[2])
        assert value.device == device
        on_host = [node for node in graph.nodes if node.target is draw]
        assert bool(on_host) == (draw is counter_random.normal)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_draws_are_the_same_bits() -> None:
    device = torch.device("cuda:0")
    for shape in ((3, 5), (5_000_001,)):
        mask = torch_random.keep_mask(KEYS[1], 5, shape, 0.3, device)
        assert torch.equal(mask.cpu(), counter_random.keep_mask(KEYS[1], 5, shape, 0.3))
        assert torch.equal(
            torch_random.uniform(KEYS[1], 5, shape, device).cpu(), counter_random.uniform(KEYS[1], 5, shape)
        )
