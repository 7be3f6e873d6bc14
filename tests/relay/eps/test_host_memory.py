"""The host's memory: a true ledger, refusals before anything is touched, page-locked pieces, nothing that grows."""

import gc
import json
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from hal import registry
from hal.errors import OutOfMemory
from hal.page_lock import LockedMemory, Mlock
from hal.slot.device_slot import DeviceSlot
from relay.eps import regions, store
from relay.models import GPT
from tests.support import matrix, reference
from tests.support.processes import ready_processes

Build = Callable[..., relay.Trainer]


def gpt(layers: int = 3, **changes: Any) -> GPT:
    torch.manual_seed(0)
    settings = {"vocabulary": 64, "layers": layers, "hidden": 16, "heads": 2, "sequence": 12}
    return GPT(**{**settings, **changes})


def statistics() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 8), *(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)), nn.Linear(8, 3)]


def regression(batch: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, 6), torch.randn(batch, 3)


# **** refused early ****

NEEDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "clipping": {"clip_grad_norm": 1.0},
    "bf16": {"precision": "bf16", "state_dtype": "bf16"},
    "fp16": {"precision": "fp16", "state_dtype": "int8"},
    "split masters": {"precision": "bf16", "master_weights": "split"},
    "narrow gradients": {"precision": "bf16", "clip_grad_norm": 1.0, "microbatches": 1},
    "Muon": {"optimizer": relay.Muon(), "precision": "bf16", "master_weights": "split"},
    "Lion": {"optimizer": relay.Lion()},
}


DEVICES_AND_STASHES = [("cpu", "device"), ("cpu:discrete", "host")]
IN_TURN = matrix.in_turn(["gpt", "statistics"], NEEDS, DEVICES_AND_STASHES)
ENOUGH = [(which, device, stash, model) for which, (device, stash), model in IN_TURN]


@pytest.mark.parametrize(("which", "device", "stash", "model"), ENOUGH)
@pytest.mark.sample(
    "fp32-cpu:discrete-host-statistics", "clipping-cpu-device-statistics", "fp16-cpu-device-statistics",
    "split masters-cpu:discrete-host-statistics", "narrow gradients-cpu:discrete-host-gpt",
)  # fmt: skip
def test_what_is_needed_is_enough_and_one_byte_less_is_refused_before_anything_is_touched(
    build: Build, model: str, which: str, device: str, stash: str
) -> None:
    def make(**more: Any) -> tuple[relay.Trainer, Any]:
        # With "auto" a run that does not fit so adds the gradients of tied weights in another order.
        common = {"device": device, "stash": stash, "exact_ties": True, **NEEDS[which], **more}
        if model == "gpt":
            return build(gpt(), **common), reference.text_batches(1)[0]
        return build(statistics(), loss=nn.functional.mse_loss, **common), regression()

    trainer, batch = make()
    expected = trainer.step(batch)
    need = trainer.ledger.total
    assert need == expected.host_bytes == trainer._session.host.memory().in_use
    enough, _ = make(host_memory=need)
    assert enough.step(batch).loss == expected.loss
    short, _ = make(host_memory=need - 1)
    before = {name: (tensor, tensor.data_ptr(), tensor.clone()) for name, tensor in short._model.state_dict().items()}
    for attempt in (short.prepare, short.step):
        with pytest.raises(OutOfMemory) as caught:
            attempt(batch)
        assert (caught.value.requested, caught.value.in_use, caught.value.capacity) == (need, 0, need - 1)
    assert short.ledger.total == 0
    for name, tensor in short._model.state_dict().items():
        assert tensor.data_ptr() == before[name][1], f"{name} was moved"
        assert torch.equal(tensor, before[name][2])


def refusal(build: Build, **options: Any) -> str:
    trainer = build(gpt(), host_memory="10kB", **options)
    with pytest.raises(OutOfMemory) as caught:
        trainer.prepare(reference.text_batches(1)[0])
    return str(caught.value)


def test_a_refusal_shows_the_ledger_and_what_reduces_it(build: Build) -> None:
    message = refusal(build, precision="fp16", stash="host")
    for part in ("capacity 10,000", "first moments", "rounded weights", "stash of boundary activations", "total"):
        assert part in message
    for advice in ("state_dtype='bf16' or 'int8'", "stash='device'", "clip_grad_norm", "host_memory="):
        assert advice in message


def test_a_refusal_does_not_advise_what_is_already_so(build: Build) -> None:
    message = refusal(build, state_dtype="int8")
    for advice in ("state_dtype=", "stash=", "clip_grad_norm", "precision="):
        assert advice not in message.partition("What reduces it")[2]
    assert "state_dtype='int8'" in refusal(build, state_dtype="bf16")


@pytest.mark.parametrize(("advised", "instead"), [({"state_dtype": "int8"}, {}), ({}, {"precision": "bf16"})])
@pytest.mark.sample("advised0-instead0")
def test_what_is_advised_does_reduce_it(build: Build, advised: dict[str, Any], instead: dict[str, Any]) -> None:
    batch = reference.text_batches(1)[0]
    needs = []
    for options in (advised, instead):
        trainer = build(gpt(), **options)
        trainer.prepare(batch)
        needs.append(trainer.ledger.total)
    assert needs[0] < needs[1]


# **** the table in the documentation ****


