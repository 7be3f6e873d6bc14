"""Models of many kinds compute the same after they are cut into segments."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relay.graph.pytree import tensor_leaves
from relay.models import GPT
from relay.partition import partition_model
from tests.support import reference
from tests.support.zoo.plain_models import WIDTH, Block, Build, Output, batches, check, output


def layers_of(model: nn.Module, batch: dict[str, Tensor]) -> list[str]:
    """The names of the segments a model is cut into."""
    tensors, tree = tensor_leaves(batch)
    return [segment.name for segment in partition_model(model, tensors, tree).segments]


class InModuleList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        for layer in self.layers:
            inputs = layer(inputs)
        return output(inputs, targets)


class InSequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.trunk = nn.Sequential(*(Block() for _ in range(3)))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        return output(self.last(self.trunk(self.first(inputs))), targets)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = InSequential()

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        return self.body(inputs * 2, targets)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (InModuleList, ["layers.0", "layers.1", "layers.2", "epilogue"]),
        (InSequential, ["prologue", "trunk.0", "trunk.1", "trunk.2", "epilogue"]),
        (Nested, ["prologue", "body.trunk.0", "body.trunk.1", "body.trunk.2", "epilogue"]),
    ],
    ids=["ModuleList", "Sequential", "nested"],
)
@pytest.mark.sample("nested")
def test_repeated_layers_are_found_where_they_are(
    build: Build, make: Callable[[], nn.Module], names: list[str]
) -> None:
    assert layers_of(make(), batches(1)[0]) == names
    check(build, make, batches())


def test_a_gpt_is_cut_into_embedding_blocks_and_head() -> None:
    model = GPT(vocabulary=32, layers=2, hidden=8, heads=2, sequence=12)
    batch = reference.text_batches(1, vocabulary=32)[0]
    assert layers_of(model, batch) == ["prologue", "blocks.0", "blocks.1", "epilogue"]


class Scaled(Block):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, value: Tensor) -> Tensor:
        return value + self.scale * torch.tanh(self.inner(value))


class Mode(Block):
    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, value: Tensor) -> Tensor:
        return value + self.settings["function"](self.inner(value))


def with_layers(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = InModuleList()
        model.layers = nn.ModuleList(layer() for layer in layers)
        return model

    return make


@pytest.mark.parametrize(
    "make",
    [
        with_layers(lambda: Scaled(0.5), lambda: Scaled(2.0), lambda: Scaled(0.5)),
        with_layers(lambda: Mode({"function": torch.tanh}), lambda: Mode({"function": torch.relu})),
    ],
    ids=["a number", "a function in a dict"],
)
def test_layers_that_differ_in_an_attribute_alone_are_not_run_as_one(
    build: Build, make: Callable[[], nn.Module]
) -> None:
    check(build, make, batches())


class Numbered(Block):
    """Holds its layer index, and reads it only if asked to in the constructor."""

    def __init__(self, number: int, looks: bool) -> None:
        super().__init__()
        self.number = number
        self.looks = looks

    def forward(self, value: Tensor) -> Tensor:
        value = super().forward(value)
        return value * (1 + self.number) if self.looks else value


@pytest.mark.parametrize(("looks", "programs"), [(False, 2), (True, 4)])
def test_layers_share_a_program_unless_they_differ_in_what_their_code_looks_at(
    build: Build, looks: bool, programs: int
) -> None:
    """The first layer has one of its own: nothing asks for the gradient of what it is given."""
    make = with_layers(*(functools.partial(Numbered, number, looks) for number in range(4)))
    trainer = check(build, make, batches(), microbatches=1)
    compiled = next(iter(trainer._compiler.cache)).stages
    assert len({id(stage.captured) for stage in compiled if stage.segment.name.startswith("layers")}) == programs


class WithBuffer(Block):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.scale * self.inner(value)


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_every_layer_has_the_buffers_of_its_own(build: Build, device: str) -> None:
    check(build, with_layers(lambda: WithBuffer(0.5), lambda: WithBuffer(3.0)), batches(), device=device)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor, mask: Tensor | None = None, *, scale: float = 1.0, bias: Any = None) -> Tensor:
        scores = self.inner(value) @ value.transpose(1, 2) * scale
        if bias is not None:
            scores = scores + bias["table"]
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, :], -1e9)
        return value + scores.softmax(-1) @ value


class Masked(nn.Module):
    """Layers called with a mask by place and with numbers and nested tensors by keyword."""

    def __init__(self, length: int = 5) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(length, length))
        self.layers = nn.ModuleList(Attending() for _ in range(4))

    def forward(self, inputs: Tensor, targets: Tensor, mask: Tensor) -> Output:
        table = self.table * 0.5
        for layer in self.layers:
            inputs = layer(inputs, mask, scale=0.3, bias={"table": table})
        return output(inputs, targets)


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.sample(3)
def test_masks_keywords_and_a_bias_that_all_layers_share_work(build: Build, stash: str, device: str) -> None:
    given = batches()
    for number, batch in enumerate(given):
        batch["mask"] = torch.rand(12, 5, generator=torch.Generator().manual_seed(number)) > 0.3
        batch["mask"][:, 0] = True
    check(build, Masked, given, stash=stash, device=device)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor, memory: Tensor) -> tuple[Tensor, dict[str, Any]]:
        new = torch.tanh(self.inner(value) + memory)
        return new, {"memory": new + memory, "unused": new * 2, "constant": 3}


class Pairs(nn.Module):
    """Layers that return a tuple with a dict in it, of which one tensor is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        memory = torch.zeros_like(inputs)
        for layer in self.layers:
            inputs, extra = layer(inputs, memory)
            memory = extra["memory"] * extra["constant"]
        return output(inputs + memory, targets)


