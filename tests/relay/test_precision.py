"""bf16 and fp16 are PyTorch's autocast with fp32 masters, to the last bit."""

import copy
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from relay.models.gpt import cross_entropy
from tests.support import matrix, mixed_reference, reference
from tests.support.zoo.plain_models import Build, gpt, regression

STEPS = 6
MIXED = ["bf16", "fp16"]


@functools.cache
def plainly_trained(whole: bool, precision: str) -> tuple[list[float], dict[str, Tensor]]:
    model = gpt()
    batches = reference.text_batches(STEPS, batch=10)
    if whole:
        return mixed_reference.train(model, batches, precision=precision).losses, reference.state_of(model)
    modules, pairs = model.as_list(), reference.as_pairs(batches)
    found = mixed_reference.train(modules, pairs, loss=cross_entropy, precision=precision)
    return found.losses, reference.state_of(modules)


@pytest.mark.parametrize(
    ("form", "stash", "precision", "device"),
    matrix.in_turn(["cpu", "cpu:discrete"], ["whole", "list"], ["device", "host"], MIXED),
)
@pytest.mark.sample("whole-host-bf16-cpu:discrete", "list-device-fp16-cpu")
def test_mixed_precision_with_a_ragged_last_piece_is_autocast_to_the_last_bit(
    build: Build, form: str, stash: str, device: str, precision: str
) -> None:
    losses, state = plainly_trained(form == "whole", precision)
    options = {"precision": precision, "stash": stash, "device": device, "microbatches": 4}
    batches = reference.text_batches(STEPS, batch=10)  # 10 sequences: pieces of 3, 3, 3 and 1
    if form == "whole":
        trainer = build(gpt(), **options)
        found = [trainer.step(batch).loss for batch in batches]
    else:
        trainer = build(gpt().as_list(), loss=cross_entropy, **options)
        found = [trainer.step(pair).loss for pair in reference.as_pairs(batches)]
    assert found == losses
    reference.assert_same_state(trainer.state_dict(), state)
    assert all(tensor.dtype is torch.float32 for tensor in trainer.state_dict().values())


def test_the_precisions_differ_from_one_another() -> None:
    losses = {precision: plainly_trained(True, precision)[0] for precision in ("fp32", *MIXED)}
    assert all(losses[first] != losses[second] for first, second in itertools.combinations(losses, 2))


# **** what is computed in which dtype ****


class Watched(nn.Module):
    """A block that notes in a buffer how many bits wide some of its values were."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.scores = nn.Linear(8, 8)
        self.register_buffer("bits", torch.zeros(5))

    def forward(self, value: Tensor) -> Tensor:
        wide = self.linear(value)
        normed = self.norm(value.float())
        softened = torch.softmax(self.scores(normed).float(), -1)
        distance = nn.functional.mse_loss(wide, softened, reduction="none").mean(-1, keepdim=True)
        seen = (wide, normed, softened, distance, torch.softmax(wide, -1))
        self.bits.copy_(torch.tensor([float(torch.finfo(tensor.dtype).bits) for tensor in seen]))
        return value + softened * distance


@pytest.mark.parametrize("precision", MIXED)
def test_norm_softmax_and_loss_are_as_wide_as_under_autocast(build: Build, precision: str) -> None:
    torch.manual_seed(0)
    ours = [nn.Linear(6, 8), Watched(), Watched(), nn.Linear(8, 3)]
    plain = copy.deepcopy(ours)
    batches = [regression(12, seed=seed) for seed in range(3)]
    found = mixed_reference.train(plain, batches, loss=nn.functional.mse_loss, precision=precision)
    trainer = build(ours, loss=nn.functional.mse_loss, precision=precision)
    assert [trainer.step(batch).loss for batch in batches] == found.losses
    state = trainer.state_dict()
    reference.assert_same_state(state, reference.state_of(plain))
    # The matrix product is rounded; a norm and a softmax given fp32 and the squared error stay in fp32.
    assert state["1.bits"][:4].tolist() == [16, 32, 32, 32]


class Twice(nn.Module):
    """A layer that uses its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.linear(torch.tanh(self.linear(value)))


