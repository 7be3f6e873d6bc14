"""Evaluating and predicting: in eval mode, with the weights of now, and without a trace in the training."""

import functools

import pytest
import torch
from torch import nn

from tests.support import reference
from tests.support.zoo.plain_models import Build, gpt, regression, same_perceptrons


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample("cpu:discrete")
def test_evaluate_gives_the_loss_in_eval_mode_and_changes_nothing(build: Build, device: str) -> None:
    model, plain = gpt(3, dropout=0.5), gpt(3, dropout=0.5)
    batch, other = reference.text_batches(2)
    trainer = build(model, device=device)
    trainer.step(batch)
    plain.load_state_dict(trainer.state_dict())
    plain.eval()
    pieces = reference.cut(other, 4)
    shares = reference.by_samples(pieces)
    expected = sum((plain(**piece).loss * share).item() for piece, share in zip(pieces, shares, strict=True))
    assert trainer.evaluate(other).loss == expected
    assert trainer.evaluate(other).loss == expected
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())
    assert model.training


def test_evaluating_between_steps_does_not_change_the_training(build: Build) -> None:
    model, plain = gpt(3), gpt(3)
    batches = reference.text_batches(4)
    losses = reference.train(plain, batches)
    trainer = build(model, device="cpu:discrete")
    found = []
    for batch in batches:
        trainer.evaluate(batches[0])
        found.append(trainer.step(batch).loss)
        trainer.predict({"input_ids": batch["input_ids"]})
    assert found == losses
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


def test_evaluate_uses_running_statistics_and_leaves_them(build: Build) -> None:
    ours, plain = same_perceptrons(functools.partial(nn.BatchNorm1d, 8))
    trainer = build(ours, loss=nn.functional.mse_loss, microbatches=1)
    trainer.step(regression())
    whole = nn.Sequential(*plain)
    whole.load_state_dict(trainer.state_dict())
    inputs, targets = regression(seed=2)
    assert trainer.evaluate((inputs, targets)).loss == nn.functional.mse_loss(whole.eval()(inputs), targets).item()
    reference.assert_same_state(trainer.state_dict(), whole.state_dict())


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_weights_written_by_the_user_are_used_at_once(build: Build, device: str) -> None:
    ours, plain = same_perceptrons()
    trainer = build(ours, loss=nn.functional.mse_loss, device=device, microbatches=1, slots=8)
    inputs, targets = regression()
    trainer.evaluate((inputs, targets))
    with torch.no_grad():
        for module in (*ours, *plain):
            for parameter in module.parameters():
                parameter.mul_(0.5)
    expected = nn.functional.mse_loss(nn.Sequential(*plain)(inputs), targets).item()
    assert trainer.evaluate((inputs, targets)).loss == expected


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_predict_gives_the_whole_models_output_in_eval_mode(build: Build, device: str) -> None:
    model, plain = gpt(3, dropout=0.5), gpt(3, dropout=0.5).eval()
    trainer = build(model, device=device)
    inputs = reference.text_batches(1)[0]["input_ids"]
    output = trainer.predict({"input_ids": inputs})
    assert output.loss is None
    torch.testing.assert_close(output.logits, plain(inputs).logits, rtol=1e-6, atol=1e-6)
    assert model.training


@pytest.mark.parametrize("size", [1, 3, 10])
def test_predict_gives_a_lists_output_for_batches_of_any_size(build: Build, size: int) -> None:
    ours, plain = same_perceptrons(functools.partial(nn.Dropout, 0.5))
    trainer = build(ours, loss=nn.functional.mse_loss)
    inputs, _ = regression(size)
    torch.testing.assert_close(trainer.predict(inputs), nn.Sequential(*plain).eval()(inputs), rtol=1e-6, atol=1e-6)


def test_predict_with_labels_gives_the_logits_and_the_loss_of_the_whole_batch(build: Build) -> None:
    plain = gpt(2).eval()
    batch = reference.text_batches(1)[0]
    output = build(gpt(2)).predict(batch)
    torch.testing.assert_close(output.logits, plain(**batch).logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.loss, plain(**batch).loss, rtol=1e-6, atol=1e-6)
