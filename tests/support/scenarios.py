"""What a schedule has to get right, each thing as a short run of a tiny model on whatever device is asked for.

A scenario is one entry of SCENARIOS: how to make the model, the trainer's options, and the run, which returns all
that the outside can see of it. The CPU's answer is the reference, and other tests hold that to plain PyTorch.

What was captured of a model is shared by all runs of a scenario, since tracing takes ten times as long as the steps.
Hence no scenario changes the architecture: that is tested in `test_edit_layers.py`, there under `--adversary` too.
"""

import functools
import tempfile
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import relay
from relay.models import GPT
from relay.optim.int8_state import Int8State
from relay.runtime.code_states import CodeState
from relay.runtime.program_cache import ProgramCache
from relay.runtime.stages import CompiledModel
from tests.support import reference
from tests.support.shared_captures import share

STEPS = 3
WIDTH = 8

Seen = list[Any]


class Output(NamedTuple):
    loss: Tensor
    value: Tensor


# **** models ****


def gpt(**changes: Any) -> GPT:
    settings = {"vocabulary": 64, "layers": 3, "hidden": 16, "heads": 2, "sequence": 12, "tied": False}
    return GPT(**{**settings, **changes})


def half_frozen() -> GPT:
    model = gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("embedding", "blocks.1", "blocks.2.feed_in.weight")))
    return model


class Normed(nn.Sequential):
    """A layer with running statistics, changed by the forward and not looked at by the recompute."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


class Counting(nn.Module):
    """A layer whose backward needs a buffer as its forward found it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        result = torch.tanh(self.inner(value) * self.scale.clone())
        self.scale.mul_(0.9).add_(result.detach().mean(0), alpha=0.1)
        return result


class Routed(nn.Module):
    """Experts chosen by the data, which runs eagerly; in most steps one of them has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        chosen = self.router(value).argmax(-1)
        result = torch.zeros_like(value)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero(as_tuple=True)[0]
            if len(rows):
                result = result.index_add(0, rows, expert(value[rows]))
        return value + torch.tanh(result)


def stack(layer: Callable[[], nn.Module]) -> list[nn.Module]:
    return [nn.Linear(6, WIDTH), *(layer() for _ in range(3)), nn.Linear(WIDTH, 3)]


def bare_ending() -> list[nn.Module]:
    return [nn.Linear(6, WIDTH), nn.Linear(WIDTH, 3), nn.Tanh()]


class Crossing(nn.Module):
    """Values that many layers use, and one that the last uses again: a mask, a memory, a residual from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.decoder = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(3))

    def forward(self, inputs: Tensor, mask: Tensor, targets: Tensor) -> Output:
        memory = inputs
        for layer in self.encoder:
            memory = torch.tanh(layer(memory)) * mask
        value = inputs
        for layer in self.decoder:
            value = torch.tanh(layer(value, memory)) * mask
        return Output(nn.functional.mse_loss(value + inputs + memory, targets), value)


# **** batches ****


def regressions(steps: int = STEPS, rows: int = 12) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)) for _ in range(steps)
    ]


def crossings() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {name: torch.randn(10, WIDTH, generator=generator) for name in ("inputs", "mask", "targets")}
        for _ in range(STEPS)
    ]


# **** runs ****


def stepped(trainer: relay.Trainer, batches: list[Any], **options: Any) -> Seen:
    seen = []
    for batch in batches:
        metrics = trainer.step(batch, **options)
        seen.append((metrics.loss, metrics.grad_norm, metrics.skipped))
    return seen


def on_text(trainer: relay.Trainer) -> Seen:
    """10 sequences in pieces of 3, 3, 3 and 1."""
    return stepped(trainer, reference.text_batches(STEPS, batch=10))


def on_vectors(trainer: relay.Trainer) -> Seen:
    return stepped(trainer, regressions())


def across(trainer: relay.Trainer) -> Seen:
    return stepped(trainer, crossings())


def looked_at_between_steps(trainer: relay.Trainer) -> Seen:
    seen: Seen = []
    for batch in reference.text_batches(STEPS):
        seen += stepped(trainer, [batch])
        seen.append(trainer.predict({"input_ids": batch["input_ids"]}).logits.clone())
        seen.append(trainer.evaluate(batch).loss)
    return seen


