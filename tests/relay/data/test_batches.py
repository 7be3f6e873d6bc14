"""What batches may hold, beside plain PyTorch: tensors that are not by sample, lists by sample, smaller last batches.

The reference trains the pieces that the tests cut by hand.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from relay.errors import BatchError
from tests.support import reference
from tests.support.zoo.plain_models import Build, Output, Stack, batches, output, perceptron, regression
from tests.support.zoo.unspoiled import gpt, text

WIDTH = 8


class Images(nn.Module):
    """Takes for each sample a vector and the patches of its image: all in one tensor, or one tensor for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(
        self,
        inputs: Tensor,
        targets: Tensor,
        pixels: Tensor | list[Tensor] | None = None,
        mask: Tensor | None = None,
        notes: Any = None,
    ) -> Output:
        value = inputs
        if isinstance(pixels, Tensor):
            assert mask is not None
            value = inputs.masked_scatter(mask[..., None].expand_as(inputs), self.patches(pixels))
        elif pixels is not None:
            value = inputs + torch.stack([self.patches(image).sum(0) for image in pixels])[:, None]
        if notes is not None:
            value = value * len(notes)
        for layer in self.layers:
            value = value + torch.tanh(layer(value))
        return output(value, targets)


def images() -> Images:
    torch.manual_seed(0)
    return Images()


def vectors(rows: int = 8) -> dict[str, Any]:
    torch.manual_seed(1)
    return {"inputs": torch.randn(rows, 5, WIDTH), "targets": torch.randn(rows, 5, WIDTH)}


def packed(rows: int = 8) -> dict[str, Any]:
    """A batch whose patches are in one tensor, in the order of their places."""
    mask = torch.rand(rows, 5, generator=torch.Generator().manual_seed(2)) < 0.4
    return vectors(rows) | {"mask": mask, "pixels": torch.randn(int(mask.sum()), 3)}


def by_sample(rows: int = 8, first: int = 1) -> dict[str, Any]:
    """A batch with a list of patches for each sample, `first` of them for the first one."""
    return vectors(rows) | {"pixels": [torch.randn(first + number % 4, 3) for number in range(rows)]}


