"""`relay.hf.RelayTrainer` against `transformers.Trainer` on the CPU: the same losses, metrics, callbacks and files."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, get_scheduler

import relay
from tests.relay.hf.running import assert_logged_alike, run_script

TWO_LINES = {"import torch": "import torch, relay.hf", "trainer = Trainer(": "trainer = relay.hf.RelayTrainer("}


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip


def rows(count: int = 12, length: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        ids = torch.randint(0, 48, (length,), generator=generator)
        labels = ids.clone()
        labels[: number % 4] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


class Diary(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append({key: value for key, value in logs.items() if "second" not in key and "runtime" not in key})


def train(kind: type, folder: Path, model: nn.Module, arguments: dict[str, Any], **given: Any) -> tuple[Any, list[Any]]:
    """Train for a few steps. Returns the trainer and what it logged."""
    resume = given.pop("resume", None)
    diary = Diary()
    chosen = {
        "max_steps": 3, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "logging_steps": 1, "save_strategy": "no", "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        **arguments,
    }  # fmt: skip
    trainer = kind(
        model=model, args=TrainingArguments(output_dir=str(folder), **chosen), train_dataset=rows(),
        callbacks=[diary, *given.pop("callbacks", [])], **given,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer, diary.logs


def assert_same(tmp_path: Path, arguments: dict[str, Any], make: Any = tiny, kinds: Any = None, **given: Any) -> Any:
    """Train with the library's trainer and with Relay's, and compare logs and weights to the bit."""
    stock_kind, relay_kind = kinds or (Trainer, relay.hf.RelayTrainer)
    options = given.pop("relay", {})
    stock, expected = train(stock_kind, tmp_path / "stock", make(), arguments, **given)
    ours, found = train(relay_kind, tmp_path / "relay", make(), arguments, relay=options, **given)
    assert found == expected
    for (name, one), other in zip(stock.model.state_dict().items(), ours.model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    return ours


@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_a_script_with_two_lines_changed_logs_calls_and_saves_the_same(tmp_path: Path, steps: int) -> None:
    stock = run_script("trainer_script.py", tmp_path / "stock", steps)
    ours = run_script("trainer_script.py", tmp_path / "relay", steps, TWO_LINES)
    assert type(ours["trainer"]).__module__.startswith("relay.hf")
    assert_logged_alike(ours, stock, tolerance=0.0)
    assert ours["final"]["eval_loss"] == stock["final"]["eval_loss"]
    assert {path.name for path in (tmp_path / "relay" / "final").iterdir()} == {
        path.name for path in (tmp_path / "stock" / "final").iterdir()
    }
    one = LlamaForCausalLM.from_pretrained(tmp_path / "stock" / "final").state_dict()
    other = LlamaForCausalLM.from_pretrained(tmp_path / "relay" / "final").state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("first", ["stock", "relay"])
def test_checkpoints_of_each_are_read_by_the_other(tmp_path: Path, first: str) -> None:
    kinds = {"stock": Trainer, "relay": relay.hf.RelayTrainer}
    second = "relay" if first == "stock" else "stock"
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}
    whole, expected = train(Trainer, tmp_path / "whole", tiny(), saving)
    train(kinds[first], tmp_path / "run", tiny(), saving)
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    resumed, found = train(kinds[second], tmp_path / "run", tiny(), saving, resume=checkpoint)
    assert [one["loss"] for one in found if "loss" in one] == [one["loss"] for one in expected if "loss" in one][2:]
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    files = [torch.load(tmp_path / place / "checkpoint-4" / "optimizer.pt") for place in ("whole", "run")]
    assert files[0]["param_groups"] == files[1]["param_groups"]
    for number, state in files[0]["state"].items():
        assert all(torch.equal(value, files[1]["state"][number][label]) for label, value in state.items())


class Weighted(Trainer):
    """A trainer with a loss of the user's, and a number in it that changes on the way."""

    strength = 0.1

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss + self.penalty(outputs.logits)
        return (loss, outputs) if return_outputs else loss

    def penalty(self, logits: torch.Tensor) -> torch.Tensor:
        return self.strength * logits.pow(2).mean()

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        self.add_callback(Change(self))
        return super().create_scheduler(*args, **kwargs)


class RelayWeighted(relay.hf.RelayMixin, Weighted):
    """The same on Relay."""


class Change(TrainerCallback):
    def __init__(self, trainer: Weighted) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.strength = 0.5


def test_a_loss_of_the_users_is_computed_with_the_numbers_that_it_has_now(tmp_path: Path) -> None:
    assert_same(tmp_path, {}, kinds=(Weighted, RelayWeighted))