@pytest.mark.parametrize("stash", ["device", "host"])
def test_layers_may_return_several_tensors_in_a_nest(build: Build, stash: str) -> None:
    check(build, Pairs, batches(), stash=stash)


class Shared(nn.Module):
    """Two layers, each called three times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        for _ in range(3):
            for layer in self.layers:
                inputs = layer(inputs)
        return output(inputs, targets)


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_a_layer_called_several_times_gets_the_sum_of_its_gradients(build: Build, device: str) -> None:
    check(build, Shared, batches(), microbatches=1, device=device)


class Between(nn.Module):
    """Two lists of layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.ModuleList([Block(), Block()])
        self.middle = nn.LayerNorm(WIDTH)
        self.upper = nn.ModuleList([Block(), Block()])

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        for layer in self.lower:
            inputs = layer(inputs)
        inputs = self.middle(inputs)
        for layer in self.upper:
            inputs = layer(inputs)
        return output(inputs, targets)


def test_what_stands_between_two_lists_of_layers_is_run_between_them(build: Build) -> None:
    names = ["lower.0", "lower.1", "interlude.2", "upper.0", "upper.1", "epilogue"]
    assert layers_of(Between(), batches(1)[0]) == names
    check(build, Between, batches())


class Simple(nn.Sequential):
    """A layer that uses its input once."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Skipping(nn.Module):
    """A U-Net's connections: each layer on the way up takes what the one on the way down made."""

    def __init__(self, layer: type[nn.Module] = Simple) -> None:
        super().__init__()
        self.down = nn.ModuleList(layer() for _ in range(3))
        self.up = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        saved = []
        for layer in self.down:
            inputs = layer(inputs)
            saved.append(inputs)
        for layer in self.up:
            inputs, _ = layer(inputs, saved.pop())
        return output(inputs, targets)


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.sample(3)
def test_what_one_layer_makes_may_be_used_by_a_much_later_one(build: Build, stash: str, device: str) -> None:
    check(build, Skipping, batches(), stash=stash, device=device)


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_a_skipped_to_value_that_one_layer_uses_twice_gets_its_gradients_in_autograds_order(
    build: Build, device: str
) -> None:
    # Plain PyTorch adds the three gradients as they come: (skip + residual) + branch.
    check(build, functools.partial(Skipping, Block), batches(), device=device)


class Stopping(nn.Module):
    """A part of the forward without gradients, and a value that is only looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        with torch.no_grad():
            scale = self.first(inputs).abs().mean(-1, keepdim=True)
        value = self.first(inputs)
        for layer in self.layers:
            value = layer(value * scale) + value.detach()
        return output(value, targets)


def test_parts_without_gradients_stay_without(build: Build) -> None:
    check(build, Stopping, batches())


class ModelDict(InModuleList):
    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Any]:  # type: ignore[override]
        result = super().forward(inputs, targets)
        return {"loss": result.loss, "value": result.value, "name": "a model"}


def test_a_model_may_return_a_dict_with_its_loss(build: Build) -> None:
    torch.manual_seed(0)
    trainer = build(ModelDict())
    torch.manual_seed(0)
    plain = InModuleList()
    given = batches()
    losses = reference.train(plain, given)
    assert [trainer.step(batch).loss for batch in given] == losses
    found = trainer.predict(given[0])
    assert found["name"] == "a model"
    torch.testing.assert_close(found["value"], plain.eval()(**given[0]).value, rtol=1e-6, atol=1e-6)


def test_a_list_may_hold_one_module_several_times(build: Build) -> None:
    def make() -> list[nn.Module]:
        torch.manual_seed(0)
        block = Block()
        return [block, Block(), block, nn.Linear(WIDTH, WIDTH)]

    ours, plain = make(), make()
    given = [tuple(batch.values()) for batch in batches()]
    losses = reference.train(plain, given, 1, loss=nn.functional.mse_loss)
    trainer = build(ours, loss=nn.functional.mse_loss, microbatches=1)
    assert [trainer.step(batch).loss for batch in given] == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))
