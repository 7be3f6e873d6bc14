"""Fine-tuning folders: what the command does, from files to a folder, against plain PyTorch and transformers."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.documentation_chats import (
    conversations,
    documentation,
    save_folder,
    train_tokenizer,
    write_jsonl,
)
from relay.finetuning.finetune import finetune
from tests.support import reference
from tests.support.command_line import only_object, relay
from tests.support.plain_finetuning import QUICK, plain

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def chats(place: Path) -> Path:
    return write_jsonl(place / "chats.jsonl", conversations(48, characters=60))


@pytest.fixture
def tune(place: Path, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Runs a fine-tuning in a folder of the test's own; returns its result and the figures of its steps."""

    def run(model: Path, data: Path, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        seen: list[dict[str, Any]] = []
        given = {"cache": str(place / "cache"), "out": str(tmp_path / "out"), **QUICK, **options}
        result = finetune(str(model), [str(data)], on_figures=lambda figures, _: seen.append(figures), **given)
        return result, seen

    return run


def losses(seen: list[dict[str, Any]]) -> list[float]:
    return [figures["loss"] for figures in seen if "loss" in figures]


def test_one_command_tunes_a_folder_on_chats_and_transformers_loads_the_result(
    llama: Path, place: Path, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "chats.jsonl", conversations(64, characters=60))
    out = tmp_path / "tuned"
    result = relay(
        "finetune", llama, "--data", data, "--lr", "1e-2", "--epochs", "2", "--out", out, "--cache", place / "cache",
        "--report-to", "jsonl", "--plot", tmp_path / "figures" / "run.png", "--sample-tokens", "4", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    answer = only_object(result)
    assert answer["held_out_after"] < answer["held_out_before"] - 0.3
    assert "best device" in result.stderr
    assert "| <|user|>What is" in result.stderr  # the example with its mask
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    row = json.loads(data.read_text().splitlines()[0])["messages"]
    ids = torch.tensor([tokenizer.apply_chat_template(row, tokenize=True, return_dict=True)["input_ids"]])
    untuned = transformers.AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss < untuned(input_ids=ids, labels=ids).loss
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "held_out_after" in card
    assert "chats.jsonl" in card
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, answer["steps"] + 1))
    assert (tmp_path / "figures" / "run.png").read_bytes().startswith(b"\x89PNG")


def test_losses_and_weights_are_those_of_transformers_and_torch_optim(
    tune: Callable[..., Any], llama: Path, chats: Path, place: Path, tmp_path: Path
) -> None:
    result, seen = tune(llama, chats, steps=4, held_out=0.25, length_buckets=1)
    expected, model = plain(llama, chats, place / "cache", 4, held_out=0.25, length_buckets=1)
    assert losses(seen) == expected
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    reference.assert_same_state(ours.state_dict(), model.state_dict())
    assert result["held_out_before"] is not None


