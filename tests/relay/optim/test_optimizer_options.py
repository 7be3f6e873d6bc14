"""Optimizers with all their options, through the trainer: torch.optim's to the last bit, or a float64 reference's."""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import relay
from relay.cli.text_data import TextData, load_text
from relay.models import GPT
from tests.support import mixed_reference, reference
from tests.support.zoo.plain_models import Build, regression

STEPS = 6


def linears() -> list[nn.Module]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), nn.Tanh()) for _ in range(3)]
    return [nn.Linear(6, 9), *layers, nn.Linear(9, 3)]


BATCHES = [regression(seed=seed) for seed in range(STEPS)]

HOW = {
    "torch's kernel": {},
    "fused, for clipping": {"clip": 0.5},
    "fused, for bf16": {"precision": "bf16"},
    "fused, for fp16 and clipping": {"precision": "fp16", "clip": 0.5},
}
"""What makes the relay take one form of the arithmetic or the other."""


def small_loss(output: Tensor, target: Tensor) -> Tensor:
    """So small that fp16 gradients do not overflow at the first scale."""
    return nn.functional.mse_loss(output, target) / 64


def assert_trains_alike(
    build: Build,
    mine: Any,
    torchs: Callable[[Sequence[nn.Module]], torch.optim.Optimizer],
    how: str,
    groups: Callable[[Sequence[nn.Module]], list[dict[str, Any]]] = lambda modules: [],
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    device: str = "cpu",
) -> None:
    """Losses and parameters are equal to the last bit."""
    modules = linears()
    plain = copy.deepcopy(modules)
    precision, clip = HOW[how].get("precision", "fp32"), HOW[how].get("clip")
    found = mixed_reference.train(
        plain,
        BATCHES,
        loss=small_loss,
        optimizer=torchs(plain),
        precision=precision,
        clip_norm=clip,
        schedule=schedule,
    )
    assert not any(found.skipped)
    trainer = build(
        modules,
        loss=small_loss,
        optimizer=mine,
        param_groups=groups(modules),
        precision=precision,
        clip_grad_norm=clip,
        device=device,
    )
    scheduler = schedule(trainer.optimizer) if schedule else None
    losses = []
    for batch in BATCHES:
        losses.append(trainer.step(batch).loss)
        if scheduler is not None:
            scheduler.step()
    assert losses == found.losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


# **** options of torch.optim ****

