"""The byte-level GPT: shapes, causality, tying, initialisation, and its two forms."""

import math

import pytest
import torch
from torch.utils import _pytree

from relay.models.gpt import GPT, Block, GPTOutput, cross_entropy


def small(**changes: object) -> GPT:
    torch.manual_seed(0)
    settings = {"layers": 3, "hidden": 32, "heads": 4, "sequence": 16}
    return GPT(**{**settings, **changes})


def some_bytes(batch: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))


def test_without_labels_there_are_logits_and_no_loss() -> None:
    output = small()(some_bytes())
    assert output.loss is None
    assert output.logits.shape == (2, 16, 256)


def test_the_loss_of_an_untrained_model_is_about_that_of_guessing_bytes() -> None:
    output = small(tied=False)(some_bytes(), some_bytes().roll(-1, 1))
    assert output.loss.shape == ()
    assert output.loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_labels_are_compared_in_place_and_not_shifted_again() -> None:
    model, labels = small(), some_bytes().roll(3, 1)
    output = model(some_bytes(), labels)
    rows = torch.log_softmax(output.logits, -1).gather(-1, labels[..., None])
    assert torch.allclose(output.loss, -rows.mean())


def test_masked_labels_do_not_count() -> None:
    model, labels = small(), some_bytes()
    masked = labels.clone()
    masked[:, 4:] = -100
    logits = model(some_bytes()).logits
    expected = cross_entropy(logits[:, :4], labels[:, :4])
    assert torch.allclose(model(some_bytes(), masked).loss, expected)


def test_a_byte_never_sees_the_bytes_after_it() -> None:
    model, text = small(), some_bytes()
    changed = text.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    before, after = model(text).logits, model(changed).logits
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_the_list_form_computes_the_same_logits_with_the_same_parameters() -> None:
    model = small()
    stream = some_bytes()
    for part in model.as_list():
        stream = part(stream)
    assert torch.equal(stream, model(some_bytes()).logits)
    parts = torch.nn.Sequential(*model.as_list())
    assert {id(parameter) for parameter in parts.parameters()} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("tied", [True, False])
def test_tying_shares_the_embedding_with_the_head(tied: bool) -> None:
    model = small(tied=tied)
    assert (model.head.projection.weight is model.embedding.token.weight) == tied
    assert "head.projection.weight" in model.state_dict()


def test_blocks_are_a_module_list_of_equal_blocks() -> None:
    model = small()
    assert isinstance(model.blocks, torch.nn.ModuleList)
    assert all(isinstance(block, Block) for block in model.blocks)
    shapes = [{name: p.shape for name, p in block.named_parameters()} for block in model.blocks]
    assert shapes[0] == shapes[1] == shapes[2]


def test_initialisation_is_gpt2s() -> None:
    model = small(hidden=64, layers=8)
    state = model.state_dict()
    assert state["blocks.0.feed_in.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert state["blocks.0.feed_out.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert state["blocks.0.attention_out.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert state["blocks.0.attention_norm.weight"].eq(1).all()
    assert all(value.eq(0).all() for name, value in state.items() if name.endswith("bias"))


def test_dropout_acts_in_training_only() -> None:
    model = small(dropout=0.5)
    assert not torch.equal(model(some_bytes()).logits, model(some_bytes()).logits)
    model.eval()
    assert torch.equal(model(some_bytes()).logits, model(some_bytes()).logits)


def test_the_output_is_a_pytree_whose_leaves_are_found() -> None:
    leaves, _ = _pytree.tree_flatten(small()(some_bytes(), some_bytes()))
    assert len(leaves) == 2
    assert isinstance(small()(some_bytes()), GPTOutput)


def test_shorter_sequences_run_and_longer_ones_say_what_to_do() -> None:
    model = small()
    assert model(some_bytes(length=5)).logits.shape == (2, 5, 256)
    with pytest.raises(ValueError, match=r"17 bytes, but this GPT has 16 positions"):
        model(some_bytes(length=17))


def test_heads_that_do_not_divide_the_width_are_refused_with_the_values() -> None:
    with pytest.raises(ValueError, match=r"hidden=30, heads=4"):
        GPT(hidden=30, heads=4)


def test_every_parameter_gets_a_gradient() -> None:
    model = small()
    model(some_bytes(), some_bytes()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
