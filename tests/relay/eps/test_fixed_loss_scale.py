"""A fixed loss scale gives the numbers of a dynamic one that never overflows, and holds no gradients."""

from typing import Any

import pytest
import torch

import relay
from relay.models import GPT
from tests.support import reference


def trainer(**options: Any) -> relay.Trainer:
    torch.manual_seed(0)
    model = GPT(vocabulary=64, layers=3, hidden=16, heads=2, sequence=12, tied=False)
    return relay.Trainer(model, precision="fp16", device="cpu:discrete", microbatches=2, **options)


def gradient_bytes(made: relay.Trainer) -> int:
    return sum(size for state, _, size in made.ledger.rows() if state == "gradients")


def test_a_fixed_scale_trains_to_the_same_weights_and_holds_no_gradients() -> None:
    batches = reference.text_batches(3, batch=4)
    with trainer() as dynamic, trainer(loss_scale=65536.0) as fixed:
        assert [fixed.step(batch).loss for batch in batches] == [dynamic.step(batch).loss for batch in batches]
        reference.assert_same_state(fixed.state_dict(), dynamic.state_dict())
        assert gradient_bytes(fixed) == 0
        assert gradient_bytes(dynamic) > 0


def test_an_overflow_under_a_fixed_scale_is_an_error_that_names_the_layer() -> None:
    with trainer(loss_scale=2.0**120) as fixed:
        with pytest.raises(relay.GradientOverflow, match="overflowed under the fixed loss scale"):
            fixed.step(reference.text_batches(1, batch=4)[0])


@pytest.mark.parametrize("word", ["fixed", "dynamic"])
@pytest.mark.sample("fixed")
def test_every_word_that_simulate_and_plan_use_is_one_that_the_trainer_takes(word: str) -> None:
    """And what they suggest where a run does not fit: their own advice, taken."""
    shape: dict[str, Any] = {"layers": 62, "hidden": 8192, "device": "v100-sxm2-16gb", "precision": "fp16"}
    found = relay.simulate(**shape, host_memory="512GB", state_dtype="int8", loss_scale=word, must_fit=False)
    words = {text.partition("loss_scale=")[2].split()[0] for text in found.suggestions if "loss_scale=" in text}
    assert found.suggestions
    assert words == (set() if word == "fixed" else {"fixed"})
    for scale in {word, *words}:
        with trainer(loss_scale=scale) as made:
            assert made.loss_scale == 65536
            made.step(reference.text_batches(1, batch=4)[0])


def test_a_scale_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="power of two"):
        trainer(loss_scale=1000.0)