def written_to_between_steps(trainer: relay.Trainer) -> Seen:
    seen: Seen = []
    for batch in reference.text_batches(STEPS):
        seen += stepped(trainer, [batch])
        trainer.synchronize()
        with torch.no_grad():
            for parameter in trainer.state_dict().values():
                parameter.mul_(0.9)
    return seen


def of_changing_shapes(trainer: relay.Trainer) -> Seen:
    shapes = [(8, 12), (5, 7), (8, 12)]
    return stepped(trainer, [reference.text_batches(1, *shape, seed=n)[0] for n, shape in enumerate(shapes)])


def with_layers_left_out(trainer: relay.Trainer) -> Seen:
    batches = reference.text_batches(4)
    subsets = [[0, 2], [2, 1], [0, 1, 2], [1]]
    return [
        loss
        for batch, subset in zip(batches, subsets, strict=True)
        for loss in stepped(trainer, [batch], active_layers=subset)
    ]


def spoiled_in_between(trainer: relay.Trainer) -> Seen:
    first, second, third = regressions()
    return stepped(trainer, [first, (torch.full_like(second[0], torch.nan), second[1]), third])


def begun_again(trainer: relay.Trainer) -> Seen:
    """A checkpoint is written behind a step and loaded after it: the step comes out the same."""
    first, second, third = reference.text_batches(3)
    with tempfile.TemporaryDirectory() as folder:
        seen = stepped(trainer, [first])
        trainer.save(f"{folder}/checkpoint", background=True)
        seen += stepped(trainer, [second])
        trainer.wait_saved()
        trainer.load(f"{folder}/checkpoint")
        seen += stepped(trainer, [second, third])
    assert seen[1] == seen[2]
    return seen


# **** all of them ****


@dataclass(frozen=True)
class Scenario:
    """`run` returns what it saw of a trainer of `make()` with these options."""

    make: Callable[[], Any]
    run: Callable[[relay.Trainer], Seen] = on_text
    options: dict[str, Any] = field(default_factory=dict)


Run = Callable[[relay.Trainer], Seen]


def _scenario(make: Callable[[], Any] = gpt, run: Run = on_text, **options: Any) -> Scenario:
    return Scenario(make, run, options)


def _listed(layer: Callable[[], nn.Module], run: Run = on_vectors, **options: Any) -> Scenario:
    return Scenario(functools.partial(stack, layer), run, {"loss": nn.functional.mse_loss, **options})


TIED = functools.partial(gpt, tied=True)
NO_DECAY = [{"params": "*.bias", "weight_decay": 0.0, "lr": 0.01}]
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)

