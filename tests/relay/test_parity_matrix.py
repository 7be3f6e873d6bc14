"""Every pair of options together: the relay is plain PyTorch whatever else is switched on.

The cases are generated: each choice of each option meets each choice of every other, and as many triples as fit.
`make test` has those that hold all pairs, `make test-full` also those that add triples.
Equality is to the last bit. There is one exception: small optimizer states, which are another arithmetic.
"""

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relay
from relay.models.gpt import GPT, cross_entropy
from tests.support import matrix, mixed_reference, reference

STEPS = 3
CASES = 48

OPTIONS: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "optimizer": ("AdamW", "Adam", "SGD"),
    "state_dtype": ("fp32", "bf16", "int8"),
    "clip": ("none", "norm", "value"),
    "microbatches": (1, 3),  # of 10 sequences: 4, 4 and 2
    "tied": (False, True),
    "stash": ("device", "host"),
    "slots": (1, 2, 3),
    "device": ("cpu", "cpu:discrete", ("cpu:discrete",) * 3),
    "groups": (False, True),
    "form": ("whole", "list"),
    "layers_per_slot": (1, 2),
    "recompute": (True, 1, False),
    "resident_layers": (0, 2),
    "layers_per_visit": ("auto", (2, 3)),
}

PASSED_ON = (
    "precision", "state_dtype", "microbatches", "stash", "slots", "device", "layers_per_slot", "recompute",
    "resident_layers", "layers_per_visit",
)  # fmt: skip

Case = matrix.Case


@functools.cache
def few() -> list[Case]:
    """Greedy: of some random cases the one that adds most pairs, and then triples, that were not there."""
    source = random.Random(0)
    # States other than fp32 are compared loosely only, so most cases have fp32.
    weights = {name: [6, 1, 1] if name == "state_dtype" else [1] * len(values) for name, values in OPTIONS.items()}
    pairs: set[Any] = set()
    triples: set[Any] = set()
    found: list[Case] = []
    for _ in range(CASES):
        drawn = [
            {name: source.choices(values, weights[name])[0] for name, values in OPTIONS.items()} for _ in range(60)
        ]
        gains = [
            (len(matrix.combinations(case, 2) - pairs), len(matrix.combinations(case, 3) - triples)) for case in drawn
        ]
        best = drawn[gains.index(max(gains))]
        pairs |= matrix.combinations(best, 2)
        triples |= matrix.combinations(best, 3)
        found.append(best)
    return found


def test_every_choice_meets_every_choice_of_every_other_option() -> None:
    met = set().union(*(matrix.combinations(case, 2) for case in few()))
    assert not matrix.every(OPTIONS, 2) - met


RELAYS: dict[str, Any] = {
    "AdamW": relay.AdamW(lr=2e-3, weight_decay=0.1),
    "Adam": relay.Adam(lr=2e-3, weight_decay=0.1),
    "SGD": relay.SGD(lr=0.05, momentum=0.9, weight_decay=0.1),
}
TORCHS: dict[str, Any] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.1, fused=True),
    "Adam": functools.partial(torch.optim.Adam, lr=2e-3, weight_decay=0.1, fused=True),
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1, fused=True),
}
FIRST_STATE = {"AdamW": "exp_avg", "Adam": "exp_avg", "SGD": "momentum_buffer"}
CLIPS = {"none": {}, "norm": {"norm": 0.05}, "value": {"value": 2e-3}}


def gpt(tied: bool) -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=64, layers=2, hidden=16, heads=2, sequence=12, tied=tied, dropout=0.0)


def plain_optimizer(model: nn.Module, name: str, groups: bool) -> torch.optim.Optimizer:
    """torch's optimizer, with groups as one writes them by hand: no decay for vectors, another rate for a block."""
    if not groups:
        return TORCHS[name](model.parameters())
    named = dict(model.named_parameters())
    vectors = [tensor for tensor in named.values() if tensor.dim() == 1]
    block = [tensor for key, tensor in named.items() if tensor.dim() > 1 and key.startswith("blocks.1.")]
    rest = [tensor for key, tensor in named.items() if tensor.dim() > 1 and not key.startswith("blocks.1.")]
    return TORCHS[name]([{"params": rest}, {"params": vectors, "weight_decay": 0.0}, {"params": block, "lr": 1e-3}])


