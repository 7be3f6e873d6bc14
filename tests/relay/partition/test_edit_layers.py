"""Layers are added, removed, moved and left out during training, compared with plain PyTorch doing the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hal.errors import OutOfMemory
from relay.errors import PartitionError
from tests.support import matrix, mixed_reference, reference
from tests.support.zoo.plain_models import WIDTH, Block, Build, Output


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.active: list[int] | None = None

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        value = self.first(inputs)
        for number, layer in enumerate(self.layers):
            if self.active is None or number in self.active:
                value = layer(value)
        return Output(nn.functional.mse_loss(value, targets), value)


def batches(steps: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{name: torch.randn(6, WIDTH, generator=generator) for name in ("inputs", "targets")} for _ in range(steps)]


def a_block(seed: int) -> Block:
    torch.manual_seed(seed)
    return Block()


class Plain:
    """Plain PyTorch with one optimizer, whose states stay with their parameters whatever becomes of the layers."""

    def __init__(
        self, model: Stack, make: Callable[..., torch.optim.Optimizer] = reference.adamw, precision: str = "fp32"
    ) -> None:
        self.model = model
        self.precision = precision
        self.clip: float | None = None
        self.optimizer = make(list(model.parameters()))

    def step(self, batch: dict[str, Tensor], active: list[int] | None = None) -> float:
        self.model.active = active
        self.optimizer.zero_grad()
        pieces = reference.cut(batch, 2)
        call = reference.caller(self.model, None)

        def rounded(piece: Any) -> Tensor:
            with mixed_reference.autocast(self.precision):
                return call(piece)

        loss = reference.gradients_of(rounded, pieces, reference.by_samples(pieces))
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss

    def edit(self, layers: list[nn.Module]) -> None:
        self.model.layers = nn.ModuleList(layers)
        self.optimizer.param_groups[0]["params"] = list(self.model.parameters())


def pair(depth: int) -> tuple[Stack, Plain]:
    torch.manual_seed(0)
    model = Stack(depth)
    return model, Plain(copy.deepcopy(model))


SUBSETS = [[0, 2], [1], [0, 1, 2, 3], [3, 1], [0, 2]]


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
def test_a_step_with_some_layers_alone_is_that_step_in_pytorch(build: Build, device: str) -> None:
    """The first step too, and layers that sit out are not decayed and count no step."""
    model, plain = pair(4)
    trainer = build(model, microbatches=2, device=device)
    for batch, active in zip(batches(5), SUBSETS, strict=True):
        assert trainer.step(batch, active_layers=active).loss == plain.step(batch, active)
    assert trainer.step(batches(6)[5]).loss == plain.step(batches(6)[5])
    reference.assert_same_state(model.state_dict(), plain.model.state_dict())


def test_a_list_takes_active_layers_too_and_names_serve_as_well_as_places(build: Build) -> None:
    torch.manual_seed(0)
    ours: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, WIDTH)]
    plain = copy.deepcopy(ours)
    optimizer = reference.adamw(list(nn.Sequential(*plain).parameters()))
    trainer = build(ours, loss=nn.functional.mse_loss, microbatches=2)
    for batch, active in zip(batches(3), [[0, 1, 3], ["0", "2", "3"], [0, 1, 2, 3]], strict=True):
        optimizer.zero_grad()
        pieces = reference.cut(tuple(batch.values()), 2)
        chosen = [plain[int(number)] for number in active]
        loss = reference.gradients_of(
            reference.caller(chosen, nn.functional.mse_loss), pieces, reference.by_samples(pieces)
        )
        optimizer.step()
        assert trainer.step(tuple(batch.values()), active_layers=active).loss == loss
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_device_memory_is_the_same_whichever_layers_take_part(build: Build) -> None:
    model, _ = pair(6)
    trainer = build(model, microbatches=2, stash="host", device="cpu:discrete")
    given = batches(4)
    peaks = [trainer.step(given[0]).device_peak_bytes]
    for batch, active in zip(given, SUBSETS, strict=False):
        peaks.append(trainer.step(batch, active_layers=active).device_peak_bytes)
    assert max(peaks) == peaks[0]


@pytest.mark.parametrize(
    ("device", "precision", "layers_per_slot"),
    [("cpu", "fp32", 2), ("cpu:discrete", "fp32", 3), ("cpu:discrete", "bf16", 2), ("cpu:discrete", "fp32", 1)],
)
@pytest.mark.sample("cpu:discrete-fp32-1")
def test_host_memory_is_the_same_whichever_layers_meet_in_a_slot_of_a_clipped_step(
    build: Build, device: str, precision: str, layers_per_slot: int
) -> None:
    """To the byte: what one step with every layer takes is enough for any of the others, and refused if it is not."""
    subsets = [[1, 2], [0, 4], [1, 3, 4], [2, 3], [0, 2, 3], [1, 2]]
    given = batches(len(subsets) + 2)
    common = {
        "microbatches": 2, "device": device, "precision": precision, "stash": "host", "clip_grad_norm": 0.05,
        "layers_per_slot": layers_per_slot,
    }  # fmt: skip
    whole = build(pair(5)[0], **common)
    whole.step(given[0])
    bytes_of_all = whole.ledger.total

    model, plain = pair(5)
    trainer = build(model, host_memory=bytes_of_all, **common)
    plain.precision, plain.clip = precision, 0.05
    trainer.evaluate(given[0])
    for batch, active in zip(given, subsets, strict=False):
        assert trainer.step(batch, active_layers=active).loss == plain.step(batch, active)
        assert trainer.ledger.total <= bytes_of_all
    assert trainer.step(given[-1]).loss == plain.step(given[-1])
    assert trainer.ledger.total == bytes_of_all
    reference.assert_same_state(trainer.state_dict(), plain.model.state_dict())

    refused = build(pair(5)[0], host_memory=bytes_of_all - 1, **common)
    refused.evaluate(given[0])
    with pytest.raises(OutOfMemory, match="host_memory="):
        refused.step(given[0], active_layers=[1, 2])


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample("cpu:discrete")
def test_a_weight_shared_by_layers_that_meet_or_do_not_is_clipped_as_in_pytorch(build: Build, device: str) -> None:
    """Its gradient has a place for each use: how many there are depends on who shares a slot with whom."""
    model, plain = pair(5)
    for edited in (model, plain.model):
        for number in (0, 3, 4):
            edited.layers[number].inner = edited.layers[2].inner
    make = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    plain = Plain(plain.model, make)
    plain.clip = 0.05
    trainer = build(model, microbatches=2, device=device, clip_grad_norm=0.05, layers_per_slot=2, optimizer=make)
    for batch, active in zip(batches(6), [None, [1, 2, 3], [0, 1, 2, 3], [2, 4], None, [1, 2, 3, 4]], strict=True):
        assert trainer.step(batch, active_layers=active).loss == pytest.approx(plain.step(batch, active), rel=1e-6)
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(trainer.state_dict()[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


EDITED: dict[str, Any] = {
    "AdamW": None,
    "torch's SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "deferred updates": {"clip_grad_norm": 10.0},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "loss_scale": 1.0},
    "bf16, deferred, two layers a slot": {"precision": "bf16", "clip_grad_norm": 10.0, "layers_per_slot": 2},
}
"""Optimizers, or options of a trainer with AdamW."""


@pytest.mark.parametrize(("name", "device"), matrix.sampled(["cpu", "cpu:discrete"], EDITED))
@pytest.mark.sample("torch's SGD-cpu:discrete", "fp16-cpu")
def test_layers_inserted_removed_replaced_and_moved_train_on_as_in_pytorch(
    build: Build, name: str, device: str
) -> None:
    optimizer = EDITED[name]
    torch.manual_seed(0)
    model = Stack(3)
    given = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9) if callable(optimizer) else reference.adamw
    plain = Plain(copy.deepcopy(model), given)
    options = {"optimizer": optimizer} if callable(optimizer) else dict(optimizer or {})
    plain.precision = options.get("precision", "fp32")
    trainer = build(model, microbatches=2, device=device, **options)
    edits: list[tuple[Callable[[], None], Callable[[list[nn.Module]], list[nn.Module]]]] = [
        (lambda: trainer.insert(1, a_block(5)), lambda old: [old[0], a_block(5), *old[1:]]),
        (lambda: trainer.remove(0), lambda old: old[1:]),
        (lambda: trainer.replace(2, a_block(6)), lambda old: [*old[:2], a_block(6)]),
        (lambda: trainer.reorder([2, 0, 1]), lambda old: [old[2], old[0], old[1]]),
        (lambda: trainer.insert(3, a_block(7)), lambda old: [*old, a_block(7)]),
    ]
    for number, batch in enumerate(batches(12)):
        if number % 2 and number // 2 < len(edits):
            ours, theirs = edits[number // 2]
            ours()
            plain.edit(theirs(list(plain.model.layers)))
        assert trainer.step(batch).loss == plain.step(batch)
    trainer.synchronize()
    reference.assert_same_state(model.state_dict(), plain.model.state_dict())
    assert list(trainer.state_dict()) == list(plain.model.state_dict())


def test_the_ledger_follows_the_layers_and_a_removed_layer_stays_whole(build: Build) -> None:
    model, _ = pair(3)
    trainer = build(model, microbatches=2)
    given = batches(3)
    trainer.step(given[0])
    before = trainer.ledger.total
    last = model.layers[2]
    values = reference.copy_of(last.state_dict())
    trainer.insert(3, a_block(5))
    trainer.step(given[1])
    grown = trainer.ledger.total
    trainer.remove(3)
    removed = model.layers[2]
    trainer.step(given[2])
    assert grown > before
    assert trainer.ledger.total == before
    assert removed is last
    trainer.remove(2)
    after = reference.copy_of(last.state_dict())
    trainer.step(given[0])
    assert any(not torch.equal(values[name], after[name]) for name in values)
    reference.assert_same_state(last.state_dict(), after)


def test_layers_inserted_under_a_limit_of_host_memory_are_counted_with_the_others(build: Build) -> None:
    model, _ = pair(2)
    trainer = build(model, microbatches=2, host_memory="20kB")
    given = batches(3)
    trainer.step(given[0])
    trainer.insert(2, a_block(5))
    trainer.step(given[1])
    needed = trainer.ledger.total
    for _ in range(20):
        trainer.insert(2, a_block(5))
    with pytest.raises(OutOfMemory) as refused:
        trainer.step(given[2])
    assert refused.value.requested > 4 * needed


def test_a_model_doubled_twice_keeps_its_device_memory(build: Build) -> None:
    model, plain = pair(2)
    trainer = build(model, microbatches=2, stash="host", device="cpu:discrete")
    peaks = []
    for number, batch in enumerate(batches(6)):
        if number in (2, 4):
            for layer in [copy.deepcopy(original) for original in plain.model.layers]:
                trainer.insert(len(model.layers), layer)
            plain.edit([*plain.model.layers, *(copy.deepcopy(original) for original in plain.model.layers)])
        metrics = trainer.step(batch)
        assert metrics.loss == plain.step(batch)
        peaks.append(metrics.device_peak_bytes)
    assert len(model.layers) == 8
    assert len(set(peaks)) == 1
    reference.assert_same_state(model.state_dict(), plain.model.state_dict())


def test_schedulers_and_groups_go_on_over_an_edit(build: Build) -> None:
    model, _ = pair(2)
    trainer = build(model, microbatches=2, param_groups=[{"params": ["*.bias"], "weight_decay": 0.0}])
    scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, 0.5)
    trainer.step(batches(1)[0])
    scheduler.step()
    trainer.insert(0, a_block(5))
    assert [group["lr"] for group in trainer.param_groups] == [5e-4, 5e-4]
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    assert {id(parameter) for parameter in trainer.param_groups[1]["params"]} == {id(parameter) for parameter in biases}
    trainer.step(batches(1)[0])


class TwoLists(Stack):
    def __init__(self) -> None:
        super().__init__(2)
        self.more = nn.ModuleList(Block() for _ in range(2))

    def forward(self, inputs: Tensor, targets: Tensor) -> Output:
        for layer in self.more:
            inputs = layer(inputs)
        return super().forward(inputs, targets)


def test_what_cannot_be_done_is_refused_and_changes_nothing(build: Build) -> None:
    torch.manual_seed(0)
    model = TwoLists()
    trainer = build(model, microbatches=2)
    batch = batches(1)[0]
    with pytest.raises(PartitionError, match="'layers', 'more'"):
        trainer.insert(0, a_block(1))
    with pytest.raises(IndexError, match="0 to 1"):
        trainer.remove(2, within="more")
    with pytest.raises(ValueError, match="each of 0 to 1 once"):
        trainer.reorder([0, 0], within="more")
    with pytest.raises(ValueError, match="active_layers holds 9"):
        trainer.step(batch, active_layers=[9])
    trainer.insert(0, a_block(1), within="more")
    assert trainer.step(batch).loss > 0
    assert len(model.more) == 3


class Changing(Block):
    def forward(self, value: Tensor) -> Tensor:
        return torch.cat([super().forward(value), value])[: len(value) - 1]


def test_a_layer_that_changes_the_shape_cannot_be_left_out(build: Build) -> None:
    class Shrinking(Stack):
        def forward(self, inputs: Tensor, targets: Tensor) -> Output:
            value = self.first(inputs)
            for layer in self.layers:
                value = layer(value)
            return Output(value.square().mean(), value)

    torch.manual_seed(0)
    model = Shrinking(1)
    model.layers = nn.ModuleList([Changing(), Changing(), Changing()])
    trainer = build(model, microbatches=1)
    trainer.step(batches(1)[0])
    with pytest.raises(PartitionError, match=r"layers\.1.*cannot be left out"):
        trainer.step(batches(1)[0], active_layers=[0, 2])