@functools.cache
def families(vocabulary: int) -> dict[str, tuple[str, Any]]:
    """The class of each model and a small configuration."""
    t = transformers
    special = {"vocab_size": vocabulary, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    deep = {**special, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    plain_heads = {**deep, "num_key_value_heads": 2, "max_position_embeddings": 256}
    wide_heads = {**plain_heads, "head_dim": 8}
    encoder = {**deep, "max_position_embeddings": 260, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    quiet = {"dropout": 0.0, "attention_dropout": 0.0}
    sides = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = {**special, **quiet, **sides, "d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    bart |= {"forced_eos_token_id": None, "decoder_start_token_id": 2, "max_position_embeddings": 256}
    t5 = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8, "dropout_rate": 0.0}
    gpt2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256}
    gpt2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    opt = {"hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "dropout": 0.0, "num_attention_heads": 2}
    opt |= {"max_position_embeddings": 256, "word_embed_proj_dim": 16}
    distil = {"dim": 16, "hidden_dim": 32, "n_layers": 2, "n_heads": 2, "seq_classif_dropout": 0.0, "num_labels": 3}
    return {
        "qwen2": ("Qwen2ForCausalLM", t.Qwen2Config(**plain_heads)),
        "gpt2": ("GPT2LMHeadModel", t.GPT2Config(**special, **gpt2)),
        "t5": ("T5ForConditionalGeneration", t.T5Config(**special, **t5, decoder_start_token_id=0)),
        "bert-classes": ("BertForSequenceClassification", t.BertConfig(**encoder, num_labels=3)),
        "llama": ("LlamaForCausalLM", t.LlamaConfig(**wide_heads)),
        "mistral": ("MistralForCausalLM", t.MistralConfig(**wide_heads)),
        "qwen3": ("Qwen3ForCausalLM", t.Qwen3Config(**wide_heads)),
        "gemma": ("GemmaForCausalLM", t.GemmaConfig(**wide_heads)),
        "gemma2": ("Gemma2ForCausalLM", t.Gemma2Config(**wide_heads)),
        "phi3": ("Phi3ForCausalLM", t.Phi3Config(**plain_heads)),
        "phi": ("PhiForCausalLM", t.PhiConfig(**plain_heads)),
        "olmo2": ("Olmo2ForCausalLM", t.Olmo2Config(**plain_heads)),
        "granite": ("GraniteForCausalLM", t.GraniteConfig(**plain_heads)),
        "smollm3": ("SmolLM3ForCausalLM", t.SmolLM3Config(**plain_heads)),
        "stablelm": ("StableLmForCausalLM", t.StableLmConfig(**plain_heads)),
        "starcoder2": ("Starcoder2ForCausalLM", t.Starcoder2Config(**plain_heads)),
        "gpt-neox": ("GPTNeoXForCausalLM", t.GPTNeoXConfig(**deep, max_position_embeddings=256)),
        "opt": ("OPTForCausalLM", t.OPTConfig(**special, **opt)),
        "mixtral": ("MixtralForCausalLM", t.MixtralConfig(**wide_heads, num_local_experts=2)),
        "bart": ("BartForConditionalGeneration", t.BartConfig(**bart)),
        "mbart": ("MBartForConditionalGeneration", t.MBartConfig(**bart)),
        "roberta-classes": ("RobertaForSequenceClassification", t.RobertaConfig(**encoder, num_labels=3)),
        "distilbert-classes": (
            "DistilBertForSequenceClassification",
            t.DistilBertConfig(vocab_size=vocabulary, pad_token_id=0, max_position_embeddings=256, **quiet, **distil),
        ),
        "bert-regression": ("BertForSequenceClassification", t.BertConfig(**encoder, num_labels=1)),
        "electra-words": (
            "ElectraForTokenClassification", t.ElectraConfig(**encoder, embedding_size=16, num_labels=2),
        ),
        "bert-words": ("BertForTokenClassification", t.BertConfig(**encoder, num_labels=2)),
        "llama-classes": ("LlamaForSequenceClassification", t.LlamaConfig(**wide_heads, num_labels=3)),
    }  # fmt: skip


SAMPLE = ["qwen2", "gpt2", "t5", "bert-classes"]
"""With the Llama of the tests above: those of `make test`."""

FURTHER = [
    "llama", "mistral", "qwen3", "gemma", "gemma2", "phi3", "phi", "olmo2", "granite", "smollm3", "stablelm",
    "starcoder2", "gpt-neox", "opt", "mixtral", "bart", "mbart", "roberta-classes", "distilbert-classes",
    "bert-regression", "electra-words", "bert-words", "llama-classes",
]  # fmt: skip


def rows_for(name: str) -> list[dict[str, Any]]:
    """Rows as that family learns from."""
    texts = documentation(20, 50)
    if name in ("t5", "bart", "mbart"):
        return [{"source": key, "target": text} for key, text in texts]
    if name.endswith("-classes"):
        return [{"text": text, "label": number % 3} for number, (_, text) in enumerate(texts)]
    if name.endswith("-regression"):
        return [{"text": text, "score": len(text) / 10} for _, text in texts]
    if name.endswith("-words"):
        return [{"tokens": text.split(), "tags": [int(word.islower()) for word in text.split()]} for _, text in texts]
    return conversations(20, 50)


@pytest.mark.filterwarnings("ignore:layer")
@pytest.mark.parametrize("name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FURTHER)])
def test_a_family_is_tuned_as_by_transformers_and_torch_optim(
    name: str, tune: Callable[..., Any], tokenizer: Any, place: Path, tmp_path: Path
) -> None:
    model_class, config = families(len(tokenizer))[name]
    if name == "qwen2":  # as many tokenizers: rows are padded with the token that ends a text, which must train
        tokenizer = train_tokenizer()
        tokenizer.pad_token = config.pad_token_id = None
    folder = save_folder(tmp_path / "model", getattr(transformers, model_class), config, tokenizer)
    data = write_jsonl(tmp_path / "rows.jsonl", rows_for(name))
    fixed: Mapping[str, Any] = {"held_out": 0.0, "length_buckets": 1}
    result, seen = tune(folder, data, steps=3, **fixed)
    expected, _ = plain(folder, data, place / "cache", 3, **fixed)
    assert losses(seen) == pytest.approx(expected, rel=1e-5)
    assert result["steps"] == 3
    loaded = getattr(transformers, model_class).from_pretrained(tmp_path / "out")
    assert type(loaded).__name__ == model_class
