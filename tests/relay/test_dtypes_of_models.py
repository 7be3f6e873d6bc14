"""A model trains in the dtype that the options promise, and a dtype that cannot be trained is refused by name."""

import copy
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from tests.support import matrix, mixed_reference, reference
from tests.support.zoo.plain_models import Build, Stack, batches, gpt, perceptron, regression

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Spectral(nn.Module):
    """A layer with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.inner = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.inner(value), dim=-1) * self.filter
        return value + torch.fft.irfft(spectrum, n=8, dim=-1)


def spectral() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Spectral() for _ in range(3)]


def square(steps: int = 3, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 8, generator=generator).to(dtype), torch.randn(8, 8, generator=generator).to(dtype))
        for _ in range(steps)
    ]


# **** models in half precision ****


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.sample("bf16-bf16")
def test_a_model_in_half_precision_trains_as_its_float32_copy_and_that_is_said_once(
    build: Build, dtype: str, precision: str
) -> None:
    model, plain = gpt().to(HALF[dtype]), gpt().to(HALF[dtype]).float()
    objects = [*model.parameters(), *model.buffers()]
    data = reference.text_batches(3)
    found = mixed_reference.train(plain, data, precision=precision)
    with pytest.warns(UserWarning, match=r"The model is in torch\..*It is float32 now") as caught:
        trainer = build(model, precision=precision)
    assert [trainer.step(batch).loss for batch in data] == found.losses
    assert len([warning for warning in caught if "float32 now" in str(warning.message)]) == 1
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())
    assert all(new is old for new, old in zip([*model.parameters(), *model.buffers()], objects, strict=True))
    rows = {state: kind for state, kind, _ in trainer.ledger.rows() if state in ("weights", "first moments")}
    assert rows == {"weights": torch.float32, "first moments": torch.float32}


OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "AdamW": (relay.AdamW(lr=1e-2), functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)),
    "Adam": (relay.Adam(lr=1e-2), functools.partial(torch.optim.Adam, lr=1e-2, fused=True)),
    "SGD": (relay.SGD(lr=0.1, momentum=0.9), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)),
    "torch's RMSprop": (functools.partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3),) * 2,
    "torch's AdamW": (functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),) * 2,
}


@pytest.mark.parametrize(
    ("name", "dtype", "way"),
    matrix.in_turn(
        [(None, 1), (0.1, 1), (None, 2), (0.1, 2)], OPTIMIZERS, [torch.bfloat16, torch.float16, torch.float64]
    ),
)
@pytest.mark.sample(4)
def test_as_given_trains_like_torch_optim_on_parameters_of_that_dtype(
    build: Build, dtype: torch.dtype, name: str, way: tuple[float | None, int]
) -> None:
    clip, microbatches = way
    mine, torchs = OPTIMIZERS[name]
    modules = [module.to(dtype) for module in perceptron()]
    plain = copy.deepcopy(modules)
    data = [tuple(part.to(dtype) for part in regression(seed=seed)) for seed in range(3)]
    loss = nn.functional.mse_loss
    found = mixed_reference.train(plain, data, microbatches, loss=loss, optimizer=torchs, clip_norm=clip)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = build(
            modules, loss=loss, optimizer=mine, clip_grad_norm=clip, microbatches=microbatches,
            master_weights="as_given",
        )  # fmt: skip
        assert [trainer.step(batch).loss for batch in data] == found.losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_a_model_with_frozen_half_precision_alone_is_left_as_it_is(build: Build) -> None:
    model = gpt().bfloat16().requires_grad_(False)
    for parameter in model.head.parameters():
        parameter.data = parameter.data.float()
        parameter.requires_grad_(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = build(model, precision="bf16")
    trainer.step(reference.text_batches(1)[0])
    assert {parameter.dtype for parameter in model.blocks.parameters()} == {torch.bfloat16}
    model.blocks[2].feed_in.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"blocks\.2\.feed_in\.weight.*was built.*master_weights='as_given'"):
        trainer.step(reference.text_batches(1)[0])


def test_tensors_that_share_memory_share_it_after_the_conversion(build: Build) -> None:
    model = gpt().bfloat16()
    model.register_buffer("seen", model.head.projection.weight.detach()[:2])
    with pytest.warns(UserWarning, match="float32 now"):
        build(model, precision="bf16")
    assert model.seen.dtype == torch.float32
    assert model.seen.data_ptr() == model.head.projection.weight.data_ptr()
    assert torch.equal(model.seen, model.head.projection.weight[:2])


# **** what an optimizer cannot update ****


@pytest.mark.parametrize(
    ("mine", "torchs"),
    [
        (relay.AdamW(lr=1e-2, amsgrad=True), functools.partial(torch.optim.AdamW, lr=1e-2, amsgrad=True)),
        (relay.SGD(lr=0.1, momentum=0.9), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)),
    ],
    ids=["AdamW", "SGD"],
)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_complex_parameters_train_as_in_torch_optim(build: Build, mine: Any, torchs: Any, clip: float | None) -> None:
    for optimizer, exact in ((torchs, True), (mine, False)):
        ours, plain = spectral(), spectral()
        options: dict[str, Any] = {"loss": nn.functional.mse_loss}
        found = mixed_reference.train(plain, square(), 2, optimizer=torchs, clip_norm=clip, **options)
        trainer = build(ours, optimizer=optimizer, microbatches=2, clip_grad_norm=clip, **options)
        losses = [trainer.step(batch).loss for batch in square()]
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact and clip is None else {"rtol": 1e-5, "atol": 1e-6}
        torch.testing.assert_close(losses, found.losses, **tolerance)
        torch.testing.assert_close(dict(trainer.state_dict()), dict(reference.state_of(plain)), **tolerance)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (spectral, {"optimizer": relay.Lion()}, r"'0\.filter' is torch\.complex64: Lion"),
        (spectral, {"state_dtype": "int8"}, r"'0\.filter' is torch\.complex64: AdamW with state_dtype='int8'"),
        (spectral, {"clip_grad_value": 1.0}, r"clip_grad_value=1\.0.*'0\.filter' is torch\.complex64"),
        (
            lambda: [module.bfloat16() for module in perceptron()],
            {"optimizer": relay.LAMB(), "master_weights": "as_given"},
            r"'0\.weight' is torch\.bfloat16: LAMB",
        ),
        (
            spectral,
            {"optimizer": functools.partial(torch.optim.Adamax, foreach=True, capturable=True)},
            r"'0\.filter' is torch\.complex64, and torch\.optim\.Adamax cannot update it",
        ),
    ],
    ids=["Lion", "int8 states", "clipping by value", "LAMB in bf16", "torch's own"],
)
def test_what_an_optimizer_cannot_update_is_refused_by_name_when_the_trainer_is_built(
    build: Build, make: Callable[[], list[nn.Module]], options: dict[str, Any], message: str
) -> None:
    modules = make()
    before = [parameter.dtype for module in modules for parameter in module.parameters()]
    with pytest.raises(ValueError, match=message):
        build(modules, loss=nn.functional.mse_loss, **options)
    assert [parameter.dtype for module in modules for parameter in module.parameters()] == before


# **** models that change between construction and a step ****


def replaced(model: Stack) -> None:
    model.first.weight = nn.Parameter(model.first.weight.detach().clone())


CHANGES: dict[str, Callable[[Stack], Any]] = {
    "half": lambda model: model.half(),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
    "replaced": replaced,
    "added": lambda model: model.first.register_parameter("extra", nn.Parameter(torch.zeros(2))),
    "removed": lambda model: delattr(model.first, "bias"),
}


PATHS = ["step", "evaluate", "predict", "prepare", "save", "load", "state_dict"]


@pytest.mark.parametrize(("change", "path", "after"), matrix.in_turn([0, 1], CHANGES, PATHS))
@pytest.mark.sample(5)
def test_a_model_that_changed_is_noticed_by_every_path(
    build: Build, tmp_path: Path, after: int, change: str, path: str
) -> None:
    model, batch = Stack(), batches(1)[0]
    trainer = build(model)
    trainer.save(tmp_path / "before")
    for _ in range(after):
        trainer.step(batch)
    CHANGES[change](model)
    arguments = {"save": [tmp_path / "after"], "load": [tmp_path / "before"], "state_dict": []}.get(path, [batch])
    with pytest.raises(relay.ModelChanged, match=r"first\..*new trainer"):
        getattr(trainer, path)(*arguments)
    assert not (tmp_path / "after").exists()


# **** eval mode ****


def test_a_model_in_eval_mode_is_said_once_and_trains_as_it_is(build: Build) -> None:
    ours, plain = gpt(dropout=0.5).eval(), gpt(dropout=0.5).eval()
    data = reference.text_batches(2)
    losses = reference.train(plain, data)
    trainer = build(ours)
    with pytest.warns(UserWarning, match=r"The model is in eval mode.*model\.train\(\)") as caught:
        assert [trainer.step(batch).loss for batch in data] == losses
    assert len([warning for warning in caught if "eval mode" in str(warning.message)]) == 1
    assert not ours.training


def test_nothing_is_said_of_a_model_put_into_train_mode_before_the_step_or_of_parts_in_eval_mode(build: Build) -> None:
    whole, modules = gpt(dropout=0.5).eval(), perceptron()
    trainers = build(whole), build(modules, loss=nn.functional.mse_loss)
    whole.train()
    modules[1].eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainers[0].step(reference.text_batches(1)[0])
        trainers[1].step(regression())
