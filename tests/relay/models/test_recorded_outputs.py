"""What transformers collects by hooks inside layers comes out: router logits, attentions, hidden states."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from relay.errors import PartitionError
from tests.support import reference
from tests.support.zoo.plain_models import Build

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "use_cache": False,
    "attn_implementation": "eager",
}


def llama(**options: Any) -> nn.Module:
    made: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **options))
    return made.train()


def mixtral(**options: Any) -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, **options)
    made: nn.Module = transformers.MixtralForCausalLM(config)
    return made.train()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "router_logits": lambda: mixtral(output_router_logits=True),
    "attentions": lambda: llama(output_attentions=True),
    "hidden_states": lambda: llama(output_hidden_states=True),
}


def batches() -> list[dict[str, torch.Tensor]]:
    return reference.text_batches(2, batch=4, length=6, vocabulary=32)


@pytest.mark.parametrize(
    "name", ["router_logits", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in list(MODELS)[1:])]
)
def test_what_hooks_inside_layers_record_comes_out_and_is_trained_through(build: Build, name: str) -> None:
    """The auxiliary loss of a mixture of experts is made of router logits, which a hook in each layer records."""
    torch.manual_seed(0)
    ours = MODELS[name]()
    plain = copy.deepcopy(ours)
    losses = reference.train(plain, batches(), 1)
    trainer = build(ours, microbatches=1)
    assert [trainer.step(batch).loss for batch in batches()] == losses
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())
    batch = batches()[0]
    found, wanted = trainer.predict(batch)[name], plain.eval()(**batch)[name]
    assert len(found) == len(wanted)
    assert all(map(torch.equal, found, wanted))
    assert len(ours(**batch)[name]) == len(wanted), "its hooks were installed once"


def test_grouped_matrix_products_of_experts_in_float32_are_captured(build: Build) -> None:
    torch.manual_seed(0)
    ours = mixtral()
    plain = copy.deepcopy(ours)
    losses = reference.train(plain, batches(), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that a layer runs eagerly is a warning
        trainer = build(ours, microbatches=1)
        assert [trainer.step(batch).loss for batch in batches()] == losses
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


def test_router_logits_are_trained_in_micro_batches_where_each_is_meant_to_have_its_own_loss(build: Build) -> None:
    """The auxiliary loss takes a batch's tokens of every layer together: micro-batches cannot make it."""
    torch.manual_seed(0)
    ours = MODELS["router_logits"]()
    plain = copy.deepcopy(ours)
    batch = batches()[0]
    with pytest.raises(PartitionError, match=r"mixes samples.*microbatches=1"):
        build(copy.deepcopy(ours), microbatches=2).step(batch)
    metrics = build(ours, microbatches=2, loss_weight=lambda piece: len(piece["input_ids"])).step(batch)
    halves = [plain(**{name: tensor[start : start + 2] for name, tensor in batch.items()}).loss for start in (0, 2)]
    assert metrics.loss == pytest.approx(sum(half.item() for half in halves) / 2, rel=1e-6)