@pytest.mark.parametrize(
    "arguments",
    [
        {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0},
        {"bf16": True, "optim": "adamw_torch", "gradient_checkpointing": True},
        pytest.param({"optim": "sgd", "lr_scheduler_type": "constant"}, marks=pytest.mark.exhaustive),
        pytest.param({"optim": "adafactor"}, marks=pytest.mark.exhaustive),
        pytest.param({"dataloader_num_workers": 2, "gradient_accumulation_steps": 1}, marks=pytest.mark.exhaustive),
        pytest.param({"num_train_epochs": 1, "max_steps": -1}, marks=pytest.mark.exhaustive),
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_arguments_of_training_change_the_same(tmp_path: Path, arguments: dict[str, Any]) -> None:
    assert_same(tmp_path, arguments)


class Regression(nn.Module):
    """A model that takes no count of items, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = input_ids.float() / 48
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        scores = self.head(hidden)
        return {"loss": (scores - labels[:, :1].float() / 48).pow(2).mean(), "scores": scores}


def test_losses_of_a_model_that_takes_no_count_are_averaged_over_the_accumulated_batches(tmp_path: Path) -> None:
    def make() -> Regression:
        torch.manual_seed(0)
        return Regression()

    assert_same(tmp_path, {"gradient_accumulation_steps": 3, "max_steps": 3}, make)


def test_frozen_parts_half_precision_and_an_optimizer_of_ones_own_train_the_same(tmp_path: Path) -> None:
    results = []
    on_relay = {"relay": {"stash": "host", "device": "cpu:discrete"}}
    for kind, options in ((Trainer, {}), (relay.hf.RelayTrainer, on_relay)):
        model = tiny().to(torch.bfloat16)
        model.model.embed_tokens.requires_grad_(False)
        groups = [{"params": model.model.layers.parameters()}, {"params": [model.lm_head.weight], "lr": 3e-2}]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        schedule = get_scheduler("linear", optimizer, 1, 3)
        trainer, logs = train(kind, tmp_path, model, {}, optimizers=(optimizer, schedule), **options)
        results.append((logs, trainer.model.state_dict()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(one, results[1][1][name]) for name, one in results[0][1].items())


def test_a_batch_in_micro_batches_gives_the_same_losses_to_rounding(tmp_path: Path) -> None:
    arguments = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
    _, expected = train(Trainer, tmp_path / "stock", tiny(), arguments)
    ours, found = train(relay.hf.RelayTrainer, tmp_path / "relay", tiny(), arguments, relay={"microbatches": 2})
    for one, other in zip(expected, found, strict=True):
        assert one == pytest.approx(other, abs=2e-6)
    assert ours.relay_metrics.weight_bytes > 0
    expected_loss = Trainer(ours.model, ours.args).evaluate(rows(4))["eval_loss"]
    assert ours.evaluate(rows(4))["eval_loss"] == pytest.approx(expected_loss)


def test_an_adapter_trains_and_saves_as_with_the_library(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def make() -> nn.Module:
        adapted = peft.get_peft_model(tiny(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        torch.manual_seed(1)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
        return adapted

    assert_same(tmp_path, {"save_strategy": "steps", "save_steps": 3}, make)
    files = [tmp_path / place / "checkpoint-3" for place in ("stock", "relay")]
    assert sorted(path.name for path in files[0].iterdir()) == sorted(path.name for path in files[1].iterdir())
    loaded = peft.PeftModel.from_pretrained(tiny(), files[1])
    assert any("lora_A" in name for name, _ in loaded.named_parameters())
    # The library writes a group for parameters without decay, which an adapter does not have.
    train(Trainer, tmp_path / "relay", make(), {"max_steps": 4}, resume=str(files[1]))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"torch_compile": True}, "torch_compile"),
        ({"bf16_full_eval": True}, "bf16_full_eval"),
        ({"optim": "paged_adamw_8bit"}, "optim='?paged_adamw_8bit|optim=.*PAGED"),
        ({"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}}, "offload"),
        ({"debug": "underflow_overflow"}, "debug"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_arguments_that_cannot_be_followed_are_refused_by_name(
    tmp_path: Path, arguments: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        relay.hf.RelayTrainer(tiny(), TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **arguments))


def test_options_that_the_training_arguments_decide_are_refused_with_the_argument(tmp_path: Path) -> None:
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="max_grad_norm"):
        relay.hf.RelayTrainer(tiny(), arguments, relay={"clip_grad_norm": 1.0})
    with pytest.raises(TypeError, match="stash"):
        relay.hf.RelayTrainer(tiny(), arguments, relay={"stach": "host"})
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
        relay.hf.RelayTrainer(tiny(), arguments, relay={"microbatches": 2})


def test_importing_relay_does_not_import_transformers() -> None:
    code = "import sys, relay; relay.hf; assert 'transformers' not in sys.modules and 'trl' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