def documented() -> list[list[str]]:
    """The rows of the table of bytes a parameter."""
    text = (Path(__file__).parents[3] / "docs" / "memory.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [cells for cells in lines if len(cells) == 10 and cells[0] in ("fp32", "bf16", "fp16")]


def test_the_documented_table_has_every_combination() -> None:
    found = {tuple(row[:4]) for row in documented()}
    kinds = [("fp32", "no", "fp32"), ("fp32", "yes", "fp32"), ("fp16", "either", "fp32")]
    kinds += [("fp16", "either, one micro-batch", "fp32")]
    clips = ("no", "yes", "yes, one micro-batch")
    kinds += [("bf16", clip, masters) for clip in clips for masters in ("fp32", "split")]
    assert found == {(*kind, state) for kind in kinds for state in ("fp32", "bf16", "int8")}


@pytest.mark.parametrize("row", documented(), ids=lambda row: "-".join(row[:4]))
@pytest.mark.sample(4)
def test_the_documented_bytes_a_parameter_are_the_ledgers(build: Build, row: list[str]) -> None:
    precision, clip, masters, state_dtype, each, *largest = row
    width = 512  # a multiple of 256, so that scales are not rounded up
    layers = [nn.Linear(width, width, bias=False) for _ in range(3)]
    limits = {"no": [None], "yes": [1.0], "either": [None, 1.0]}[clip.partition(",")[0]]
    microbatches = 1 if "one micro-batch" in clip else 2
    for limit in limits:
        trainer = build(
            layers, loss=nn.functional.mse_loss, precision=precision, state_dtype=state_dtype, clip_grad_norm=limit,
            master_weights=masters, microbatches=microbatches,
        )  # fmt: skip
        trainer.prepare((torch.zeros(4, width), torch.zeros(4, width)))
        size = sum(size for state, _, size in trainer.ledger.rows() if state != "step counts")
        exact = size / (3 * width * width)
        assert each == f"{exact:.2f}"
        assert largest == [f"{math.floor(10 * memory / exact) / 10:.1f}" for memory in (32, 64, 128, 256, 512)]


# **** page-locked memory ****


def can_lock(size: int) -> bool:
    memory = LockedMemory(Mlock(), None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        piece = memory.alloc(size, "a try")
    if piece is None:
        return False
    memory.free(piece)
    return True


needs_mlock = pytest.mark.skipif(not can_lock(1 << 20), reason="this system does not let a process lock 1 MiB")
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


@needs_mlock
@on_linux
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0, "precision": "bf16", "stash": "host"}])
@pytest.mark.sample("options1")
def test_page_locked_memory_is_what_crosses_the_link_to_the_byte_and_is_given_back_with_the_trainer(
    options: dict[str, Any],
) -> None:
    trainers = ready_processes.run_script("page_locked_memory.py", json.dumps(options))
    assert len(trainers) == 3
    for found in trainers:
        assert found["counted"] == found["crossing"] > 0
        # The kernel locks whole pages: less than one more for each piece, and no power of two above it.
        locked = found["during"] - found["before"]
        assert found["counted"] <= locked < found["counted"] + 4096 * found["pieces"] + 4096
        assert found["after"] == found["before"] == trainers[0]["before"]


@needs_mlock
def test_the_budget_is_kept_and_the_rest_is_pageable_with_one_warning_and_equal_results(build: Build) -> None:
    batches = reference.text_batches(4)
    plain = gpt(tied=False)
    losses = reference.train(plain, batches)
    budget = 20_000
    with pytest.warns(RuntimeWarning, match=r"stays pageable: the budget of 20\.00 kB") as caught:  # noqa: PT031
        trainer = build(gpt(tied=False), device="cpu:discrete", stash="host", pinned_memory=budget)
        found = [trainer.step(batch).loss for batch in batches]
    assert len([warning for warning in caught if "pageable" in str(warning.message)]) == 1
    assert 0 < trainer._session.host.page_locked <= budget
    assert found == losses
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


def test_where_the_system_refuses_to_lock_the_reason_is_said_once(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mlock, "lock", lambda self, address, size: "mlock: Cannot allocate memory (see `ulimit -l`)")
    batches = reference.text_batches(3)
    plain = gpt(tied=False)
    losses = reference.train(plain, batches)
    with pytest.warns(RuntimeWarning, match="Cannot allocate memory") as caught:  # noqa: PT031
        trainer = build(gpt(tied=False), device="cpu:discrete")
        found = [trainer.step(batch).loss for batch in batches]
    assert len(caught) == 1
    assert trainer._session.host.page_locked == 0
    assert found == losses


def test_a_device_that_shares_the_hosts_memory_locks_nothing(build: Build) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer = build(gpt(), device="cpu", pinned_memory=1)
        trainer.step(reference.text_batches(1)[0])
    assert trainer._session.host.page_locked == 0


# **** whatever layers meet ****


@pytest.mark.parametrize("name", ["cpu", "cpu:discrete"])
def test_new_combinations_of_layers_without_end_leave_nothing_behind(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `active_layers=` makes them, with several layers a slot: one place for the gradient, and few descriptions."""
    monkeypatch.setattr(regions, "CONTENTS", 8)
    device = registry.open(name)
    host, layer = device.host(), nn.Linear(4, 4)
    slot = DeviceSlot(device, 0, 1024, 1024)
    layers = store.LayerStore(host)
    wanted = [("weight", torch.float32), ("bias", torch.float32)]
    layers.take_over(layer, [wanted])
    made = []
    for number in range(100):
        gradients = [regions.GradientField(*field) for field in wanted]
        content = layers.content(f"combination {number}", wanted, gradients, True)
        made.append(weakref.ref(content))
        slot.load(content, number, device.queue("load"), layers.ready(content))
    gradient_bytes = sum(size for state, _, size in host.ledger.rows() if state == regions.GRADIENTS)
    assert gradient_bytes == content.gradient_size
    gc.collect()
    assert sum(content() is not None for content in made) == 8
    assert len(slot._views) == 8
    device.close()
