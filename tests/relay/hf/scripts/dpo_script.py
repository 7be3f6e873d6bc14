"""A script as users of trl write it: direct preference optimization with a frozen reference model, and evaluation.

The tests run it as it is, and with two lines changed. Its arguments are a folder and a number of steps.
"""

import sys

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import DPOConfig, DPOTrainer

OUTPUT, STEPS = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
generator = np.random.default_rng(0)
words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
backend.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="right"
)


def sentence(count):
    """Words that count up from a random one."""
    start = int(generator.integers(0, 50))
    return " ".join(f"w{(start + step) % 61}" for step in range(count))


def make_rows(count):
    """A prompt, the words that count on from it, and words in random order."""
    rows = []
    for _ in range(count):
        text = sentence(int(generator.integers(6, 12))).split()
        wrong = list(generator.permutation(text[2:]))
        rows.append({"prompt": " ".join(text[:2]) + " ", "chosen": " ".join(text[2:]), "rejected": " ".join(wrong)})
    return Dataset.from_list(rows)


class Diary(TrainerCallback):
    """Writes down which callbacks are called, and what is logged."""

    def __init__(self):
        self.events, self.logs = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))

    def on_step_end(self, args, state, control, **kwargs):
        self.events.append(("step", state.global_step, kwargs["optimizer"].param_groups[0]["lr"]))

    def on_substep_end(self, args, state, control, **kwargs):
        self.events.append(("substep", state.global_step))

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.events.append(("evaluate", state.global_step, sorted(metrics)))

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.global_step))


config = LlamaConfig(
    vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)  # fmt: skip
model = LlamaForCausalLM(config)
reference = LlamaForCausalLM(config)
reference.load_state_dict(model.state_dict())
diary = Diary()
arguments = DPOConfig(
    output_dir=OUTPUT, max_steps=STEPS, per_device_train_batch_size=2, per_device_eval_batch_size=2,
    gradient_accumulation_steps=2, learning_rate=1e-2, weight_decay=0.1, warmup_steps=1, lr_scheduler_type="cosine",
    logging_steps=1, eval_strategy="steps", eval_steps=STEPS // 2, save_strategy="steps", save_steps=STEPS // 2,
    pad_to_multiple_of=16, max_length=32, beta=0.2, bf16=False, use_cpu=True, report_to="none", disable_tqdm=True,
)  # fmt: skip
trainer = DPOTrainer(
    model=model,
    ref_model=reference,
    args=arguments,
    train_dataset=make_rows(4 * STEPS - 1),
    eval_dataset=make_rows(5),
    processing_class=tokenizer,
    callbacks=[diary],
)
result = trainer.train()
