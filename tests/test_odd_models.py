"""Models built in ways that nobody plans for: trained as in plain PyTorch, or refused by name; never silently else."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import pytest
import reference
import torch
from plain_models import WIDTH, Block, Build, Output, batches, check, output
from told_masks import ToldMasks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import relay
from relay.errors import CaptureError, PartitionError

functional = nn.functional


class Layers(nn.Module):
    """Layers called one after the other; models below differ in the layers, or in how they are called."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(count))

    def run(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
        return value

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        return output(self.run(inputs), targets)


# **** what layers are given and return ****


@dataclasses.dataclass(frozen=True)
class State:
    hidden: Tensor
    memory: Tensor
    depth: int = 0


class OfState(Block):
    def forward(self, state: State) -> State:  # type: ignore[override]
        hidden = super().forward(state.hidden + state.memory)
        return State(hidden, state.memory * 0.5 + hidden, state.depth + 1)


class Dataclasses(Layers):
    """Layers that take a dataclass and return one."""

    def __init__(self) -> None:
        super().__init__(OfState)

    def run(self, value: Tensor) -> Tensor:
        state = State(value, torch.zeros_like(value))
        for layer in self.layers:
            state = layer(state)
        return state.hidden + state.memory * state.depth


class ByKeyword(Block):
    def forward(self, *, hidden: Tensor, scale: float, extra: Tensor | None = None) -> Tensor:  # type: ignore[override]
        hidden = super().forward(hidden) * scale
        return hidden if extra is None else hidden + extra


class KeywordsOnly(Layers):
    def __init__(self) -> None:
        super().__init__(ByKeyword)

    def run(self, value: Tensor) -> Tensor:
        first = value
        for number, layer in enumerate(self.layers):
            value = layer(hidden=value, scale=0.5 + number, extra=first if number == 1 else None)
        return value


class IntoDict(Block):
    def forward(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        state["hidden"] = super().forward(state["hidden"])
        state.setdefault("kept", []).append(state["hidden"] * 0.5)


class DictsChanged(Layers):
    """Layers that return nothing: they change the dict they are given, and a list within it."""

    def __init__(self) -> None:
        super().__init__(IntoDict)

    def run(self, value: Tensor) -> Tensor:
        state: dict[str, Any] = {"hidden": value}
        kept = state["kept"] = []  # type: ignore[var-annotated]
        for layer in self.layers:
            layer(state)
        assert len(kept) == len(self.layers)
        return state["hidden"] + kept[0] * kept[1]


class Cell:
    """An object of the model's own that layers write to."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class IntoObject(Block):
    def forward(self, cell: Cell) -> None:  # type: ignore[override]
        cell.value = super().forward(cell.value)


class ObjectsChanged(Layers):
    def __init__(self) -> None:
        super().__init__(IntoObject)

    def run(self, value: Tensor) -> Tensor:
        cell = Cell(value)
        for layer in self.layers:
            layer(cell)
        return cell.value


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, value: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
        one, two, three = self.inner(value).split(WIDTH, -1)
        return one, {"turned": two.transpose(0, 1)}, (value, mask), three[:, :0], one


class ViewsAndNothings(Layers):
    """Layers that return views, their own input, None, a tensor without elements, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__(Several)

    def run(self, value: Tensor) -> Tensor:
        mask = None
        for layer in self.layers:
            one, two, (same, mask), empty, again = layer(value, mask)
            value = one * 0.5 + two["turned"].transpose(0, 1) + same + again + empty.sum()
        return value


class Moved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, value: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return value + self.table(places), (places * 3 + 1) % 16


class IntegersBetween(Layers):
    """Layers that hand on integers."""

    def __init__(self) -> None:
        super().__init__(Moved)

    def run(self, value: Tensor) -> Tensor:
        places = (value[..., 0] * 4).long().abs() % 16
        for layer in self.layers:
            value, places = layer(value, places)
        return value


class Dense(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH * count, WIDTH)

    def forward(self, features: list[Tensor]) -> Tensor:
        return torch.tanh(self.inner(torch.cat(features, -1)))


class DenseNet(Layers):
    """Layers of other sizes each, that take a list of all that came before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dense(count) for count in range(1, 4))

    def run(self, value: Tensor) -> Tensor:
        features = [value]
        for layer in self.layers:
            features.append(layer(features))
        return features[-1] + features[-2]


class Growing(Block):
    def forward(self, value: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(value + memory.mean(1, keepdim=True)), torch.cat([memory, value], 1)


class GrowingMemory(Layers):
    """Layers that hand on more each time."""

    def __init__(self) -> None:
        super().__init__(Growing)

    def run(self, value: Tensor) -> Tensor:
        memory = value
        for layer in self.layers:
            value, memory = layer(value, memory)
        return value + memory.mean()


# **** how layers are held and called ****


class Universal(Layers):
    """One layer, called four times, told which time it is."""

    def __init__(self) -> None:
        super().__init__(count=1)
        self.steps = nn.Embedding(4, WIDTH)

    def run(self, value: Tensor) -> Tensor:
        for number in range(4):
            value = self.layers[0](value + self.steps.weight[number])
        return value


class ThereAndBack(Layers):
    """Layers in order, and then in reverse."""

    def run(self, value: Tensor) -> Tensor:
        for layer in [*self.layers, *reversed(self.layers)]:
            value = layer(value)
        return value


class Backwards(Layers):
    def run(self, value: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            value = layer(value)
        return value


class Siamese(Layers):
    """Both the inputs and the targets pass through the layers, and are compared."""

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        one, other = (functional.normalize(self.run(value), dim=-1) for value in (inputs, targets))
        return Output(-(one * other).sum(-1).mean(), one)


class InModuleDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer{number}": Block() for number in range(3)})

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        for layer in self.layers.values():
            inputs = layer(inputs)
        return output(inputs, targets)


class Stages(nn.Module):
    """Lists in a list, with a list of what comes between, and a loss at the end of each."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        losses = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            for layer in stage:
                inputs = layer(inputs)
            scores = head(inputs)
            losses.append(functional.mse_loss(scores, targets))
        return Output(losses[0] * 0.25 + losses[1] * 0.75, scores)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        one, other = self.inner(value).chunk(2, -1)
        return value + one * torch.sigmoid(other)


class Hybrid(Layers):
    """Layers of two classes in turn, and one without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Gated(), Block(), Gated(), nn.Identity()])


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH // 2, WIDTH // 2), nn.Linear(WIDTH // 2, WIDTH // 2)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        right = right + torch.tanh(self.one(left))
        return left + torch.tanh(self.other(right)), right


class Reversible(Layers):
    """Two streams, as in RevNets, exchanged between layers."""

    def __init__(self) -> None:
        super().__init__(Coupling)

    def run(self, value: Tensor) -> Tensor:
        left, right = value.chunk(2, -1)
        for layer in self.layers:
            right, left = layer(left, right)
        return torch.cat([left, right], -1)


class Slices(nn.Module):
    """Parts of a Sequential, called as Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(4)))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        return output(self.layers[2:](self.layers[:2](inputs).flip(1)), targets)


