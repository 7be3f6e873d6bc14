"""Simulated runs of models in half precision have the memory and the transfers of real ones, to the byte."""

import warnings
from typing import Any

import pytest
import torch

import relay
from relay.models import GPT
from relay.simulation.described.transformer_shape import ModelShape
from tests.support import reference
from tests.support.zoo.plain_models import Build

SIZES = ModelShape(2, 32, 2, vocabulary=64)


def half() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=64, layers=2, hidden=32, heads=2, sequence=12, tied=False).bfloat16()


def real(build: Build, model: GPT, **options: Any) -> tuple[int, int, int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = build(model, **{"device": "cpu:discrete", **options}).step(reference.text_batches(1, batch=4)[0])
    return found.device_peak_bytes, found.host_bytes, found.weight_bytes


def simulated(model: GPT | ModelShape, **options: Any) -> tuple[int, int, int]:
    given = {"example": reference.text_batches(1, batch=4)[0]} if isinstance(model, GPT) else {"seq": 12, "batch": 4}
    found = relay.simulate(model, device="generic", **given, **options)
    assert found.step is not None
    return found.memory.device_total, found.memory.host_total, found.step.weight_bytes


@pytest.mark.parametrize(
    ("masters", "more"),
    [
        ("fp32", {}),
        ("split", {}),
        ("as_given", {}),
        ("as_given", {"optimizer": relay.Muon(), "clip_grad_norm": 1.0, "stash": "host"}),
    ],
)
def test_a_model_in_half_precision_takes_what_its_training_takes(
    build: Build, masters: str, more: dict[str, Any]
) -> None:
    options = {"precision": "bf16", "microbatches": 2, "master_weights": masters, **more}
    taken = real(build, half(), **options)
    assert simulated(half(), **options) == taken
    assert simulated(SIZES, **options) == taken


def test_what_the_trainer_refuses_of_a_model_in_half_precision_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is torch\.bfloat16: AdamW with state_dtype='int8' cannot update it"):
        simulated(half(), precision="bf16", microbatches=2, master_weights="as_given", state_dtype="int8")


def test_fit_keeps_a_model_as_it_is_given_and_advises_no_other_masters() -> None:
    options: dict[str, Any] = {
        "device": "rtx-4090", "precision": "bf16", "microbatches": 2, "master_weights": "as_given", "stash": "host",
    }  # fmt: skip
    found = relay.fit(SIZES, (4, 12), **options)
    assert found.options["master_weights"] == "as_given"
    most = found.expected.memory.host_total
    for small in (False, True):
        with pytest.raises(relay.NoFeasiblePlan) as refused:
            relay.fit(SIZES, (4, 12), host_memory=most // 2, allow_small_states=small, **options)
        assert "too little" in str(refused.value)
        assert not any(word in str(refused.value) for word in ("split", "moments"))
