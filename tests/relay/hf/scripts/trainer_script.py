"""A script as users of transformers write it: a causal language model, evaluation, schedule, best model at the end.

The tests run it as it is, and with two lines changed. Its arguments are a folder and a number of steps.
"""

import sys

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

OUTPUT, STEPS = sys.argv[1], int(sys.argv[2])
VOCABULARY, PADDING = 96, 0

torch.manual_seed(0)
generator = np.random.default_rng(0)


def make_rows(count):
    """Sequences that count up from a random number, of two lengths after padding."""
    rows = []
    for _ in range(count):
        length, start = int(generator.integers(5, 13)), int(generator.integers(1, 80))
        ids = [(start + step) % (VOCABULARY - 1) + 1 for step in range(length)]
        rows.append({"input_ids": ids, "labels": [-100, *ids[1:]]})
    return Dataset.from_list(rows)


def collate(rows):
    """Pad to a multiple of eight."""
    length = -(-max(len(row["input_ids"]) for row in rows) // 8) * 8
    fill = {"input_ids": PADDING, "labels": -100, "attention_mask": 0}
    batch = {name: torch.full((len(rows), length), value) for name, value in fill.items()}
    for number, row in enumerate(rows):
        size = len(row["input_ids"])
        batch["input_ids"][number, :size] = torch.tensor(row["input_ids"])
        batch["labels"][number, :size] = torch.tensor(row["labels"])
        batch["attention_mask"][number, :size] = 1
    return batch


def accuracy(prediction):
    guesses, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((guesses == labels)[counted].mean()), "sum": float(prediction.predictions.sum())}


class Diary(TrainerCallback):
    """Writes down which callbacks are called, and what is logged."""

    def __init__(self):
        self.events, self.logs = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def listen(name):
    def called(self, args, state, control, **kwargs):
        self.events.append((name, state.global_step, kwargs["optimizer"].param_groups[0]["lr"]))

    return called


EVENTS = (
    "step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end", "evaluate", "save",
    "prediction_step", "epoch_begin", "epoch_end", "train_end",
)  # fmt: skip
for event in EVENTS:
    setattr(Diary, f"on_{event}", listen(event))

config = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, pad_token_id=PADDING,
)  # fmt: skip
model = LlamaForCausalLM(config)
diary = Diary()
arguments = TrainingArguments(
    output_dir=OUTPUT, max_steps=STEPS, per_device_train_batch_size=2, per_device_eval_batch_size=4,
    gradient_accumulation_steps=2, learning_rate=1e-2, weight_decay=0.1, warmup_steps=2, lr_scheduler_type="cosine",
    logging_steps=1, eval_strategy="steps", eval_steps=STEPS // 2, save_strategy="steps", save_steps=STEPS // 2,
    load_best_model_at_end=True, metric_for_best_model="loss", include_num_input_tokens_seen="all",
    use_cpu=True, report_to="none", disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(
    model=model,
    args=arguments,
    data_collator=collate,
    train_dataset=make_rows(4 * STEPS - 1),
    eval_dataset=make_rows(6),
    compute_metrics=accuracy,
    callbacks=[diary, EarlyStoppingCallback(early_stopping_patience=5)],
)
result = trainer.train()
final = trainer.evaluate()
trainer.save_model(f"{OUTPUT}/final")
