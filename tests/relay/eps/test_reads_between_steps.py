"""The model between two steps, and after the last, is what plain PyTorch's would be for anything that reads it."""

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import relay
from relay.models import GPT
from tests.support import mixed_reference, reference
from tests.support.zoo.plain_models import Build, Stack, batches, gpt, perceptron, regression

NORM = 0.05


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).train()


def average_of(model: nn.Module) -> torch.optim.swa_utils.AveragedModel:
    return torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample("cpu:discrete")
def test_averages_of_weights_and_generated_text_are_those_of_plain_pytorch_after_each_clipped_step(
    build: Build, device: str
) -> None:
    ours, plain = llama(), llama()
    stepper = torch.optim.SGD(plain.parameters(), lr=0.5)
    averages = average_of(ours), average_of(plain)
    trainer = build(ours, microbatches=1, optimizer=relay.SGD(lr=0.5), clip_grad_norm=1.0, device=device)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        tokens = torch.randint(0, 64, (4, 12), generator=generator)
        batch = {"input_ids": tokens, "labels": tokens}
        trainer.step(batch)
        averages[0].update_parameters(ours)
        stepper.zero_grad()
        plain(**batch).loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        stepper.step()
        averages[1].update_parameters(plain)
        reference.assert_same_state(ours.state_dict(), plain.state_dict())
        written = [
            model.generate(tokens[:1, :2], max_new_tokens=4, do_sample=False).tolist() for model in (ours, plain)
        ]
        assert written[0] == written[1]
    reference.assert_same_state(averages[0].state_dict(), averages[1].state_dict())


@pytest.mark.parametrize("options", [{"clip_grad_norm": NORM}, {"precision": "fp16"}], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample(3)
def test_tensors_of_the_model_are_those_of_after_the_step_as_soon_as_it_returns(
    build: Build, device: str, options: dict[str, Any]
) -> None:
    model, plain = gpt(), gpt()
    stepper = reference.adamw(list(plain.parameters()))
    trainer = build(model, device=device, **options)
    for batch in reference.text_batches(3):
        mixed_reference.train(
            plain, [batch], optimizer=stepper, precision=options.get("precision", "fp32"),
            clip_norm=options.get("clip_grad_norm"),
        )  # fmt: skip
        trainer.step(batch)
        reference.assert_same_state(dict(model.state_dict()), plain.state_dict())


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": NORM}, {"precision": "bf16"}], ids=str)
@pytest.mark.sample(2)
def test_weights_written_between_steps_are_trained_on(build: Build, options: dict[str, Any]) -> None:
    model, plain = gpt(), gpt()
    stepper = reference.adamw(list(plain.parameters()))
    trainer = build(model, **options)
    for batch in reference.text_batches(3):
        mixed_reference.train(
            plain, [batch], optimizer=stepper, precision=options.get("precision", "fp32"),
            clip_norm=options.get("clip_grad_norm"),
        )  # fmt: skip
        trainer.step(batch)
        with torch.no_grad():
            for changed in (model, plain):
                for parameter in changed.parameters():
                    parameter.mul_(0.5)
        reference.assert_same_state(trainer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.sample(3)
def test_after_close_safetensors_saves_the_model(tmp_path: Path, tied: bool, precision: str, device: str) -> None:
    model = GPT(layers=2, hidden=16, heads=2, sequence=12, vocabulary=64, tied=tied)
    with relay.Trainer(model, precision=precision, device=device, clip_grad_norm=NORM, defer_updates=True) as trainer:
        trainer.step(reference.text_batches(1)[0])
        expected = reference.copy_of(trainer.state_dict())
        in_use = trainer.ledger.total
    reference.assert_same_state(model.state_dict(), expected)
    for tensor in [*model.parameters(), *model.buffers()]:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    saved: dict[str, Tensor] = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], expected[name]) for name in saved)
    left = {state for state, _, _ in trainer.ledger.rows()}
    assert not left & {"weights", "rounded weights", "buffers", "gradients"}
    assert trainer.ledger.total < in_use


def test_a_trainer_that_is_dropped_gives_the_model_memory_of_its_own(tmp_path: Path) -> None:
    model = Stack()
    trainer = relay.Trainer(model)
    trainer.step(batches(1)[0])
    del trainer
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))


def test_a_trainer_that_is_closed_leaves_alone_a_model_that_another_has_taken_over() -> None:
    modules = perceptron()
    plain = copy.deepcopy(modules)
    loss = nn.functional.mse_loss
    losses = reference.train(plain, [regression(seed=seed) for seed in range(3)], loss=loss)
    first = relay.Trainer(modules, loss, optimizer=relay.AdamW(lr=1e-3, weight_decay=0.01))
    assert first.step(regression(seed=0)).loss == losses[0]
    first.close()
    with relay.Trainer(modules, loss) as second:
        second.prepare(regression())
        first.close()
        second.step(regression())


def test_a_closed_trainer_refuses_to_train_and_says_what_to_do() -> None:
    trainer = relay.Trainer(perceptron(), nn.functional.mse_loss)
    trainer.step(regression())
    trainer.close()
    trainer.close()
    for use in (trainer.step, trainer.evaluate, trainer.prepare):
        with pytest.raises(relay.RelayError, match="This trainer is closed"):
            use(regression())
    assert trainer.state_dict()
