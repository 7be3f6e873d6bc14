"""A simulation knows its model from a module, a configuration or a few numbers, or says why it cannot."""

from dataclasses import replace
from typing import Any

import pytest

import relay
from relay.models import GPT
from relay.models.gpt import Block
from relay.simulation.described.describe import describe
from relay.simulation.described.transformer_shape import GroupedBlock, ModelShape, ShapeError
from relay.simulation.plan_file import caution


def test_a_module_on_the_meta_device_is_simulated_as_its_shape_is() -> None:
    import torch

    with torch.device("meta"):
        module = GPT(vocabulary=256, layers=5, hidden=64, heads=2, sequence=32, tied=True)
        ids = torch.zeros(8, 32, dtype=torch.int64)
    example = {"input_ids": ids, "labels": ids}
    options: dict[str, Any] = {"device": "rtx-4090", "microbatches": 4}
    found = relay.simulate(module, example=example, **options)
    shape = ModelShape(5, 64, 2, 256, tied=True)
    same = relay.simulate(shape, batch=8, seq=32, **options)
    assert found.step_seconds == pytest.approx(same.step_seconds, rel=0.02)
    assert found.memory.parameters == same.memory.parameters
    assert all(parameter.is_meta for parameter in module.parameters())
    with pytest.raises(ShapeError, match="needs an example"):
        relay.simulate(module)


def test_a_named_model_has_the_parameters_that_its_paper_says() -> None:
    assert relay.simulate("llama-3-8b", device="h200-sxm").memory.parameters == pytest.approx(8.03e9, rel=0.001)


def test_causal_attention_takes_less_time_than_that_of_an_encoder() -> None:
    shape = ModelShape(2, 64, 2, 100)
    options: dict[str, Any] = {"device": "rtx-4090", "seq": 4096, "software": "fused"}
    seconds = [relay.simulate(replace(shape, causal=causal), **options).step_seconds for causal in (True, False)]
    assert seconds[0] < seconds[1]


def test_a_plan_for_fewer_heads_of_keys_is_not_for_the_model_of_relay_train() -> None:
    assert caution(ModelShape(2, 64, 4, 256, tied=True), 2, 64, 4) is None
    assert "2 heads of keys and values" in str(caution(ModelShape(2, 64, 4, 256, kv_heads=2, tied=True), 2, 64, 4))
    assert "heads of 32" in str(caution(ModelShape(2, 64, 4, 256, head_size=32, tied=True), 2, 64, 4))


def test_the_grouped_layer_is_the_usual_one_where_every_head_has_its_own_keys() -> None:
    import torch

    torch.manual_seed(0)
    grouped, usual = GroupedBlock(ModelShape(1, 32, 4)), Block(32, 4, 0.0)
    usual.load_state_dict(grouped.state_dict())
    states = torch.randn(2, 8, 32)
    torch.testing.assert_close(grouped(states), usual(states))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "Which model"),
        ({"model": "gpt9"}, "no model 'gpt9'"),
        ({"layers": 3}, "needs both layers and hidden"),
        ({"layers": 3, "hidden": 100, "heads": 7}, "multiple of heads"),
        ({"model": "gpt2", "batch": 2, "microbatches": 4}, "cannot be cut"),
    ],
)
def test_a_model_or_batch_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        relay.simulate(**options)


@pytest.mark.parametrize(
    ("hidden", "heads"), [(128, 1), (768, 6), (1600, 10), (8192, 64), (64, 1), (192, 2), (1601, 1), (1, 1)]
)
def test_the_default_number_of_heads_divides_the_hidden_size_into_heads_of_about_128(hidden: int, heads: int) -> None:
    assert hidden % heads == 0
    shape = describe(layers=1, hidden=hidden).shape
    assert isinstance(shape, ModelShape)
    assert shape.heads == heads


@pytest.mark.parametrize(
    "option",
    [
        {"stash": "disk"},
        {"state_dtype": "fp64"},
        {"recompute": -1},
        {"recompute": "none"},
        {"loss_scale": 3.0},
        {"loss_scale": None},
        {"clip_grad_norm": -1},
        {"clip_grad_norm": "1"},
        {"slots": 0},
        {"layers_per_slot": 0},
        {"microbatches": 0},
        {"microbatches": 2.0},
    ],
    ids=str,
)
def test_what_the_trainer_refuses_is_refused_in_the_same_words(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(option))}=") as simulated:
        relay.simulate(layers=1, hidden=32, heads=2, **option)
    with pytest.raises(ValueError, match=f"^{next(iter(option))}=") as trained:
        relay.Trainer(GPT(layers=1, hidden=32), **option)
    assert str(simulated.value) == str(trained.value)


@pytest.mark.parametrize("option", [{"seq": 0}, {"batch": 0}, {"batch": True}], ids=str)
def test_a_step_has_at_least_one_token(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        relay.simulate(layers=1, hidden=32, heads=2, microbatches=1, **option)
