"""trl's trainers with `relay.hf.RelayMixin` against themselves on the CPU: losses, metrics, callbacks, checkpoints."""

from pathlib import Path

import pytest
import torch

import relay
from tests.relay.hf.running import assert_logged_alike, logged, run_script

trl = pytest.importorskip("trl")

NAMES = {"sft": "SFTTrainer", "dpo": "DPOTrainer", "reward": "RewardTrainer"}
TOLERANCE = {"sft": 2e-6, "dpo": 2e-6, "reward": 0.0}


def two_lines(kind: str) -> dict[str, str]:
    name = NAMES[kind]
    return {"import torch": "import torch, relay.hf", f"trainer = {name}(": f"trainer = relay.hf.Relay{name}("}


@pytest.mark.sample("sft-2")
@pytest.mark.parametrize("steps", [2, 20])
@pytest.mark.parametrize("kind", NAMES)
def test_a_script_with_two_lines_changed_logs_and_calls_the_same(tmp_path: Path, kind: str, steps: int) -> None:
    name, tolerance = f"{kind}_script.py", TOLERANCE[kind]
    stock = run_script(name, tmp_path / "stock", steps)
    ours = run_script(name, tmp_path / "relay", steps, two_lines(kind))
    assert type(ours["trainer"]).__module__.startswith("relay.hf")
    assert_logged_alike(ours, stock, tolerance)
    expected = stock["model"].state_dict()
    for key, weight in ours["model"].state_dict().items():
        torch.testing.assert_close(weight, expected[key], rtol=0, atol=1e3 * tolerance, msg=key)


ONE_BATCH = {"gradient_accumulation_steps=2": "gradient_accumulation_steps=1"}
IN_PIECES = {"    callbacks=[diary],": "    callbacks=[diary], relay={'microbatches': 2},"}
ADAPTER = "    peft_config=__import__('peft').LoraConfig(r=2, target_modules=['q_proj', 'v_proj']),\n"
FASTER = {"learning_rate=1e-2": "learning_rate=1e-1", "warmup_steps=1": "warmup_steps=0"}
VARIANTS = {
    "adapter": ("dpo", {"    ref_model=reference,\n": ADAPTER, **FASTER}, {}),
    "weighted": ("dpo", {"beta=0.2, ": "beta=0.2, loss_type=['ipo'], use_weighting=True, ld_alpha=0.5, "}, {}),
    "known": ("dpo", {"    ref_model=reference,\n": "", "beta=0.2, ": "beta=0.2, precompute_ref_log_probs=True, "}, {}),
    "packed": ("sft", {"max_length=32, ": "max_length=32, packing=True, "}, {}),
    "dft": ("sft", {"max_length=32, ": "max_length=32, loss_type='dft', "}, {}),
    "sft in pieces": ("sft", ONE_BATCH, IN_PIECES),
    "dpo in pieces": ("dpo", ONE_BATCH, IN_PIECES),
    "reward in pieces": ("reward", ONE_BATCH, IN_PIECES),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_losses_give_the_same_losses_and_metrics(tmp_path: Path, variant: str) -> None:
    kind, changed, for_relay = VARIANTS[variant]
    stock = run_script(f"{kind}_script.py", tmp_path / "stock", 2, variant=changed)
    ours = run_script(f"{kind}_script.py", tmp_path / "relay", 2, two_lines(kind), {**changed, **for_relay})
    assert_logged_alike(ours, stock, 4e-6)
    if variant == "adapter":  # the reference is another model than the one that is trained
        assert logged(ours)[-1]["train_loss"] != pytest.approx(0.6931472, abs=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("first", ["stock", "relay"])
def test_checkpoints_of_each_are_read_by_the_other(tmp_path: Path, kind: str, first: str) -> None:
    name = f"{kind}_script.py"
    lines = {"stock": {}, "relay": two_lines(kind)}
    second = "relay" if first == "stock" else "stock"
    whole = run_script(name, tmp_path / "whole", 4, lines[second])
    run_script(name, tmp_path / "run", 4, lines[first])
    resume = {"trainer.train()": f"trainer.train(resume_from_checkpoint={str(tmp_path / 'run' / 'checkpoint-2')!r})"}
    resumed = run_script(name, tmp_path / "run", 4, lines[second], resume)
    expected = [entry["loss"] for entry in logged(whole) if "loss" in entry][2:]
    assert [entry["loss"] for entry in logged(resumed) if "loss" in entry] == pytest.approx(expected, abs=1e-6)


def test_other_trainers_of_trl_are_refused_by_name() -> None:
    class RelayGRPO(relay.hf.RelayMixin, trl.GRPOTrainer):
        pass

    with pytest.raises(TypeError, match="GRPOTrainer of trl does not run on Relay"):
        RelayGRPO(model="none", reward_funcs=len)


def test_losses_that_cannot_be_traced_are_refused_by_name(tmp_path: Path) -> None:
    variant = {"beta=0.2, ": "beta=0.2, loss_type=['sigmoid', 'sft'], "}
    with pytest.raises(ValueError, match="loss_type='sft' selects tokens by a mask"):
        run_script("dpo_script.py", tmp_path, 2, two_lines("dpo"), variant)