class Biased(Block):
    def forward(self, value: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(value) + bias


class ParametersGiven(Layers):
    """Layers that are given a parameter and a buffer of the model, and weights that a network makes."""

    def __init__(self) -> None:
        super().__init__(Biased)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.register_buffer("table", torch.randn(WIDTH))
        self.codes = nn.Parameter(torch.randn(3, 4))
        self.make = nn.Linear(4, WIDTH)

    def run(self, value: Tensor) -> Tensor:
        value = self.layers[0](value, self.bias)
        value = self.layers[1](value, self.table)
        return self.layers[2](value, self.make(self.codes[2]) + self.bias)


class Checkpointed(Layers):
    """Layers that are checkpointed already."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def run(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for layer in self.layers:
            value = checkpoint(layer, value, use_reentrant=self.reentrant)
        return value


class Hooked(Layers):
    """Forward hooks on layers and within, and a backward hook within."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_forward_hook(lambda module, inputs, result: result * 1.5)
        self.layers[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        self.layers[0].inner.register_forward_hook(lambda module, inputs, result: result.clamp(-1, 1))
        self.layers[2].inner.register_full_backward_hook(lambda module, given, _: tuple(one * 0.5 for one in given))


# **** what layers do inside ****


class Rounded(torch.autograd.Function):
    """A gradient of its own, which is not that of what it computes."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.round()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class StraightThrough(Block):
    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(Rounded.apply(value * 4) / 4)
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient * 0.5)
        return value


class Fourier(Block):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(torch.fft.fft2(value).real * 0.1)


class OldWeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.weight_norm(self.inner)


class Shadowed(nn.Module):
    """Follows its own weights with a moving average, which it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.lerp_(self.inner.weight, 0.1)
        return value + self.inner(value) - functional.linear(value, self.average)


class Seen(Block):
    """Leaves what it made in an attribute for a look, and has a constant in another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.full((WIDTH,), 0.5)

    def forward(self, value: Tensor) -> Tensor:
        self.seen = super().forward(value) * self.scale
        return self.seen


class Quantised(nn.Module):
    """A codebook between two lists of layers: nearest neighbours, a straight-through estimate, losses of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = Layers(), Layers()
        self.codes = nn.Embedding(7, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.lower.run(inputs)
        nearest = torch.cdist(value.flatten(0, 1), self.codes.weight).argmin(-1)
        code = self.codes(nearest).view_as(value)
        extra = functional.mse_loss(code, value.detach()) + 0.25 * functional.mse_loss(value, code.detach())
        value = self.upper.run(value + (code - value).detach())
        return Output(functional.mse_loss(value, targets) + extra, value)


def of(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Layers(block)


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{
        made.__name__: made
        for made in (
            Dataclasses, KeywordsOnly, DictsChanged, ObjectsChanged, ViewsAndNothings, IntegersBetween, DenseNet,
            GrowingMemory, Backwards, InModuleDict, Stages, Hybrid, Reversible, Slices, ParametersGiven, Hooked,
            Quantised,
        )
    },
    "checkpointed": lambda: Checkpointed(False),
    "checkpointed, reentrant": lambda: Checkpointed(True),
    "custom gradients": of(StraightThrough),
    "Fourier": of(Fourier),
    "old weight norm": of(OldWeightNorm),
    "moving average of weights": of(Shadowed),
    "attributes": of(Seen),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", MODELS)
def test_an_odd_model_trains_as_in_pytorch(build: Build, name: str) -> None:
    check(build, MODELS[name], batches(3), microbatches=3, stash="host", device="cpu:discrete")


@pytest.mark.parametrize("make", [Universal, ThereAndBack, Siamese])
def test_a_model_that_calls_its_layers_several_times_trains_as_in_pytorch(
    build: Build, make: Callable[[], nn.Module]
) -> None:
    """With one micro-batch, where there is one order of summation."""
    check(build, make, batches(3), microbatches=1)


class Dropping(Block):
    """Stochastic depth: a whole row of the batch passes the layer by, or not."""

    def forward(self, value: Tensor) -> Tensor:
        kept = value.new_empty(len(value), 1, 1).bernoulli_(0.5)
        return value + (super().forward(value) - value) * kept / 0.5


def test_stochastic_depth_by_row_draws_the_promised_numbers(build: Build) -> None:
    def make() -> Layers:
        torch.manual_seed(0)
        return Layers(Dropping)

    ours, plain = make(), make()
    masks = ToldMasks(plain, ["layers.0", "layers.1", "layers.2", "epilogue"], 4)
    optimizer = reference.adamw(list(plain.parameters()))
    trainer = build(ours, microbatches=2, seed=4)
    for step, batch in enumerate(batches(3)):
        optimizer.zero_grad()
        pieces = reference.cut(batch, 2)
        loss = 0.0
        for number, (piece, share) in enumerate(zip(pieces, reference.by_samples(pieces), strict=True)):
            masks.begin(step, number)
            with masks:
                value = plain(**piece).loss * share
            value.backward()
            loss += value.item()
        optimizer.step()
        assert trainer.step(batch).loss == loss
    assert masks.drawn == 3 * 2 * 3
    reference.assert_same_state(ours.state_dict(), plain.state_dict())


class AsksWhatIsTrained(Layers):
    """It asks between layers whether what came so far is trained, and goes on in place."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def run(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
            value += 0.1 if value.requires_grad else 0.2
        return value


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_model_learns_between_layers_what_is_trained(build: Build, frozen: int) -> None:
    check(build, lambda: AsksWhatIsTrained(frozen), batches(2), microbatches=2)


# **** what cannot be kept is refused ****


class RoundedOutside(Layers):
    def run(self, value: Tensor) -> Tensor:
        return Rounded.apply(super().run(value))


class HookOutside(Layers):
    def run(self, value: Tensor) -> Tensor:
        value = super().run(value)
        value.register_hook(lambda gradient: gradient * 0.5)
        return value


class HookWhereTrained(Layers):
    """What is trained before the hook is the layers alone, and they are one op to the trace."""

    def run(self, value: Tensor) -> Tensor:
        value = super().run(value)
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient * 0.5)
        return value


class HookOfParameter(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].inner.weight.register_hook(lambda gradient: gradient * 0.5)


class HookAfterAccumulation(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].inner.weight.register_post_accumulate_grad_hook(lambda parameter: None)


class BackwardHookOfLayer(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].register_full_backward_hook(lambda module, given, _: tuple(one * 0.5 for one in given))


class LossLeft(Block):
    def forward(self, value: Tensor) -> Tensor:
        self.extra = value.square().mean()
        return super().forward(value)


class LossInAttributes(Layers):
    """Auxiliary losses that layers leave in attributes."""

    def __init__(self) -> None:
        super().__init__(LossLeft)

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        found = super().forward(inputs, targets)
        return Output(found.loss + sum(layer.extra for layer in self.layers), found.value)


class Remembering(Block):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value) - self.average
        self.average = 0.9 * self.average + 0.1 * value.detach().mean((0, 1))
        return value


class RememberingOutside(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(WIDTH)

    def run(self, value: Tensor) -> Tensor:
        value = super().run(value - self.average)
        self.average = 0.9 * self.average + 0.1 * value.detach().mean((0, 1))
        return value


class DropsLayers(Layers):
    def run(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) >= 0.5:
                value = layer(value)
        return value


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (RoundedOutside, r"Rounded\.apply"),
        (HookOutside, "register_hook"),
        (HookWhereTrained, "register_hook"),
        (HookOfParameter, r"layers\.1\.inner\.weight.*hook"),
        (HookAfterAccumulation, r"layers\.1\.inner\.weight.*hook"),
        (BackwardHookOfLayer, r"layers\.1.*backward hook"),
        (LossInAttributes, "left in an attribute"),
        (of(Remembering), r"average.*register_buffer"),
        (RememberingOutside, r"average.*register_buffer"),
        (DropsLayers, r"layerdrop.*active="),
        (lambda: Layers(lambda: torch.compile(Block(), backend="eager")), r"layers\.0.*torch\.compile"),
    ],
)
def test_what_a_capture_would_lose_is_refused_by_name_and_changes_nothing(
    build: Build, make: Callable[[], nn.Module], says: str
) -> None:
    torch.manual_seed(0)
    model = make()
    before = reference.copy_of(model.state_dict())
    attributes = {name: value for name, value in vars(model).items() if isinstance(value, Tensor)}
    trainer = build(model, microbatches=2)
    with pytest.raises((PartitionError, CaptureError), match=says):
        trainer.step(batches(1)[0])
    reference.assert_same_state(model.state_dict(), before)
    assert all(vars(model)[name] is value for name, value in attributes.items())


def test_custom_gradients_anywhere_are_kept_in_a_list_of_modules(build: Build) -> None:
    class Ending(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return Rounded.apply(value)

    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        return [Block(), Block(), Ending()]

    ours, plain = make(), make()
    given = [tuple(batch.values()) for batch in batches(3)]
    losses = reference.train(plain, given, 2, loss=functional.mse_loss)
    trainer = build(ours, loss=functional.mse_loss, microbatches=2)
    assert [trainer.step(batch).loss for batch in given] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


@pytest.mark.parametrize("draw", [random.random, numpy.random.random])
@pytest.mark.parametrize("inside", [False, True])
def test_numbers_drawn_by_python_while_recording_are_said(
    build: Build, draw: Callable[[], float], inside: bool
) -> None:
    class Drawing(Block):
        def forward(self, value: Tensor) -> Tensor:
            return super().forward(value) * (1 + (draw() if inside else 0))

    class Model(Layers):
        def run(self, value: Tensor) -> Tensor:
            return super().run(value) * (1 if inside else draw())

    trainer = build(Model(Drawing), microbatches=1)
    with pytest.warns(UserWarning, match="drew from Python's or numpy's random numbers"):
        trainer.step(batches(1)[0])


def test_a_list_of_layers_within_a_dict_of_parts_is_found(build: Build) -> None:
    """The parts of a GPT, in a ModuleDict with two embeddings in it."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts: Iterable[tuple[str, nn.Module]] = [
                ("one", nn.Linear(WIDTH, WIDTH)), ("two", nn.Linear(WIDTH, WIDTH)),
                ("layers", nn.ModuleList([Block(), Block()])),
            ]  # fmt: skip
            self.parts = nn.ModuleDict(dict(parts))

        def forward(self, inputs: Tensor, targets: Tensor) -> Output:
            value = self.parts["two"](torch.tanh(self.parts["one"](inputs)))
            for layer in self.parts["layers"]:
                value = layer(value)
            return output(value, targets)

    trainer = check(build, Parts, batches(2))
    assert isinstance(trainer, relay.Trainer)
    names = [one.segment.name for one in next(iter(trainer._recorder.cache)).stations]
    assert names == ["prologue", "parts.layers.0", "parts.layers.1", "epilogue"]