@pytest.mark.parametrize("precision", MIXED)
def test_gradients_of_a_weight_used_twice_in_a_layer_are_added_in_fp32(build: Build, precision: str) -> None:
    torch.manual_seed(0)
    ours = [nn.Linear(6, 8), Twice(), Twice(), nn.Linear(8, 3)]
    plain = copy.deepcopy(ours)
    batches = [regression(12, seed=seed) for seed in range(3)]
    loss = nn.functional.mse_loss
    # Autocast's cache would add them rounded, which is less exact; without it they are added as here.
    found = mixed_reference.train(plain, batches, loss=loss, precision=precision, cache=False)
    trainer = build(ours, loss=loss, precision=precision)
    assert [trainer.step(batch).loss for batch in batches] == found.losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def aligned(elements: int, size: int) -> int:
    """A tensor's bytes in a layer's region: whole multiples of 64."""
    return -(-elements * size // 64) * 64


def sent(model: nn.Module, wide: Callable[[str], bool]) -> int:
    """Bytes of weights once down the link: 4 an element where `wide`, else 2."""
    return sum(aligned(tensor.numel(), 4 if wide(name) else 2) for name, tensor in model.named_parameters())


@pytest.mark.parametrize("precision", MIXED)
@pytest.mark.sample("bf16")
def test_weights_used_only_rounded_cross_the_link_in_two_bytes_and_norms_and_embeddings_in_four(
    build: Build, precision: str
) -> None:
    def wide(name: str) -> bool:
        return "norm" in name or name.startswith("embedding")

    model = gpt()
    rounded = sum(aligned(tensor.numel(), 2) for name, tensor in model.named_parameters() if not wide(name))
    trainer = build(model, precision=precision, device="cpu:discrete", slots=8)
    batch = reference.text_batches(1)[0]
    assert trainer.evaluate(batch).weight_bytes == sent(model, wide)
    rows = {(state, dtype): size for state, dtype, size in trainer.ledger.rows()}
    assert rows[("rounded weights", mixed_reference.LOW[precision])] == rounded
    assert rows[("weights", torch.float32)] == sent(model, lambda name: True)
    assert not [state for state, dtype in rows if state == "weights" and dtype is not torch.float32]


def test_a_training_step_sends_half_the_bytes_of_fp32_for_linear_layers(build: Build) -> None:
    def weight_bytes(precision: str) -> int:
        torch.manual_seed(0)
        layers = [nn.Linear(32, 32) for _ in range(6)]
        trainer = build(layers, loss=nn.functional.mse_loss, precision=precision, device="cpu:discrete")
        return trainer.step((torch.randn(8, 32), torch.randn(8, 32))).weight_bytes

    assert weight_bytes("bf16") == weight_bytes("fp16") == weight_bytes("fp32") // 2


@pytest.mark.parametrize("precision", MIXED)
@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample("cpu:discrete-bf16")
def test_tied_embeddings_are_equal(build: Build, device: str, precision: str) -> None:
    model, plain = gpt(tied=True), gpt(tied=True)
    batches = reference.text_batches(STEPS, batch=10)
    losses = mixed_reference.train(plain, batches, precision=precision).losses
    trainer = build(model, precision=precision, device=device)
    assert [trainer.step(batch).loss for batch in batches] == losses
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


# **** around the steps ****


@pytest.mark.parametrize("precision", ["fp32", *MIXED])
@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample("cpu-bf16", "cpu:discrete-fp16")
def test_weights_written_through_the_model_between_steps_are_trained_on(
    build: Build, device: str, precision: str
) -> None:
    model, plain = gpt(), gpt()
    batches = reference.text_batches(4)

    def halve(changed: nn.Module, number: int) -> None:
        if number == 2:
            with torch.no_grad():
                for parameter in changed.parameters():
                    parameter.mul_(0.5)

    losses = mixed_reference.train(
        plain, batches, precision=precision, before_step=functools.partial(halve, plain)
    ).losses
    trainer = build(model, precision=precision, device=device)
    found = []
    for number, batch in enumerate(batches):
        trainer.synchronize()  # with fp16 the updates of the last step may still run
        halve(model, number)
        found.append(trainer.step(batch).loss)
    assert found == losses
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("precision", MIXED)
@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample("cpu:discrete-bf16")
def test_evaluate_and_predict_compute_as_autocast_does(build: Build, device: str, precision: str) -> None:
    model, plain = gpt(dropout=0.5), gpt(dropout=0.5).eval()
    trainer = build(model, precision=precision, device=device)
    batch = reference.text_batches(1)[0]
    pieces = reference.cut(batch, 4)
    with torch.no_grad(), mixed_reference.autocast(precision):
        outputs = [plain(**piece) for piece in pieces]
    shares = reference.by_samples(pieces)
    expected = sum((output.loss * share).item() for output, share in zip(outputs, shares, strict=True))
    assert trainer.evaluate(batch).loss == expected
    logits = trainer.predict(batch).logits
    assert logits.dtype is mixed_reference.LOW[precision]
    assert torch.equal(logits, torch.cat([output.logits for output in outputs]))
    assert trainer.evaluate(batch).grad_norm == 0
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


def test_evaluating_between_steps_leaves_the_training_as_it_is(build: Build) -> None:
    losses, state = plainly_trained(True, "bf16")
    trainer = build(gpt(), precision="bf16", device="cpu:discrete")
    batches = reference.text_batches(STEPS, batch=10)
    found = []
    for batch in batches:
        trainer.evaluate(batches[0])
        found.append(trainer.step(batch).loss)
        trainer.predict({"input_ids": batch["input_ids"]})
    assert found == losses
    reference.assert_same_state(trainer.state_dict(), state)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_have_no_loss_scale(build: Build, precision: str) -> None:
    assert build(gpt(), precision=precision).loss_scale == 1.0


def test_an_unknown_precision_is_refused_with_what_there_is(build: Build) -> None:
    with pytest.raises(ValueError, match="'fp32', 'bf16', 'fp16'"):
        build(gpt(), precision="fp8")