def part(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {name: value[start:stop] for name, value in batch.items()}


def trained(model: nn.Module, steps: Sequence[Sequence[Any]]) -> list[float]:
    """Plain training: each step a list of pieces, weighted by their samples. Returns the losses."""
    optimizer = reference.adamw(list(model.parameters()))
    losses = []
    for pieces in steps:
        shares = reference.by_samples(pieces)
        losses.append(reference.gradients_of(lambda piece: model(**piece).loss, pieces, shares))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_a_tensor_that_is_not_by_sample_is_refused_before_the_step_with_both_ways_out(build: Build) -> None:
    model = images()
    before = reference.copy_of(model.state_dict())
    batch = packed()
    trainer = build(model, microbatches=2)
    shape = rf"\({len(batch['pixels'])}, 3\)"
    message = rf"'pixels' .*{shape}.* 8 samples.*shared_inputs=\['pixels'\].*list with one tensor for each sample"
    for call in (trainer.step, trainer.evaluate, trainer.predict, trainer.prepare):
        with pytest.raises(BatchError, match=message):
            call(batch)
    reference.assert_same_state(model.state_dict(), before)
    assert trainer.steps == 0


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
def test_with_one_micro_batch_such_a_tensor_is_fine(build: Build) -> None:
    plain, ours, batch = images(), images(), packed()
    trainer = build(ours, microbatches=1)
    assert [trainer.step(batch).loss for _ in range(3)] == trained(plain, [[batch]] * 3)
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("shape", [(5, 2), (1, 5), (16, 5)])
def test_a_list_of_modules_refuses_it_with_its_shape_too(build: Build, shape: tuple[int, ...]) -> None:
    modules = [_Adds(), nn.Linear(5, 5)]
    batch = ((torch.randn(8, 5), torch.randn(*shape)), torch.randn(8, 5))
    with pytest.raises(BatchError, match=rf"inputs .*\({shape[0]}, {shape[1]}\).* 8 samples.*microbatches=1"):
        build(modules, loss=nn.functional.mse_loss, microbatches=2).step(batch)


class _Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return self.inner(given[0]) + given[1].sum()


@pytest.mark.parametrize("value", [torch.tensor(2.0), torch.tensor(7)])
def test_a_tensor_without_dimensions_goes_to_every_micro_batch(build: Build, value: Tensor) -> None:
    class Scaled(Stack):
        def forward(self, inputs: Tensor, targets: Tensor, scale: Tensor) -> Output:  # type: ignore[override]
            return super().forward(inputs * scale, targets)

    torch.manual_seed(0)
    plain = Scaled()
    torch.manual_seed(0)
    ours = Scaled()
    (batch,) = batches(1)
    pieces = [piece | {"scale": value} for piece in reference.cut(batch, 4)]
    assert build(ours).step(batch | {"scale": value}).loss == trained(plain, [pieces])[0]
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("microbatches", [1, 2, 3])
@pytest.mark.sample(2)
def test_a_list_with_one_tensor_for_each_sample_is_cut_by_sample(build: Build, microbatches: int) -> None:
    plain, ours = images(), images()
    size = -(-8 // microbatches)
    given = [by_sample(), by_sample(first=2)]
    steps = [[part(batch, start, start + size) for start in range(0, 8, size)] for batch in given]
    trainer = build(ours, microbatches=microbatches)
    assert [trainer.step(batch).loss for batch in given] == trained(plain, steps)
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


class Boxed(NamedTuple):
    """What a detector is given for one image."""

    boxes: Tensor
    label: int


class _Detector(nn.Module):
    """A layer of a model whose targets are boxes, a different number of them for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.inner(value))


@pytest.mark.parametrize(
    "entry",
    [lambda boxes: {"boxes": boxes}, lambda boxes: Boxed(boxes, 1), lambda boxes: (boxes, boxes + 1)],
    ids=["dict", "named tuple", "tuple"],
)
def test_targets_with_one_container_for_each_sample_are_cut_by_sample(
    build: Build, entry: Callable[[Tensor], Any]
) -> None:
    def loss(found: Tensor, targets: list[Any]) -> Tensor:
        boxes = [target["boxes"] if isinstance(target, dict) else target[0] for target in targets]
        return torch.stack([(row - box).square().mean() for row, box in zip(found, boxes, strict=True)]).mean()

    def modules() -> list[nn.Module]:
        torch.manual_seed(0)
        return [_Detector() for _ in range(3)]

    torch.manual_seed(1)
    inputs, targets = torch.randn(7, 4), [entry(torch.randn(1 + number % 3, 4)) for number in range(7)]
    plain, ours = modules(), modules()
    pieces = [(inputs[start : start + 3].clone(), targets[start : start + 3]) for start in (0, 3, 6)]
    shares = [3 / 7, 3 / 7, 1 / 7]
    expected = reference.gradients_of(lambda piece: loss(nn.Sequential(*plain)(piece[0]), piece[1]), pieces, shares)
    reference.adamw([parameter for module in plain for parameter in module.parameters()]).step()
    assert build(ours, loss=loss, microbatches=3).step((inputs, targets)).loss == expected
    for mine, theirs in zip(ours, plain, strict=True):
        reference.assert_same_state(mine.state_dict(), theirs.state_dict())


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ([torch.zeros(8, 2)] * 8, "list of 8 tensors of length 8.*stack them.*tuple"),
        (list(range(8)), "list of 8 entries that are no tensors.*tensor of them.*tuple"),
        (["a caption"] * 8, "list of 8 entries that are no tensors"),
    ],
    ids=["tensors", "numbers", "strings"],
)
def test_a_list_that_could_be_meant_either_way_is_refused_and_a_tuple_is_not(
    build: Build, notes: list[Any], message: str
) -> None:
    batch = vectors() | {"notes": notes}
    trainer = build(images(), microbatches=2)
    with pytest.raises(BatchError, match=rf"'notes' is a {message}"):
        trainer.step(batch)
    plain = images()
    pieces = [part(vectors(), start, start + 4) | {"notes": tuple(notes)} for start in (0, 4)]
    assert trainer.step(vectors() | {"notes": tuple(notes)}).loss == trained(plain, [pieces])[0]


def test_a_list_named_as_shared_goes_to_every_micro_batch(build: Build) -> None:
    plain, ours, notes = images(), images(), list(range(8))
    pieces = [part(vectors(), start, start + 4) | {"notes": notes} for start in (0, 4)]
    trainer = build(ours, microbatches=2, shared_inputs=["notes"])
    assert trainer.step(vectors() | {"notes": notes}).loss == trained(plain, [pieces])[0]


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.sample(2)
def test_the_last_smaller_batch_of_an_epoch_trains_in_fewer_micro_batches(build: Build, rows: int) -> None:
    plain, ours = gpt(), gpt()
    given = [text(8), text(rows), text(8), text(rows)]
    losses = []
    optimizer = reference.adamw(list(plain.parameters()))
    for batch in given:
        pieces = reference.cut(batch, min(4, len(batch["labels"])))
        losses.append(reference.gradients_of(lambda piece: plain(**piece).loss, pieces, reference.by_targets(pieces)))
        optimizer.step()
        optimizer.zero_grad()
    trainer = build(ours, microbatches=4)
    assert [trainer.step(batch).loss for batch in given] == losses
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


def test_preparing_evaluating_and_predicting_take_such_a_batch_too(build: Build) -> None:
    modules = perceptron()
    plain = nn.Sequential(*perceptron())
    inputs, targets = regression(3)
    trainer = build(modules, loss=nn.functional.mse_loss, microbatches=4)
    trainer.prepare((inputs, targets))
    with torch.no_grad():
        rows = torch.cat([plain(row) for row in inputs.split(1)])
        assert torch.equal(trainer.predict(inputs), rows)
        expected = sum(
            (plain(inputs[n : n + 1]) - targets[n : n + 1]).square().mean().item() * (1 / 3) for n in range(3)
        )
    assert trainer.evaluate((inputs, targets)).loss == pytest.approx(expected, rel=1e-6)


def test_an_epoch_of_a_data_loader_trains_to_its_end(build: Build) -> None:
    inputs, targets = regression(21)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), batch_size=10)
    trainer = build(perceptron(), loss=nn.functional.mse_loss, microbatches=4)
    plain = perceptron()
    losses = reference.train(plain, list(loader), 4, loss=nn.functional.mse_loss)
    assert [trainer.step(batch).loss for batch in loader] == losses


class Attends(nn.Module):
    """A stack whose layers take what is shared between them as well: a gradient comes back to it from each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: Tensor, targets: Tensor, context: Tensor | None = None) -> Output:
        value = inputs
        for layer in self.layers:
            value = value + torch.tanh(layer(value if context is None else value + context))
        return output(value, targets)


def attends() -> Attends:
    torch.manual_seed(0)
    return Attends()


@pytest.mark.parametrize(
    "options",
    [{}, {"stash": "host", "device": "cpu:discrete"}, {"layers_per_slot": 2, "recompute": False}],
    ids=["device", "host", "merged"],
)
def test_inputs_of_a_whole_model_that_require_a_gradient_get_it(build: Build, options: dict[str, Any]) -> None:
    plain, ours = attends(), attends()
    trainer = build(ours, microbatches=3, **options)
    optimizer = reference.adamw(list(plain.parameters()))
    mine, theirs = (
        {
            name: torch.randn(7, 5, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            for seed, name in enumerate(("inputs", "context"))
        }
        for _ in range(2)
    )
    for batch in batches(2, rows=7):
        targets = batch["targets"]
        trainer.step(mine | {"targets": targets})
        for start in (0, 3, 6):
            piece = {name: value[start : start + 3] for name, value in (theirs | {"targets": targets}).items()}
            (plain(**piece).loss * (len(piece["targets"]) / 7)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name in mine:
            assert torch.equal(mine[name].grad, theirs[name].grad)  # of both steps, added up
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_the_inputs_of_a_list_were_computed_from_gets_its_gradient(build: Build, microbatches: int) -> None:
    inputs, targets = regression(8)
    mine, theirs = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(6))
    modules, plain = perceptron(), nn.Sequential(*perceptron())
    build(modules, loss=nn.functional.mse_loss, microbatches=microbatches).step((inputs * 2 + mine, targets))
    value = inputs * 2 + theirs
    rows = value.split(8 // microbatches)
    torch.stack(
        [
            nn.functional.mse_loss(plain(row), target) / microbatches
            for row, target in zip(rows, targets.split(8 // microbatches), strict=True)
        ]
    ).sum().backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_an_input_that_the_loss_does_not_depend_on_has_no_gradient_and_evaluating_gives_none(build: Build) -> None:
    class Detaches(Attends):
        def forward(self, inputs: Tensor, targets: Tensor, context: Tensor | None = None) -> Output:
            assert context is not None
            return super().forward(inputs, targets, context.detach())

    torch.manual_seed(0)
    trainer = build(Detaches(), microbatches=2)
    (batch,) = batches(1, rows=4)
    given = {"inputs": batch["inputs"].requires_grad_(), "context": torch.randn(4, 5, WIDTH, requires_grad=True)}
    trainer.evaluate(given | {"targets": batch["targets"]})
    assert given["inputs"].grad is None
    trainer.step(given | {"targets": batch["targets"]})
    assert given["inputs"].grad is not None
    assert given["context"].grad is None


def test_a_shared_input_gets_the_gradients_of_all_micro_batches(build: Build) -> None:
    class Shared(Attends):
        def forward(self, inputs: Tensor, targets: Tensor, context: Tensor | None = None) -> Output:
            return super().forward(inputs, targets, context)

    torch.manual_seed(0)
    ours = Shared()
    torch.manual_seed(0)
    plain = Shared()
    mine, theirs = torch.zeros(5, WIDTH, requires_grad=True), torch.zeros(5, WIDTH, requires_grad=True)
    (batch,) = batches(1, rows=8)
    build(ours, microbatches=2, shared_inputs=["context"]).step(batch | {"context": mine})
    for piece in reference.cut(batch, 2):
        (plain(**piece, context=theirs).loss / 2).backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_the_gradient_of_an_input_has_no_loss_scale_in_it(build: Build) -> None:
    inputs, targets = regression(8)
    found = []
    for scale in (1.0, 1024.0):
        given = inputs.clone().requires_grad_()
        options = {"precision": "fp16", "loss_scale": scale, "microbatches": 2}
        build(perceptron(), loss=nn.functional.mse_loss, **options).step((given, targets))
        found.append(given.grad)
    assert torch.allclose(found[0], found[1], rtol=1e-2, atol=1e-5)
    assert found[0].abs().max() > 1e-3


def test_a_batch_computed_from_the_models_own_parameters_is_refused_by_name(build: Build) -> None:
    modules = perceptron()
    inputs, targets = regression(8)
    trainer = build(modules, loss=nn.functional.mse_loss, microbatches=2)
    with pytest.raises(BatchError, match=r"'0\.bias'.*detach"):
        trainer.step((inputs + modules[0].bias.sum(), targets))
    assert trainer.steps == 0
