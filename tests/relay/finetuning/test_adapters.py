"""Adapters, packed frozen weights, and runs that go on, compared with plain PyTorch, peft or an undisturbed run."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from examples.documentation_chats import conversations, save_folder, write_jsonl
from relay.finetuning.data.prepare import find_labelling, read
from relay.finetuning.finetune import finetune
from relay.finetuning.model_folder import open_folder
from relay.finetuning.options import settings_of
from relay.finetuning.reporting import Callback
from relay.models.adapters import merged
from relay.models.quantized import NF4, QuantizedLinear, pack_frozen
from tests.support import reference
from tests.support.command_line import relay
from tests.support.plain_finetuning import QUICK, plain

transformers = pytest.importorskip("transformers")
pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def chats(place: Path) -> Path:
    return write_jsonl(place / "chats.jsonl", conversations(24, characters=40))


Tune = Callable[..., tuple[dict[str, Any], list[float]]]


@pytest.fixture
def tune(place: Path, chats: Path) -> Tune:
    def run(model: Path, out: Path, **options: Any) -> tuple[dict[str, Any], list[float]]:
        seen: list[float] = []

        def show(figures: Mapping[str, Any], _: int) -> None:
            if "loss" in figures:
                seen.append(figures["loss"])

        given = {"cache": str(place / "cache"), "out": str(out), **QUICK, **options}
        given |= {} if "pack" in options else {"length_buckets": 1}
        return finetune(str(model), [str(chats)], on_figures=show, **given), seen

    return run


# **** packed weights ****


@pytest.mark.parametrize(("kind", "error"), [("nf4", 0.12), ("int8", 0.005), ("fp8", 0.035)])
def test_each_code_stands_for_the_nearest_value_that_the_kind_has(kind: str, error: float) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(128, 32)
    packed = QuantizedLinear(linear, kind)
    given, found = linear.weight.detach().numpy(), packed.weight.numpy()
    assert np.linalg.norm(found - given) < error * np.linalg.norm(given)
    if kind == "nf4":
        scales = packed.scales.float().numpy()
        choices = scales[:, :, None] * np.array(NF4, dtype=np.float32)
        distance = np.abs(given.reshape(-1, 64)[:, :, None] - choices)
        best = np.take_along_axis(choices.repeat(64, 1), distance.argmin(-1)[..., None], -1)[..., 0]
        np.testing.assert_array_equal(found.reshape(-1, 64), best)
    held = sum(buffer.nbytes for name, buffer in packed.named_buffers() if name != "table")
    assert held / (2 * given.size) == pytest.approx(0.265625 if kind == "nf4" else 0.515625)


def adapted(hidden: int = 128) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=16, num_hidden_layers=2, **sizes))
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


@pytest.mark.parametrize(
    "kind",
    ["nf4", pytest.param("int8", marks=pytest.mark.exhaustive), pytest.param("fp8", marks=pytest.mark.exhaustive)],
)
def test_adapters_on_packed_weights_train_as_in_memory_to_the_bit_and_the_link_carries_the_packed_bytes(
    kind: str, build: Callable[..., Any]
) -> None:
    tokens = torch.randint(0, 16, (4, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    half = adapted()
    for parameter in half.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    halves = sum(one.nbytes for name, one in half.named_parameters() if "layers" in name and not one.requires_grad)
    model = adapted()
    pack_frozen(model, kind)
    plain = copy.deepcopy(model).train()
    losses = reference.train(plain, [batch] * 3, 2)
    trainer = build(model.train(), device="cpu:discrete", microbatches=2)
    found = [trainer.step(batch) for _ in range(3)]
    assert [metrics.loss for metrics in found] == losses
    reference.assert_same_state(model.state_dict(), plain.state_dict())
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 14
    sent = sum(buffer.nbytes for layer in layers for name, buffer in layer.named_buffers() if name != "table")
    limit = 0.29 if kind == "nf4" else 0.52
    assert sent < limit * halves
    unpacked = sum(4 * layer.weight.numel() for layer in layers)
    rest = sum(one.nbytes for one in model.parameters())
    # Forward and backward each send a layer once; what is not packed is sent with it.
    assert found[-1].weight_bytes < 2 * (sent + rest) + unpacked * 0.05


def test_transposed_layers_of_gpt2_are_packed_train_as_in_memory_and_are_merged(build: Callable[..., Any]) -> None:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(vocab_size=16, n_embd=64, n_layer=1, n_head=2, n_positions=16, **dropout)
    torch.manual_seed(0)
    base = transformers.GPT2LMHeadModel(config)
    targets = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, use_dora=True, **targets))
    assert pack_frozen(model, "nf4").layers == 4
    plain = copy.deepcopy(model)
    tokens = torch.randint(0, 16, (2, 12), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    losses = reference.train(plain, [batch], 1)
    assert [build(model, microbatches=1).step(batch).loss] == losses
    reference.assert_same_state(model.state_dict(), plain.state_dict())
    with torch.no_grad():
        expected = plain(tokens).logits
        torch.testing.assert_close(merged(plain)(tokens).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["numpy", pytest.param("onnx:cpu", marks=pytest.mark.exhaustive)])
def test_other_devices_unpack_the_same_weights(device: str, build: Callable[..., Any]) -> None:
    tokens = torch.randint(0, 16, (2, 6), generator=torch.Generator().manual_seed(0))
    model = adapted(hidden=64)
    pack_frozen(model, "nf4")
    plain = copy.deepcopy(model).train()
    batch = {"input_ids": tokens, "labels": tokens}
    losses = reference.train(plain, [batch], 1)
    trainer = build(model.train(), device=device, microbatches=1)
    assert trainer.step(batch).loss == pytest.approx(losses[0], rel=1e-5)


# **** adapters ****


def test_an_adapter_folder_is_written_merged_and_gone_on_with(tune: Tune, llama: Path, tmp_path: Path) -> None:
    first, losses = tune(llama, tmp_path / "one", steps=6, lora=4, merge=True, quantize_frozen="nf4", held_out=0.0)
    assert losses[-1] < losses[0]
    assert first["parameters_trained"] < first["parameters"] / 2
    tokens = torch.arange(5, 25)[None]
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "merged")
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    stock = peft.PeftModel.from_pretrained(base, tmp_path / "one", is_trainable=True)  # as anyone loads it
    again, more = tune(tmp_path / "one", tmp_path / "two", steps=2, quantize_frozen="nf4", held_out=0.0)
    assert more[0] < losses[0]
    assert again["parameters_trained"] == first["parameters_trained"]
    packed = copy.deepcopy(stock)
    pack_frozen(packed, "nf4")
    untuned = transformers.AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, packed(tokens).logits, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(stock(tokens).logits, untuned(tokens).logits, atol=1e-3)


def test_adapters_for_classes_hold_all_that_is_new_and_the_names_of_the_classes(
    tokenizer: Any, place: Path, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=len(tokenizer), **sizes)
    base = save_folder(tmp_path / "bert", transformers.BertForMaskedLM, config, tokenizer)  # it has no pooler
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"row {name}", "label": name} for name in "abc"])
    options = {"cache": str(place / "cache"), **QUICK, "steps": 1, "held_out": 0.0, "lora": 2}
    finetune(str(base), [str(data)], out=str(tmp_path / "out"), merge=True, **options)
    kind = transformers.AutoModelForSequenceClassification
    stock = peft.PeftModel.from_pretrained(kind.from_pretrained(base, num_labels=3), tmp_path / "out").eval()
    whole = kind.from_pretrained(tmp_path / "out" / "merged").eval()
    tokens = torch.arange(5, 15)[None]
    with torch.no_grad():
        torch.testing.assert_close(whole(tokens).logits, stock(tokens).logits, rtol=1e-5, atol=1e-7)
    later = write_jsonl(tmp_path / "later.jsonl", [{"text": f"row {name}", "label": name} for name in "cb"])
    source = open_folder(str(tmp_path / "out"))
    found = find_labelling(read([str(later)], str(place / "cache")), source, settings_of({}))
    assert found.classes.numbers == {"a": 0, "b": 1, "c": 2}
    assert found.new_head  # the weights of the base are without it


def test_adapters_train_as_those_of_peft_in_plain_pytorch(tune: Tune, llama: Path, chats: Path, tmp_path: Path) -> None:
    """DoRA, whose magnitudes depend on the frozen weights, from the same start."""
    start = tmp_path / "start"
    torch.manual_seed(3)
    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    config = peft.LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    model.peft_config["default"].base_model_name_or_path = str(llama)
    model.save_pretrained(start)
    _, losses = tune(start, tmp_path / "out", steps=3, held_out=0.0)
    expected, _ = plain(llama, chats, tmp_path / "cache", 3, model=model, held_out=0.0, length_buckets=1)
    assert losses == pytest.approx(expected, rel=1e-6)


# **** runs that go on ****


class Stop(Callback):
    """Ends the process's run after a step, as Ctrl-C would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, figures: Mapping[str, Any]) -> None:
        if figures["step"] == self.step:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_run_that_was_interrupted_goes_on_to_the_bit_with_packing_workers_and_early_stopping(
    after: int, tune: Tune, llama: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"steps": 6, "pack": True, "seq": 128, "held_out": 0.2, "eval_every": 2, "patience": 3}
    options |= {"checkpoint_every": 2, "workers": 2, "batch": 2}
    whole, losses = tune(llama, tmp_path / "whole", **options)
    drawn = {"report_to": ["tensorboard"], "plot": str(tmp_path / "loss.png")}
    with pytest.raises(KeyboardInterrupt):
        tune(llama, tmp_path / "parts", callbacks=[Stop(after)], **drawn, **options)
    assert (tmp_path / "loss.png").stat().st_size > 1000  # what was reported until then is written
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(tmp_path / "parts" / "tensorboard"))
    events.Reload()
    assert [one.value for one in events.Scalars("train/loss")] == pytest.approx(losses[: after - 1])
    rest, later = tune(llama, tmp_path / "parts", resume=True, **options)
    assert later == losses[rest["steps"] - rest["steps_now"] :]
    assert 0 < len(later) < len(losses)
    for name in ("held_out_before", "held_out_after", "held_out_best", "stopped_early"):
        assert rest[name] == whole[name]
    ours, theirs = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / one) for one in ("parts", "whole"))
    reference.assert_same_state(ours.state_dict(), theirs.state_dict())


