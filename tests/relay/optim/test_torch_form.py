"""`trainer.optimizer` is a torch.optim.Optimizer: its states have PyTorch's form, both ways, and its methods work."""

import copy
import functools
import io
import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import relay
from tests.support import reference
from tests.support.zoo.plain_models import Build, Stack, batches, everything, gpt, perceptron

OPTIMIZERS: dict[str, Any] = {
    "AdamW": relay.AdamW(lr=1e-2),
    "AdamW with amsgrad": relay.AdamW(lr=1e-2, amsgrad=True),
    "Adam": relay.Adam(lr=1e-2),
    "SGD": relay.SGD(lr=0.1),
    "SGD with momentum": relay.SGD(lr=0.1, momentum=0.9),
    "LAMB": relay.LAMB(lr=1e-2),
    "Lion": relay.Lion(lr=1e-3),
    "torch's RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3),
    "torch's Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in OPTIMIZERS),
    *((name, {"state_dtype": "bf16"}) for name in ("AdamW", "SGD with momentum", "LAMB", "Lion")),
    *((name, {"state_dtype": "int8"}) for name in ("AdamW", "SGD with momentum", "LAMB", "Lion")),
    ("AdamW", {"clip_grad_norm": 0.05, "defer_updates": True}),
    ("AdamW", {"precision": "bf16", "device": "cpu:discrete"}),
]


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


SMALL_STATES_TRIED = [("AdamW", "bf16"), ("LAMB", "int8"), ("Lion", "bf16"), ("SGD with momentum", "int8")]


def cases() -> list[Any]:
    """All cases, of which `make test` has each optimizer with one of the small states."""
    return [
        pytest.param(name, options, marks=pytest.mark.exhaustive)
        if "state_dtype" in options and (name, options["state_dtype"]) not in SMALL_STATES_TRIED
        else (name, options)
        for name, options in CASES
    ]


@pytest.mark.parametrize(("name", "options"), cases(), ids=str)
@pytest.mark.sample(6)
def test_a_run_saved_by_torch_save_resumes_to_the_bit(build: Build, name: str, options: dict[str, Any]) -> None:
    data = reference.text_batches(5)
    trainer = build(gpt(), optimizer=OPTIMIZERS[name], **options)
    for batch in data[:3]:
        trainer.step(batch)
    saved = through_a_file({"model": trainer.state_dict(), "optimizer": trainer.optimizer.state_dict()})
    again = gpt()
    again.load_state_dict(saved["model"])
    resumed = build(again, optimizer=OPTIMIZERS[name], **options)
    resumed.optimizer.load_state_dict(saved["optimizer"])
    assert [resumed.step(batch).loss for batch in data[3:]] == [trainer.step(batch).loss for batch in data[3:]]
    before, after = everything(trainer), everything(resumed)
    assert list(before) == list(after)
    assert [label for label in before if not torch.equal(before[label], after[label])] == []


PAIRS: dict[str, tuple[Any, Any]] = {
    "AdamW": (relay.AdamW(lr=1e-2), functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)),
    "amsgrad": (relay.AdamW(amsgrad=True), functools.partial(torch.optim.AdamW, amsgrad=True, fused=True)),
    "Adam": (relay.Adam(lr=1e-2), functools.partial(torch.optim.Adam, lr=1e-2, fused=True)),
    "SGD": (relay.SGD(lr=0.1, momentum=0.9), functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)),
    "plain SGD": (relay.SGD(lr=0.1), functools.partial(torch.optim.SGD, lr=0.1, fused=True)),
}


def plain_steps(model: nn.Module, stepper: torch.optim.Optimizer, data: list[Any]) -> list[float]:
    return reference.train(model, data, optimizer=lambda parameters: stepper)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.sample("amsgrad", "SGD")