def relay_groups(model: nn.Module, case: Case) -> list[dict[str, Any]]:
    """The same groups for the relay: parameters themselves, and a pattern."""
    if not case["groups"]:
        return []
    vectors = [tensor for tensor in model.parameters() if tensor.dim() == 1]
    # The list form's names are nn.Sequential's: embedding 0, blocks 1 and 2, head 3.
    pattern = "blocks.1.*" if case["form"] == "whole" else "2.*"
    return [{"params": vectors, "weight_decay": 0.0}, {"params": pattern, "lr": 1e-3}]


def name_of(case: Case) -> str:
    words = {"tied": "tied", "groups": "groups", "recompute": "recompute"}
    return "-".join(words.get(name, "") if value is True else str(value) for name, value in case.items() if value)


def cases() -> list[Any]:
    missing = matrix.every(OPTIONS, 2)
    beyond_pairs = () if matrix.asked_for() else pytest.mark.exhaustive
    found = []
    for case in matrix.cases(OPTIONS, few()):
        sampled = bool(matrix.combinations(case, 2) & missing)
        missing -= matrix.combinations(case, 2)
        found.append(pytest.param(case, id=name_of(case), marks=() if sampled else beyond_pairs))
    return found


@pytest.mark.parametrize("case", cases())
@pytest.mark.sample(3)
def test_the_relay_is_plain_pytorch(build: Callable[..., relay.Trainer], case: Case) -> None:
    model, plain = gpt(case["tied"]), gpt(case["tied"])
    batches = reference.text_batches(STEPS, batch=10)
    stepper = plain_optimizer(plain, case["optimizer"], case["groups"])
    whole = case["form"] == "whole"
    first_states: list[dict[str, Tensor]] = []

    def look(number: int) -> None:
        if number == 1:
            label = FIRST_STATE[case["optimizer"]]
            named = form_of(plain, whole).named_parameters()
            first_states.append({name: stepper.state[tensor][label].clone() for name, tensor in named})

    clip = CLIPS[case["clip"]]
    data: Sequence[Any] = batches if whole else reference.as_pairs(batches)
    found = mixed_reference.train(
        plain if whole else plain.as_list(),
        data,
        case["microbatches"],
        precision=case["precision"],
        loss=None if whole else cross_entropy,
        optimizer=stepper,
        before_step=look,
        **{f"clip_{name}": limit for name, limit in clip.items()},
    )
    assert not any(found.skipped)
    trainer = build(
        model if whole else model.as_list(),
        loss=None if whole else cross_entropy,
        optimizer=RELAYS[case["optimizer"]],
        param_groups=relay_groups(model, case),
        **{name: case[name] for name in PASSED_ON},
        **{f"clip_grad_{name}": limit for name, limit in clip.items()},
    )
    metrics = []
    for number, batch in enumerate(data):
        metrics.append(trainer.step(batch))
        if number == 0:
            trainer.synchronize()
            bound, label = trainer._session.server.optimizer, FIRST_STATE[case["optimizer"]]
            states = {name: bound.state(name)[label] for name, _ in form_of(model, whole).named_parameters()}
            firsts = {
                name: state.clone() if isinstance(state, Tensor) else state.to_float().view(first_states[0][name].shape)
                for name, state in states.items()
            }
    losses = [step.loss for step in metrics]
    assert losses[0] == found.losses[0], "the first forward is the same whatever happens to gradients"
    if case["state_dtype"] != "fp32":
        assert losses == pytest.approx(found.losses, rel=1e-2)
        assert relative_error(firsts, first_states[0]) < {"bf16": 2e-2, "int8": 0.2}[case["state_dtype"]]
    else:
        assert losses == found.losses
        assert [step.grad_norm for step in metrics] == found.norms
        reference.assert_same_state(trainer.state_dict(), reference.state_of(plain if whole else plain.as_list()))


def form_of(model: GPT, whole: bool) -> nn.Module:
    return model if whole else nn.Sequential(*model.as_list())


def relative_error(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    """The largest of any parameter, in the 2-norm."""
    assert list(ours) == list(plain)
    errors = [
        (torch.linalg.vector_norm(ours[name].float() - plain[name]) / torch.linalg.vector_norm(plain[name])).item()
        for name in plain
    ]
    return max(errors)