def test_checkpoints_of_another_run_are_refused_with_the_option_that_differs(
    tune: Tune, llama: Path, chats: Path, place: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    tune(llama, out, steps=1, held_out=0.0, checkpoint_every=1)
    again = [
        "finetune",
        llama,
        "--data",
        chats,
        "--out",
        out,
        "--cache",
        place / "cache",
        "--held-out",
        "0",
        "--no-fit",
    ]
    again += ["--batch", "4", "--length-buckets", "1", "--steps", "1"]
    assert "--resume" in relay(*again).stderr
    others = list(reversed(chats.read_text().splitlines(keepends=True)))
    again[3] = out / "others.jsonl"
    again[3].write_text("".join(others))
    assert "the run was started with other rows, though as many" in relay(*again, "--resume", "--lr", "0.01").stderr
    again[3] = chats
    assert "user.run.lr: the run was started with 0.01; received 0.5" in relay(*again, "--resume", "--lr", "0.5").stderr


def test_early_stopping_keeps_the_best_model(tune: Tune, llama: Path, tmp_path: Path) -> None:
    found, losses = tune(
        llama, tmp_path / "out", steps=40, lr=0.5, held_out=0.2, eval_every=1, patience=2, schedule="constant"
    )
    assert found["stopped_early"]
    assert len(losses) < 40
    assert found["held_out_best"] < found["held_out_after"]
    assert (tmp_path / "out" / "best" / "model.safetensors").is_file() == (found["best"] is not None)


@pytest.mark.exhaustive
def test_options_of_the_trainer_are_those_given(tune: Tune, llama: Path, tmp_path: Path) -> None:
    found, _ = tune(llama, tmp_path / "out", steps=1, precision="bf16", stash="host", slots=1, held_out=0.0)
    assert found["options"]["precision"] == "bf16"
    assert (found["options"]["stash"], found["options"]["slots"]) == ("host", 1)