def test_a_file_of_torch_optim_loads_and_trains_on_as_torch_optim_would(build: Build, name: str) -> None:
    mine, torchs = PAIRS[name]
    data = reference.text_batches(5)
    plain = gpt()
    stepper = torchs(plain.parameters())
    plain_steps(plain, stepper, data[:2])
    saved = through_a_file({"model": plain.state_dict(), "optimizer": stepper.state_dict()})
    ours = gpt()
    ours.load_state_dict(saved["model"])
    trainer = build(ours, optimizer=mine)
    trainer.optimizer.load_state_dict(saved["optimizer"])
    losses = plain_steps(plain, stepper, data[2:])
    assert [trainer.step(batch).loss for batch in data[2:]] == losses
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.sample(2)
def test_the_state_is_that_of_torch_optim_and_loads_there(build: Build, name: str) -> None:
    mine, torchs = PAIRS[name]
    data = reference.text_batches(4)
    ours, plain = gpt(), gpt()
    stepper = torchs(plain.parameters())
    trainer = build(ours, optimizer=mine)
    plain_steps(plain, stepper, data[:2])
    for batch in data[:2]:
        trainer.step(batch)
    found, expected = trainer.optimizer.state_dict(), stepper.state_dict()
    indices, torchs_indices = ([group["params"] for group in state["param_groups"]] for state in (found, expected))
    assert indices == torchs_indices
    for index, state in expected["state"].items():
        for label, value in state.items():
            assert value is None or torch.equal(found["state"][index][label], value)
    fresh = copy.deepcopy(plain)
    other = torchs(fresh.parameters())
    other.load_state_dict(through_a_file(found))
    for group in other.param_groups:
        group["fused"] = True  # which a state_dict of ours leaves open
    assert plain_steps(fresh, other, data[2:]) == plain_steps(plain, stepper, data[2:])
    reference.assert_same_state(fresh.state_dict(), plain.state_dict())


def test_the_tensors_are_the_states_themselves(build: Build) -> None:
    model = gpt()
    trainer = build(model)
    trainer.step(reference.text_batches(1)[0])
    state = trainer.optimizer.state_dict()["state"][0]
    before = state["exp_avg"].clone()
    trainer.step(reference.text_batches(2)[1])
    assert not torch.equal(state["exp_avg"], before)
    assert float(state["step"]) == 2
    assert torch.equal(trainer.optimizer.state[next(model.parameters())]["exp_avg"], state["exp_avg"])


def test_before_the_first_step_there_is_no_state(build: Build) -> None:
    trainer = build(gpt())
    assert trainer.optimizer.state_dict()["state"] == {}
    trainer.prepare(reference.text_batches(1)[0])
    assert trainer.optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.sample("0")
def test_a_state_of_another_optimizer_or_of_other_shapes_is_refused_and_nothing_changes(
    build: Build, steps: int
) -> None:
    data = reference.text_batches(2)
    trainer = build(gpt())
    for batch in data[:steps]:
        trainer.step(batch)
    before = copy.deepcopy(trainer.optimizer.state_dict())
    other = build(gpt(), optimizer=relay.Lion())
    larger = build(gpt(hidden=32))
    fewer = build(gpt(layers=2))
    for stranger in (other, larger, fewer):
        stranger.step(data[0])
        with pytest.raises(ValueError, match=r"exp_avg|elements|parameter group"):
            trainer.optimizer.load_state_dict(stranger.optimizer.state_dict())
    after = trainer.optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    torch.testing.assert_close(after["state"], before["state"], rtol=0, atol=0)


# **** groups ****


def train_unfreezing(build: Build | None) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    torch.manual_seed(0)
    model = Stack()
    model.layers[0].requires_grad_(False)
    losses = []
    trainer = build(model, optimizer=relay.SGD(lr=0.1, momentum=0.9), microbatches=1) if build is not None else None
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stepper = trainer.optimizer if trainer else torch.optim.SGD(trained, lr=0.1, momentum=0.9, fused=True)
    for number, batch in enumerate(batches(5)):
        if number == 2:
            model.layers[0].requires_grad_(True)
            stepper.add_param_group({"params": list(model.layers[0].parameters()), "lr": 0.001})
        if trainer:
            losses.append(trainer.step(batch).loss)
        else:
            losses += reference.train(model, [batch], 1, optimizer=lambda parameters: stepper)
    state = stepper.state_dict()
    flat = {f"{index} {label}": value for index, values in state["state"].items() for label, value in values.items()}
    moments = {name: flat[name] for name in sorted(flat) if name.endswith("momentum_buffer")}
    sizes = [len(group["params"]) for group in stepper.param_groups]
    return losses, {**reference.copy_of(model.state_dict()), **moments}, sizes


def test_parameters_unfrozen_into_a_group_of_their_own_train_as_in_pytorch(build: Build) -> None:
    ours, plain = train_unfreezing(build), train_unfreezing(None)
    assert ours[0] == plain[0]
    reference.assert_same_state(ours[1], plain[1])
    assert ours[2] == plain[2]