SCENARIOS: dict[str, Scenario] = {
    "activations on the device": _scenario(),
    "activations on the host, one slot": _scenario(stash="host", slots=1),
    "one slot, one micro-batch": _scenario(slots=1, microbatches=1),
    "all layers in slots": _scenario(slots=5),
    "tied, activations on the host": _scenario(TIED, stash="host"),
    "half frozen": _scenario(half_frozen, slots=1),
    "clipped, tied, three slots": _scenario(TIED, clip_grad_norm=0.1, slots=3),
    "clipped, activations on the host": _scenario(clip_grad_norm=0.1, stash="host", defer_updates=True),
    "clipped by value": _scenario(clip_grad_value=1e-3, slots=1),
    "dropout": _scenario(functools.partial(gpt, dropout=0.3), stash="host"),
    "kept on the device": _scenario(functools.partial(gpt, dropout=0.3), recompute=False, slots=1),
    "kept on the host, two layers a slot": _scenario(recompute=1, layers_per_slot=2, stash="host"),
    "bf16": _scenario(precision="bf16"),
    "bf16, clipped, 8-bit states": _scenario(precision="bf16", clip_grad_norm=0.1, state_dtype="int8", stash="host"),
    "fp16 with a loss scale": _scenario(precision="fp16", slots=3),
    "fp16 with a fixed loss scale": _scenario(precision="fp16", loss_scale=1024.0),
    "parameter groups": _scenario(param_groups=NO_DECAY, stash="host"),
    "an optimizer of torch's": _scenario(optimizer=MOMENTUM),
    "running statistics": _listed(Normed, slots=1),
    "running statistics, two slots, on the host": _listed(Normed, stash="host"),
    "running statistics, kept on the host": _listed(Normed, slots=1, recompute=False, stash="host"),
    "buffers that the backward needs as they were": _listed(Counting, stash="host", slots=1),
    "a last layer without parameters": _scenario(bare_ending, on_vectors, loss=nn.functional.mse_loss),
    "experts chosen by the data": _listed(Routed),
    "values that many layers use": _scenario(Crossing, across),
    "values that many layers use, on the host": _scenario(Crossing, across, stash="host", slots=1),
    "looked at between steps": _scenario(run=looked_at_between_steps, clip_grad_norm=0.1),
    "looked at between steps, on the host": _scenario(run=looked_at_between_steps, stash="host"),
    "written to between steps": _scenario(run=written_to_between_steps, precision="bf16", clip_grad_norm=0.1),
    "batches of changing shapes": _scenario(run=of_changing_shapes, clip_grad_norm=0.1, stash="host"),
    "layers left out": _scenario(run=with_layers_left_out, clip_grad_norm=0.1),
    "a spoiled batch is skipped": _listed(Normed, spoiled_in_between, on_nonfinite="skip"),
    "a spoiled batch is skipped, held": _listed(Normed, spoiled_in_between, on_nonfinite="skip", clip_grad_norm=1.0),
    "begun again from a checkpoint": _scenario(run=begun_again, clip_grad_norm=0.1),
}


class CompiledOnce(ProgramCache):
    """Finds what another trainer of the scenario compiled: each trainer has states of the code of its own, but the code
    of a scenario does not change."""

    def find(
        self, key: Hashable, tensors: Sequence[torch.Tensor], whole: Sequence[torch.Tensor]
    ) -> CompiledModel | None:
        return super().find(without_state(key), tensors, whole)

    def add(self, key: Hashable, compiled: CompiledModel) -> None:
        super().add(without_state(key), compiled)


def without_state(key: Any) -> Hashable:
    return tuple(part for part in key if not isinstance(part, CodeState))


@functools.cache
def _compiled(name: str) -> ProgramCache:
    return CompiledOnce(32)


def observed(name: str, device: str | list[str], **changes: Any) -> tuple[Seen, dict[str, Tensor]]:
    """What a scenario's run saw on a device, and the weights, buffers and optimizer states that it ended with.

    `changes` are options that it has instead of its own.
    """
    scenario = SCENARIOS[name]
    torch.manual_seed(0)
    trainer = share(relay.Trainer(scenario.make(), device=device, **(scenario.options | changes)))
    trainer._compiler.cache = _compiled(name)
    try:
        seen = scenario.run(trainer)
        state = reference.copy_of(trainer.state_dict())
        optimizer = trainer._session.server.optimizer
        for parameter, _ in trainer._model.named_parameters():
            for label, value in optimizer.state(parameter).items():
                if isinstance(value, Int8State):
                    state[f"{parameter} {label} codes"] = value.codes.clone()
                    state[f"{parameter} {label} scales"] = value.scales.clone()
                elif isinstance(value, Tensor):
                    state[f"{parameter} {label}"] = value.clone()
    finally:
        trainer.close()
    return seen, state


@functools.cache
def expected(name: str) -> tuple[Seen, dict[str, Tensor]]:
    """The same on the CPU behind a wall."""
    return observed(name, "cpu:discrete")


def differences(name: str, device: str | list[str], **changes: Any) -> list[str]:
    """Where a device's answer is another than the CPU's: numbers of what was seen, and names of what was left."""
    seen, state = observed(name, device, **changes)
    right, right_state = expected(name)
    pairs = enumerate(zip(seen, right, strict=True))
    found = [f"observation {number}" for number, (mine, theirs) in pairs if not _same(mine, theirs)]
    assert list(state) == list(right_state)
    return found + [key for key, tensor in right_state.items() if not _same(state[key], tensor)]


def _same(first: Any, second: Any) -> bool:
    if isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second) or repr(first) == repr(second)  # NaN is what it is
