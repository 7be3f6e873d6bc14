"""Preferences with trl's trainers on Relay: DPO with a frozen reference or an adapter, and a reward model.

The model is a small Llama with random weights, and the texts are made here: the better continuation of a prompt counts
on, the worse one has the same words in another order. With a model of your own, replace `config` by `from_pretrained`.

    python examples/preference.py --method dpo      # a reference model, frozen, is relayed beside the model
    python examples/preference.py --method adapter  # LoRA; the reference is the model with its adapter switched off
    python examples/preference.py --method reward   # a reward model from the same pairs
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)
from trl import DPOConfig, RewardConfig

import relay

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words."""
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def make_pairs(count: int, with_prompt: bool) -> Dataset:
    """Prompts with a better and a worse continuation."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for start in torch.randint(0, 50, (count,), generator=generator).tolist():
        words = [f"w{(start + step) % 61}" for step in range(8)]
        better = words[2:]
        worse = [better[number] for number in torch.randperm(len(better), generator=generator).tolist()]
        pair = {"chosen": " ".join(better), "rejected": " ".join(worse)}
        rows.append({"prompt": " ".join(words[:2]) + " ", **pair} if with_prompt else pair)
    return Dataset.from_list(rows)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["dpo", "adapter", "reward"], default="dpo")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="a few seconds: two layers, few steps")
    options = parser.parse_args(arguments)
    steps, hidden, layers = (3, 16, 2) if options.quick else (options.steps, 64, 4)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, bos_token_id=None, num_labels=1,
    )  # fmt: skip
    shared: dict[str, Any] = {
        "max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1, "bf16": False,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "pad_to_multiple_of": 16,
    }  # fmt: skip
    given = {"train_dataset": make_pairs(4 * steps, options.method != "reward"), "processing_class": make_tokenizer()}
    with tempfile.TemporaryDirectory() as folder:
        if options.method == "reward":
            trainer: Any = relay.hf.RelayRewardTrainer(
                LlamaForSequenceClassification(config), args=RewardConfig(output_dir=folder, **shared), **given
            )
        elif options.method == "dpo":
            model = LlamaForCausalLM(config)
            reference = copy.deepcopy(model)
            trainer = relay.hf.RelayDPOTrainer(model, reference, args=DPOConfig(output_dir=folder, **shared), **given)
        else:
            trainer = relay.hf.RelayDPOTrainer(
                LlamaForCausalLM(config), args=DPOConfig(output_dir=folder, **shared), **given,
                peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
            )  # fmt: skip
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    name = "accuracy" if options.method == "reward" else "rewards/accuracies"
    for entry in (logs[0], logs[-1]):
        print(f"step {entry['step']}: loss {entry['loss']:.3f}, accuracy {entry[name]:.2f}")
    return logs


if __name__ == "__main__":
    main()