def test_an_added_group_goes_on_over_an_edit_of_the_layers(build: Build) -> None:
    model, data = Stack(), batches(4)
    model.layers[2].requires_grad_(False)
    trainer = build(model, optimizer=relay.SGD(lr=0.1), microbatches=1)
    trainer.step(data[0])
    model.layers[2].requires_grad_(True)
    trainer.optimizer.add_param_group({"params": list(model.layers[2].parameters()), "lr": 0.0})
    trainer.remove(0)
    kept = model.layers[1].inner.weight.detach().clone()
    moved = model.layers[0].inner.weight.detach().clone()
    trainer.step(data[1])
    assert torch.equal(model.layers[1].inner.weight, kept)
    assert not torch.equal(model.layers[0].inner.weight, moved)


def test_a_parameter_of_no_model_is_refused(build: Build) -> None:
    trainer = build(gpt())
    trainer.step(reference.text_batches(1)[0])
    with pytest.raises(ValueError, match=r"shape \(2,\).*does not have"):
        trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 5.0})
    with pytest.raises(ValueError, match="more than one parameter group"):
        trainer.optimizer.add_param_group({"params": list(trainer._model.parameters())[:1]})
    with pytest.raises(ValueError, match="momentum"):
        trainer.optimizer.add_param_group({"params": [], "momentum": 0.5})
    assert len(trainer.optimizer.param_groups) == 1
    trainer.step(reference.text_batches(2)[1])


# **** the other methods ****


def test_hooks_run_after_each_step_and_step_says_what_to_call(build: Build) -> None:
    trainer = build(gpt())
    seen: list[str] = []
    trainer.optimizer.register_step_pre_hook(lambda *given: seen.append("before"))
    trainer.optimizer.register_step_post_hook(lambda *given: seen.append("after"))
    trainer.optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "note": 1})
    trainer.optimizer.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append("load"))
    trainer.step(reference.text_batches(1)[0])
    assert seen == ["before", "after"]
    state = trainer.optimizer.state_dict()
    assert state.pop("note") == 1
    trainer.optimizer.load_state_dict(state)
    assert seen[-1] == "load"
    trainer.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"trainer\.step\(batch\)"):
        trainer.optimizer.step()
    assert "lr: 0.001" in repr(trainer.optimizer)
    assert math.isfinite(trainer.step(reference.text_batches(1)[0]).loss)


def test_the_state_can_be_read_after_close() -> None:
    with relay.Trainer(perceptron(), nn.functional.mse_loss) as trainer:
        trainer.step((torch.randn(8, 6), torch.randn(8, 3)))
        inside = copy.deepcopy(trainer.optimizer.state_dict())
    torch.testing.assert_close(trainer.optimizer.state_dict()["state"], inside["state"], rtol=0, atol=0)


@pytest.mark.parametrize("how", ["clear", "assign", "pop"])
def test_states_that_are_removed_begin_anew_as_in_torch_optim(build: Build, how: str) -> None:
    torch.manual_seed(0)
    ours = Stack()
    plain, data = copy.deepcopy(ours), batches(4)
    trainer = build(ours, microbatches=1, optimizer=relay.AdamW(lr=1e-2, weight_decay=0.01))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01, fused=True)
    for number, batch in enumerate(data):
        if number == 2:
            for one, model in ((trainer.optimizer, ours), (optimizer, plain)):
                if how == "clear":
                    one.state.clear()
                elif how == "assign":
                    one.state = defaultdict(dict)
                else:
                    one.state.pop(model.first.weight)
        optimizer.zero_grad()
        loss = plain(**batch).loss
        loss.backward()
        optimizer.step()
        assert trainer.step(batch).loss == loss.item()
    reference.assert_same_state(trainer.state_dict(), plain.state_dict())


def test_what_is_put_into_the_states_or_taken_out_of_the_groups_by_hand_is_refused(build: Build) -> None:
    model = Stack()
    trainer = build(model, microbatches=1)
    trainer.step(batches(1)[0])
    parameter = next(iter(model.parameters()))
    with pytest.raises(TypeError, match="load_state_dict"):
        trainer.optimizer.state[parameter] = {}
    with pytest.raises(TypeError, match="in place"):
        trainer.optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
    del trainer.optimizer.param_groups[0]["params"][-1]
    with pytest.raises(ValueError, match="requires_grad"):
        trainer.step(batches(1)[0])
