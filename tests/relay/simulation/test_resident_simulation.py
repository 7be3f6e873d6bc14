"""What resident layers are worth on a described machine, where few tokens meet each layer."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from relay.simulation.described.meta_model import MetaModel


class LowRank(nn.Module):
    """A frozen linear layer with a trained correction of rank 16."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, 16, bias=False, device="meta")
        self.up = nn.Linear(16, inner.out_features, bias=False, device="meta")

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value) + self.up(self.down(value))


def llama_with_adapters(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name)))
    tokens = torch.zeros(1, 512, dtype=torch.long, device="meta")
    return model, {"input_ids": tokens, "labels": tokens}


@pytest.mark.exhaustive
def test_lora_at_batch_1_on_a_card_of_24_gb_is_five_times_as_fast_with_resident_layers() -> None:
    model = MetaModel(*llama_with_adapters(32))
    options: dict[str, Any] = {
        "device": "rtx-4090", "precision": "bf16", "batch": 1, "seq": 512, "host_memory": "128GiB"
    }  # fmt: skip
    none = relay.simulate(model, **options)
    auto = relay.simulate(model, resident_layers="auto", **options)
    assert none.step is not None
    assert auto.step is not None
    assert auto.memory.resident_layers == 34
    assert auto.memory.device_total <= 0.95 * auto.device_capacity
    assert auto.step.weight_bytes < 0.002 * none.step.weight_bytes
    assert auto.tokens_per_second > 5 * none.tokens_per_second
    half = relay.simulate(model, resident_layers=17, **options)
    assert none.tokens_per_second < half.tokens_per_second < auto.tokens_per_second
    assert half.step is not None
    assert half.step.weight_bytes == pytest.approx(none.step.weight_bytes / 2, rel=0.1)
