"""What a fine-tuning shows and leaves: samples, reports, new heads, dtypes, and the plan of a dry run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import relay as package
from examples.documentation_chats import (
    conversations,
    documentation,
    save_folder,
    save_llama,
    write_jsonl,
)
from relay.finetuning.finetune import finetune
from relay.finetuning.reporting import Callback
from relay.finetuning.samples import Sampler
from tests.support.command_line import only_object, relay
from tests.support.plain_finetuning import QUICK

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def chats(place: Path) -> Path:
    return write_jsonl(place / "chats.jsonl", conversations(16, characters=40))


def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """What transformers generates."""
    model.eval()
    inputs = torch.tensor([prompt])
    found = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=tokens, do_sample=False)[0]
    return list(found[1 if model.config.is_encoder_decoder else len(prompt) :].tolist())


@pytest.mark.parametrize("task", ["causal", "seq2seq"])
def test_samples_are_what_transformers_generates(
    task: str, llama: Path, tokenizer: Any, build: Callable[..., Any], tmp_path: Path
) -> None:
    if task == "causal":
        model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    else:
        sizes = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8, "vocab_size": len(tokenizer)}
        config = transformers.T5Config(**sizes, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
        torch.manual_seed(1)
        model = transformers.T5ForConditionalGeneration(config)
    prompts = [[5, 30, 31, 32], [5, 40, 41]]
    expected = [greedy(model, prompt, 6) for prompt in prompts]
    rows = [{"input_ids": [*prompt, 9], "labels": [*[-100] * len(prompt), 9]} for prompt in prompts]
    if task == "seq2seq":
        rows = [{"input_ids": prompt, "labels": [9]} for prompt in prompts]
    sampler = Sampler(rows, task, tokenizer, 2, 6, 32, 0, 0)
    trainer = build(model, microbatches=1)
    texts = sampler.write(trainer)
    assert texts == [
        f"{tokenizer.decode(prompt)} => {tokenizer.decode(found)}"
        for prompt, found in zip(prompts, expected, strict=True)
    ]


class Seen(Callback):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, Any]] = []
        self.evaluations: list[Mapping[str, Any]] = []
        self.ends: list[Mapping[str, Any]] = []

    def on_step(self, figures: Mapping[str, Any]) -> None:
        self.steps.append(figures)

    def on_evaluation(self, figures: Mapping[str, Any]) -> None:
        self.evaluations.append(figures)

    def on_end(self, figures: Mapping[str, Any]) -> None:
        self.ends.append(figures)


@pytest.mark.parametrize("reports", [("jsonl", "tensorboard"), pytest.param(("wandb",), marks=pytest.mark.exhaustive)])
def test_reports_and_callbacks_get_the_same_figures(
    reports: tuple[str, ...], llama: Path, chats: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    seen = Seen()
    out = tmp_path / "out"
    finetune(
        str(llama), [str(chats)], callbacks=[seen], report_to=reports, cache=str(place / "cache"), out=str(out),
        steps=3, length_buckets=1, eval_every=2, held_out=0.25, **QUICK,
    )  # fmt: skip
    assert [figures["step"] for figures in seen.steps] == [1, 2, 3]
    assert [figures["step"] for figures in seen.evaluations] == [0, 2, 3]
    assert len(seen.ends) == 1
    losses = [figures["loss"] for figures in seen.steps]
    if "wandb" in reports:
        assert list((out / "wandb").rglob("*.wandb"))
        return
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines if line["event"] == "step"] == losses
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(out / "tensorboard"))
    found.Reload()
    assert [event.value for event in found.Scalars("train/loss")] == pytest.approx(losses)
    assert [event.step for event in found.Scalars("held out/held_out_loss")] == [0, 2, 3]


@pytest.mark.parametrize("lora", [None, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_masked_language_model_gets_a_new_head_for_the_classes_of_the_data(
    lora: int | None, tokenizer: Any, place: Path, tmp_path: Path
) -> None:
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=128)
    folder = save_folder(tmp_path / "bert", transformers.BertForMaskedLM, config, tokenizer)
    rows = [{"sentence": text, "class": "long" if len(text) > 100 else "short"} for _, text in documentation(24)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    lines: list[str] = []
    found = finetune(
        str(folder), [str(data)], log=lines.append, cache=str(place / "cache"), out=str(tmp_path / "out"), steps=2,
        length_buckets=1, lora=lora, held_out=0.2, **QUICK,
    )  # fmt: skip
    assert found["task"] == "classification"
    assert 0 <= found["accuracy"] <= 1
    assert any("classifier.weight" in line for line in lines)
    if lora is None:
        model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
        assert model.config.id2label == {0: "long", 1: "short"}
    else:
        import peft

        base = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
        before = base.classifier.weight.clone()
        tuned = peft.PeftModel.from_pretrained(base, tmp_path / "out")
        assert not torch.equal(tuned.base_model.model.classifier.modules_to_save["default"].weight, before)


def test_a_dry_run_tells_the_bytes_of_a_checkpoint_and_trains_nothing(
    llama: Path, chats: Path, place: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = relay(
        "finetune", llama, "--data", chats, "--out", out, "--cache", place / "cache", "--microbatches", "2",
        "--lora", "4", "--device", "rtx-4090", "--dry-run", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    found = only_object(result)
    assert not out.exists()
    assert found["expected_seconds"]["low"] > 0
    assert found["expected_kilowatt_hours"]["middle"] > 0
    assert found["plan"]["microbatches"] == 2
    done = finetune(
        str(llama), [str(chats)], cache=str(place / "cache"), out=str(out), lora=4, checkpoint_every=1, steps=1,
        held_out=0.0, **QUICK,
    )  # fmt: skip
    assert done["steps"] == 1
    written = sum(file.stat().st_size for file in (out / "checkpoints").rglob("*") if file.is_file())
    assert found["checkpoint_bytes"] == pytest.approx(written, rel=0.25)


@pytest.mark.exhaustive
def test_a_folder_in_bfloat16_trains_adapters_on_packed_weights_in_bfloat16(
    tokenizer: Any, chats: Path, place: Path, tmp_path: Path
) -> None:
    folder = save_llama(tmp_path / "model", tokenizer)
    transformers.AutoModelForCausalLM.from_pretrained(folder).bfloat16().save_pretrained(folder)
    found = finetune(
        str(folder), [str(chats)], cache=str(place / "cache"), out=str(tmp_path / "out"), lora=4, quantize_frozen="nf4",
        precision="bf16", steps=4, held_out=0.0, merge=True, **QUICK,
    )  # fmt: skip
    assert found["loss_last"] < found["loss_first"]
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged")
    assert merged.dtype == torch.bfloat16


@pytest.mark.exhaustive
def test_sigterm_saves_the_run_and_the_same_command_with_resume_goes_on(
    llama: Path, chats: Path, place: Path, tmp_path: Path
) -> None:
    import signal
    import subprocess
    import sys
    import time

    out = tmp_path / "out"
    words = [
        sys.executable,
        "-m",
        "relay",
        "finetune",
        str(llama),
        "--data",
        str(chats),
        "--cache",
        str(place / "cache"),
    ]
    words += ["--out", str(out), "--steps", "400", "--checkpoint-every", "5", "--samples", "0", "--batch", "4"]
    words += ["--microbatches", "2", "--held-out", "0", "--length-buckets", "1"]
    root = Path(package.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    running = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    end = time.monotonic() + 300
    while not list((out / "checkpoints").glob("step-*")):
        assert time.monotonic() < end
        assert running.poll() is None
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 143
    assert "with --resume continues it" in errors
    done = subprocess.run(
        [*words, "--resume"], env=environment, check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert "in 400 steps" in done.stdout