VARIANTS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "AdamW": (relay.AdamW, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW amsgrad": (relay.AdamW, torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "AdamW maximize": (relay.AdamW, torch.optim.AdamW, {"lr": 0.001, "maximize": True}),
    "AdamW betas and eps": (relay.AdamW, torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-4}),
    "Adam amsgrad maximize": (
        relay.Adam,
        torch.optim.Adam,
        {"lr": 0.001, "amsgrad": True, "maximize": True, "weight_decay": 0.05},
    ),
    "SGD": (relay.SGD, torch.optim.SGD, {"lr": 0.1}),
    "SGD dampening": (relay.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "SGD nesterov": (relay.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "SGD maximize": (relay.SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.5, "maximize": True}),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.sample(7)
def test_every_option_is_torch_optims_to_the_last_bit(build: Build, variant: str, how: str) -> None:
    mine, torchs, options = VARIANTS[variant]

    def plainly(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
        return torchs(list(reference.parameters_of(modules)), fused=True, **options)

    assert_trains_alike(build, mine(**options), plainly, how)


# **** parameter groups ****


def by_pattern(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """No decay for biases and norms (the second of each sequence), another rate for the last layer's weight."""
    return [
        {"params": ["*.bias", "*.1.weight"], "weight_decay": 0.0},
        {"params": "4.weight", "lr": 0.002, "betas": (0.5, 0.9)},
    ]


def by_object(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """The same groups, by the parameters themselves."""
    vectors = [parameter for parameter in reference.parameters_of(modules) if parameter.dim() == 1]
    return [
        {"params": vectors, "weight_decay": 0.0},
        {"params": modules[-1].weight, "lr": 0.002, "betas": (0.5, 0.9)},
    ]


def plain_groups(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    vectors, special = by_object(modules)
    named = {id(parameter) for parameter in [*vectors["params"], special["params"]]}
    rest = [parameter for parameter in reference.parameters_of(modules) if id(parameter) not in named]
    return torch.optim.AdamW([{"params": rest}, vectors, special], lr=0.01, weight_decay=0.3, fused=True)


def three_rates(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    rules = [lambda step: 0.9**step, lambda step: 1 / (1 + step), lambda step: min(1.0, (step + 1) / 3)]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rules)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("groups", [by_pattern, by_object])
@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.sample(5)
def test_parameter_groups_and_a_schedule_for_each_are_exact(
    build: Build, scheduled: bool, groups: Any, how: str
) -> None:
    mine = relay.AdamW(lr=0.01, weight_decay=0.3)
    schedule = three_rates if scheduled else None
    assert_trains_alike(build, mine, plain_groups, how, groups, schedule, device="cpu:discrete")


def test_groups_work_for_torch_optim_classes(build: Build) -> None:
    made = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1)

    def plainly(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
        vectors = [parameter for parameter in reference.parameters_of(modules) if parameter.dim() == 1]
        matrices = [parameter for parameter in reference.parameters_of(modules) if parameter.dim() > 1]
        return made([{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.03}])

    def groups(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
        vectors = [parameter for parameter in reference.parameters_of(modules) if parameter.dim() == 1]
        return [{"params": vectors, "weight_decay": 0.0, "lr": 0.03}]

    assert_trains_alike(build, made, plainly, "torch's kernel", groups)


@pytest.mark.parametrize(
    ("group", "complaint"),
    [
        ({"params": "*.nothing"}, "matches no parameter"),
        ({"params": [nn.Parameter(torch.zeros(2))]}, "matches no parameter"),
        ({"params": "*", "momentum": 0.9}, "weight_decay"),
        ({"lr": 0.1}, "expected 'params'"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused(build: Build, group: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        build(linears(), loss=small_loss, param_groups=[group])


# **** Lion and LAMB against float64 ****

Arrays = dict[str, np.ndarray]


def lion(parameter: np.ndarray, gradient: np.ndarray, state: Arrays, step: int, decay: float) -> np.ndarray:
    """Chen et al. 2023, algorithm 2."""
    lr, beta1, beta2 = 0.003, 0.9, 0.99
    average = state.get("average", np.zeros_like(parameter))
    direction = np.sign(beta1 * average + (1 - beta1) * gradient)
    state["average"] = beta2 * average + (1 - beta2) * gradient
    return parameter - lr * (direction + decay * parameter)


def lamb(parameter: np.ndarray, gradient: np.ndarray, state: Arrays, step: int, decay: float) -> np.ndarray:
    """You et al. 2020, algorithm 2, with phi the identity."""
    lr, beta1, beta2, eps = 0.02, 0.9, 0.999, 1e-6
    first = beta1 * state.get("first", np.zeros_like(parameter)) + (1 - beta1) * gradient
    second = beta2 * state.get("second", np.zeros_like(parameter)) + (1 - beta2) * gradient**2
    state.update(first=first, second=second)
    ratio = (first / (1 - beta1**step)) / (np.sqrt(second / (1 - beta2**step)) + eps)
    direction = ratio + decay * parameter
    lengths = np.linalg.norm(parameter), np.linalg.norm(direction)
    trust = lengths[0] / lengths[1] if min(lengths) > 0 else 1.0
    return parameter - lr * trust * direction


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    ("mine", "update"),
    [(relay.Lion(lr=0.003, weight_decay=0.1), lion), (relay.LAMB(lr=0.02, weight_decay=0.1), lamb)],
    ids=["Lion", "LAMB"],
)
@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.sample(3)
def test_lion_and_lamb_follow_a_float64_reference_for_ten_steps(
    build: Build, device: str, mine: Any, update: Any, clip: float | None
) -> None:
    modules = linears()
    plain = nn.Sequential(*copy.deepcopy(modules))
    expected = {name: tensor.detach().double().numpy() for name, tensor in plain.named_parameters()}
    states: dict[str, Arrays] = {name: {} for name in expected}
    no_decay = [{"params": ["*.bias"], "weight_decay": 0.0}]
    trainer = build(
        modules,
        loss=nn.functional.mse_loss,
        optimizer=mine,
        device=device,
        param_groups=no_decay,
        clip_grad_norm=clip,
    )
    for step in range(1, 11):
        batch = regression(seed=step)
        # Gradients at the relay's own weights: what is followed in float64 is the optimizer alone.
        plain.load_state_dict(trainer.state_dict())
        plain.zero_grad()
        pieces = reference.cut(batch, 4)
        reference.gradients_of(
            reference.caller(list(plain), nn.functional.mse_loss), pieces, reference.by_samples(pieces)
        )
        if clip is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        for name, parameter in plain.named_parameters():
            decay = 0.0 if name.endswith(".bias") else 0.1
            gradient = parameter.grad.double().numpy()
            expected[name] = update(expected[name], gradient, states[name], step, decay)
        trainer.step(batch)
    for name, tensor in trainer.state_dict().items():
        error = np.linalg.norm(tensor.double().numpy() - expected[name]) / np.linalg.norm(expected[name])
        assert error < 1e-6, f"{name}: {error:.1e}"


# **** small states ****


@functools.cache
def final_loss(state_dtype: str) -> float:
    """The held-out loss of a tiny byte-level GPT after 300 steps on the standard library's sources."""
    data = TextData(load_text(), 32, 4)
    torch.manual_seed(0)
    model = GPT(layers=2, hidden=32, heads=2, sequence=32, tied=False)
    options = {"optimizer": relay.AdamW(lr=3e-3), "microbatches": 1, "state_dtype": state_dtype}
    with relay.Trainer(model, **options) as trainer:
        first = trainer.evaluate(data.batch(0)).loss
        for step in range(300):
            trainer.step(data.batch(step))
        last = sum(trainer.evaluate(batch).loss for batch in data.held_out(16)) / 16
    assert first > 5.4, "it starts from knowing nothing"
    return last


@pytest.mark.exhaustive
def test_small_states_train_a_gpt_to_within_one_percent_of_fp32_states() -> None:
    full = final_loss("fp32")
    assert full < 2.8, "300 steps teach it something"
    for state_dtype in ("bf16", "int8"):
        assert final_loss(state_dtype) == pytest.approx(full, rel=0.01)


MOMENTS = {
    "fp32": lambda count: 4 * count,
    "bf16": lambda count: 2 * count,
    "int8": lambda count: count + 4 * math.ceil(count / 256),
}
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
WIDTH = 96


def bytes_by_state(trainer: relay.Trainer) -> dict[str, int]:
    """The ledger's bytes by state, whatever the dtype."""
    totals: dict[str, int] = {}
    for state, _, size in trainer.ledger.rows():
        totals[state] = totals.get(state, 0) + size
    return totals


@pytest.mark.parametrize("state_dtype", MOMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [
        (relay.AdamW(), ("first moments", "second moments")),
        (relay.LAMB(), ("first moments", "second moments")),
        (relay.Lion(), ("first moments",)),
        (relay.SGD(momentum=0.9), ("momentum",)),
        (relay.SGD(), ()),
    ],
    ids=["AdamW", "LAMB", "Lion", "SGD with momentum", "SGD"],
)
@pytest.mark.sample(4)
def test_the_ledger_has_the_bytes_of_every_precision_and_state_dtype(
    build: Build, optimizer: Any, moments: tuple[str, ...], precision: str, state_dtype: str
) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    trainer = build(
        layers, loss=nn.functional.mse_loss, optimizer=optimizer, precision=precision, state_dtype=state_dtype
    )
    trainer.prepare((torch.zeros(4, WIDTH), torch.zeros(4, WIDTH)))
    tensors = [parameter.numel() for layer in layers for parameter in layer.parameters()]
    count = sum(tensors)
    rows = bytes_by_state(trainer)
    assert rows["weights"] == 4 * count
    assert rows.get("rounded weights", 0) == (0 if precision == "fp32" else 2 * count)
    # fp16 keeps gradients until all are there; else on this device they never leave the slots.
    assert rows.get("gradients", 0) == (4 * count if precision == "fp16" else 0)
    assert rows["step counts"] == 4 * len(tensors)
    for label in moments:
        own = rows[label] + rows.get(f"{label}, scales of 256", 0)
        assert own == sum(MOMENTS[state_dtype](size) for size in tensors)
    known = {"weights", "rounded weights", "gradients", "step counts", *moments}
    assert set(rows) <= known | {f"{label}, scales of 256" for label in moments}
    assert sum(rows.values()) == trainer.ledger.total == trainer._session.host.memory().in_use


def test_amsgrad_keeps_its_largest_moments_in_fp32(build: Build) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    trainer = build(layers, loss=nn.functional.mse_loss, optimizer=relay.AdamW(amsgrad=True), state_dtype="int8")
    trainer.prepare((torch.zeros(4, WIDTH), torch.zeros(4, WIDTH)))
    assert bytes_by_state(trainer)["largest second moments"] == 4 * 2 * (WIDTH * WIDTH + WIDTH)


@pytest.mark.parametrize("state_dtype", ["bf16", "int8"])
def test_small_states_go_with_the_relays_own_optimizers_only(build: Build, state_dtype: str) -> None:
    made = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="relay's own optimizers"):
        build(linears(), loss=small_loss, optimizer=made, state_dtype=state_dtype)
