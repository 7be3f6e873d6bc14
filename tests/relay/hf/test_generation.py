"""Generation through the relay against `model.generate` of transformers, and `relay generate` on a folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn

import relay
from relay.cli import main
from relay.hf.generation import CannotGenerate, bucket, choose, generate

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
ROTARY = {"num_key_value_heads": 1, "intermediate_size": 32, "max_position_embeddings": 128, "initializer_range": 0.5}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": ROTARY,
    "Qwen2": ROTARY,
    "Qwen3": {**ROTARY, "head_dim": 8},
    "Mistral": {**ROTARY, "sliding_window": 128},
    "Gemma": {**ROTARY, "head_dim": 8},
    "Phi3": {**ROTARY, "pad_token_id": 0},
    "GPTNeoX": {"intermediate_size": 32, "max_position_embeddings": 128, "initializer_range": 0.5},
}


def make(family: str, **further: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES.get(family, {}), **further})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts, of which one is shorter."""
    tokens = torch.randint(3, 64, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    tokens[0, :3], mask[0, :3] = 0, 0
    return tokens, mask


def expected(model: Any, tokens: torch.Tensor, mask: torch.Tensor, count: int, **given: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.generate(
            tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, **given
        )


def test_greedy_text_between_steps_is_that_of_the_model_and_leaves_training_as_it_was(tmp_path: Path) -> None:
    tokens, mask = prompts()
    model = make("Llama", attn_implementation="eager")
    model.generation_config.repetition_penalty = 1.3  # as the folders of chat models have it
    model.generation_config.suppress_tokens = [4, 9]
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, learning_rate=1e-2, save_strategy="no", report_to="none", use_cpu=True
    )

    class Write(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                self.found = self.trainer.generate(tokens, mask, max_new_tokens=12, pad_token_id=0, eos_token_id=[])
                self.expected = expected(kwargs["model"], tokens, mask, 12, eos_token_id=None)

    writer = Write()
    trainer = relay.hf.RelayTrainer(model, arguments, train_dataset=rows, callbacks=[writer])
    writer.trainer = trainer
    trainer.train()
    assert torch.equal(writer.found, writer.expected)
    plain = transformers.Trainer(make("Llama", attn_implementation="eager"), arguments, train_dataset=rows)
    plain.train()
    for (name, one), other in zip(plain.model.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_of_each_family_is_that_of_the_model(family: str) -> None:
    tokens, mask = prompts()
    model = make(family)
    ends = [5, 6, 7, 8]
    wanted = expected(model, tokens, mask, 30, eos_token_id=ends)
    with relay.Trainer(model, microbatches=2, device="cpu:discrete") as trainer:
        found = generate(trainer, model, tokens, mask, max_new_tokens=30, pad_token_id=0, eos_token_id=ends)
    assert torch.equal(found, wanted)


def test_models_without_a_static_cache_are_refused_by_name() -> None:
    tokens, mask = prompts()
    windowed = make("Mistral", sliding_window=8)
    with pytest.raises(CannotGenerate, match="MistralForCausalLM has a window of 8 tokens"):
        generate(None, windowed, tokens, mask)
    state_space = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=64, hidden_size=8, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(CannotGenerate, match="MambaForCausalLM"):
        generate(None, state_space, tokens, mask)
    with pytest.raises(ValueError, match="padded on the left"):
        generate(None, make("Llama"), tokens, mask.flip(1))


def test_drawn_tokens_follow_the_distribution_and_its_nucleus() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    random = torch.Generator().manual_seed(0)
    drawn = choose(logits, 1.0, 1.0, random).bincount(minlength=4) / 4000
    assert drawn.tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    nucleus = choose(logits, 1.0, 0.6, random).bincount(minlength=4) / 4000
    assert nucleus.tolist() == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    sharp = choose(logits, 0.5, 1.0, random).bincount(minlength=4) / 4000
    squared = [0.25, 0.09, 0.0225, 0.0025]
    assert sharp.tolist() == pytest.approx([one / sum(squared) for one in squared], abs=0.03)
    assert [bucket(length) for length in (1, 16, 17, 100)] == [16, 16, 32, 128]


@pytest.mark.parametrize("option", [("--top-p", "0.5"), ("--seed", "3")])
def test_options_of_draws_without_a_temperature_are_refused(option: tuple[str, str], tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["generate", str(tmp_path), "--prompt", "a", *option])
    assert result.exit_code == 2
    assert f"{option[0]} is of tokens that are drawn" in result.stderr


def test_the_command_continues_prompts_of_a_folder(tmp_path: Path) -> None:
    words = ["<pad>", "<eos>", *(f"w{number}" for number in range(62))]
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    model: nn.Module = make("Llama", pad_token_id=0, eos_token_id=1)
    for folder in (model, tokenizer):
        folder.save_pretrained(tmp_path)
    given = ["w5 w6 w7", "w9"]
    command = ["generate", str(tmp_path), "--tokens", "6", "--json", *(x for text in given for x in ("--prompt", text))]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    rows = tokenizer(given, return_tensors="pt", padding=True, padding_side="left")
    wanted = expected(model, rows["input_ids"], rows["attention_mask"], 6)
    texts = tokenizer.batch_decode(wanted[:, rows["input_ids"].shape[1] :], skip_special_tokens=True)
    assert [one["text"] for one in answer["texts"]] == texts
    assert answer["device_peak_bytes"] > 0
