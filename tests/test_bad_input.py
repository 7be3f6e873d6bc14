"""What the relay refuses: each a clear error that says what is wrong, with nothing half done."""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import reference
import torch
from plain_models import Build
from torch import Tensor, nn

import relay
from hal.errors import Unavailable
from relay.errors import BatchError, CaptureError, NonFiniteLoss, PartitionError
from relay.models import GPT


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=32, layers=2, hidden=16, heads=2, sequence=12, tied=False)


def a_list() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)]


def list_batch(batch: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(batch, 4), torch.randn(batch, 2)


def text(batch: int = 8) -> dict[str, Tensor]:
    return reference.text_batches(1, batch, vocabulary=32)[0]


class Output(NamedTuple):
    loss: Any
    value: Tensor


class Stack(nn.Module):
    """Repeated layers of any kind, with a loss of any kind."""

    def __init__(self, layers: list[nn.Module], loss: Callable[[Tensor], Any] = torch.mean) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.loss = loss

    def forward(self, inputs: Tensor) -> Output:
        for layer in self.layers:
            inputs = layer(inputs)
        return Output(self.loss(inputs), inputs)


# **** batches ****


@pytest.mark.parametrize("call", ["step", "evaluate", "predict"])
def test_an_empty_batch_is_refused(build: Build, call: str) -> None:
    with pytest.raises(BatchError, match="empty"):
        getattr(build(gpt()), call)({name: tensor[:0] for name, tensor in text().items()})
    batch = list_batch(0) if call != "predict" else list_batch(0)[0]
    with pytest.raises(BatchError, match="empty"):
        getattr(build(a_list(), loss=nn.functional.mse_loss), call)(batch)


def test_a_batch_without_tensors_is_refused(build: Build) -> None:
    with pytest.raises(BatchError, match="no tensors"):
        build(gpt()).step({})


def test_a_batch_of_scalars_is_refused(build: Build) -> None:
    with pytest.raises(BatchError, match="dimension"):
        build(gpt()).step({"input_ids": torch.tensor(3)})


def test_a_batch_smaller_than_the_number_of_micro_batches_is_refused_with_both_numbers(build: Build) -> None:
    with pytest.raises(BatchError, match=r"(?s)batch of 3 .* 4 micro-batches.*microbatches=3"):
        build(gpt(), microbatches=4).step(text(3))


@pytest.mark.parametrize("batch", [list(text().values()), text()["input_ids"], None, "text"])
def test_a_whole_model_wants_a_mapping(build: Build, batch: Any) -> None:
    with pytest.raises(BatchError, match="mapping"):
        build(gpt()).step(batch)


@pytest.mark.parametrize("batch", [{"inputs": 1}, list_batch()[0], (list_batch()[0],), None, (1, 2, 3)])
def test_a_list_of_modules_wants_a_pair(build: Build, batch: Any) -> None:
    with pytest.raises(BatchError, match="pair"):
        build(a_list(), loss=nn.functional.mse_loss).step(batch)


def test_inputs_and_targets_of_unequal_lengths_are_refused_with_their_shapes(build: Build) -> None:
    inputs, targets = list_batch()
    with pytest.raises(BatchError, match=r"\(8, 4\).*\(7, 2\)"):
        build(a_list(), loss=nn.functional.mse_loss).step((inputs, targets[:7]))


def test_labels_of_another_length_than_the_inputs_are_refused(build: Build) -> None:
    batch = text()
    batch["labels"] = batch["labels"][:7]
    with pytest.raises(relay.RelayError):
        build(gpt()).step(batch)


def test_a_batch_whose_targets_are_all_masked_is_refused(build: Build) -> None:
    batch = text()
    batch["labels"].fill_(reference.IGNORED)
    with pytest.raises(BatchError, match="masked"):
        build(gpt()).step(batch)


def test_a_refused_batch_changes_nothing_and_training_goes_on(build: Build) -> None:
    model, plain = gpt(), gpt()
    batches = reference.text_batches(2, 8, vocabulary=32)
    losses = reference.train(plain, batches)
    trainer = build(model)
    found = []
    for batch in batches:
        with pytest.raises(BatchError):
            trainer.step(text(3))
        with pytest.raises(BatchError):
            trainer.step({})
        found.append(trainer.step(batch).loss)
    assert found == losses
    reference.assert_same_state(model.state_dict(), plain.state_dict())


# **** models ****


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Output:
        value = self.only(inputs)
        return Output(value.mean(), value)


def test_a_model_without_repeated_layers_is_refused_with_what_to_do(build: Build) -> None:
    with pytest.raises(PartitionError, match=r"(?s)Flat has no repeated layers.*list of modules"):
        build(Flat()).step({"inputs": list_batch()[0]})


def test_a_model_that_skips_its_repeated_layers_is_refused(build: Build) -> None:
    class Skipping(Stack):
        def forward(self, inputs: Tensor) -> Output:
            value = inputs * self.layers[0].weight.sum()
            return Output(value.mean(), value)

    with pytest.raises(PartitionError, match="did not call any"):
        build(Skipping([nn.Linear(4, 4), nn.Linear(4, 4)])).step({"inputs": list_batch()[0]})


@pytest.mark.parametrize("form", ["whole", "list"])
def test_a_model_with_nothing_to_train_is_refused(build: Build, form: str) -> None:
    model = gpt().requires_grad_(False)
    with pytest.raises(PartitionError, match="nothing to train"):
        build(model) if form == "whole" else build(model.as_list(), loss=nn.functional.mse_loss)
    with pytest.raises(PartitionError, match="nothing to train"):
        build([nn.ReLU()], loss=nn.functional.mse_loss)


def two_linears() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.Linear(4, 4)]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda value: value.mean(dim=1), r"scalar.*\(2,\)"),
        (lambda value: value.mean().reshape(1), r"scalar.*\(1,\)"),
        (lambda value: value.argmax(), "scalar.*int64"),
        (lambda value: 3.0, "tensor.*float"),
    ],
    ids=["a row", "one in a list", "an integer", "a Python number"],
)
def test_a_loss_that_is_not_a_scalar_is_refused_with_what_it_is(build: Build, loss: Any, message: str) -> None:
    inputs, targets = list_batch()
    with pytest.raises(PartitionError, match=message):
        build(Stack(two_linears(), loss)).step({"inputs": inputs})
    with pytest.raises(PartitionError, match=message):
        build(two_linears(), loss=lambda output, target: loss(output)).step((inputs, targets))


@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_model_without_a_loss_is_refused(build: Build, call: str) -> None:
    with pytest.raises(PartitionError, match=r"no loss.*labels"):
        getattr(build(gpt()), call)({"input_ids": text()["input_ids"]})
    with pytest.raises(PartitionError, match="no loss"):
        getattr(build(Stack(two_linears(), lambda value: None)), call)({"inputs": list_batch()[0]})


class Exploding(nn.Module):
    """A layer whose output is NaN as soon as an input is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, value: Tensor) -> Tensor:
        return self.norm(self.inner(value)).tanh()


@pytest.mark.parametrize("device", ["cpu", "cpu:discrete"])
@pytest.mark.parametrize(
    "optimizer", [None, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)], ids=["AdamW", "SGD"]
)
@pytest.mark.parametrize("piece", [0, 3])
def test_a_step_whose_loss_is_nan_changes_nothing_and_training_goes_on(
    build: Build, piece: int, optimizer: Any, device: str
) -> None:
    torch.manual_seed(0)
    ours = [Exploding(), Exploding(), nn.Linear(4, 2)]
    torch.manual_seed(0)
    plain = [Exploding(), Exploding(), nn.Linear(4, 2)]
    torch.manual_seed(2)
    batches = [(torch.randn(8, 4), torch.randn(8, 2)) for _ in range(3)]
    poisoned = (batches[0][0].clone(), batches[0][1])
    poisoned[0][2 * piece, 1] = float("nan")
    make = optimizer or reference.adamw
    losses = reference.train(plain, batches, loss=nn.functional.mse_loss, optimizer=make)
    options = {} if optimizer is None else {"optimizer": optimizer}
    trainer = build(ours, loss=nn.functional.mse_loss, device=device, **options)
    found = [trainer.step(batches[0]).loss]
    before = reference.copy_of(trainer.state_dict())
    with pytest.raises(NonFiniteLoss, match="nan"):
        trainer.step(poisoned)
    reference.assert_same_state(trainer.state_dict(), before)
    found += [trainer.step(batch).loss for batch in batches[1:]]
    assert found == losses
    reference.assert_same_state(trainer.state_dict(), reference.state_of(plain))


def test_an_infinite_loss_is_refused_too(build: Build) -> None:
    inputs, targets = list_batch()
    trainer = build(a_list(), loss=nn.functional.mse_loss)
    with pytest.raises(NonFiniteLoss, match="inf"):
        trainer.step((inputs * 1e30, targets))
    assert trainer.step((inputs, targets)).loss < 100


# **** layers that depend on the values of tensors ****


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value)


class Growing(Layer):
    """What comes out has as many rows as the data say."""

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value[value.sum(dim=1) > 0])


def test_what_depends_on_data_between_layers_is_refused_with_the_op_and_what_to_do(build: Build) -> None:
    class Selecting(Stack):
        def forward(self, inputs: Tensor) -> Output:
            return super().forward(inputs[inputs.sum(dim=1) > 0])

    with pytest.raises(CaptureError, match="inside one of the repeated layers") as caught:
        build(Selecting([Layer(), Layer()])).step({"inputs": list_batch()[0]})
    assert "nonzero" in caught.value.op
    assert caught.value.op in str(caught.value)


@pytest.mark.filterwarnings("ignore:layer")
def test_a_layer_whose_output_has_a_shape_that_depends_on_data_is_refused_by_name(build: Build) -> None:
    trainer = build(Stack([Layer(), Growing(), Layer()]), microbatches=1)
    with pytest.raises(CaptureError, match=r"layers\.1.*pad it"):
        trainer.step({"inputs": list_batch()[0]})


def test_a_failed_capture_leaves_the_model_as_it_was() -> None:
    class Failing(Layer):
        def forward(self, value: Tensor) -> Tensor:
            raise RuntimeError("no")

    model = Stack([Layer(), Layer(), Failing()])
    before = reference.copy_of(model.state_dict())
    with relay.Trainer(model) as trainer, pytest.raises(CaptureError, match=r"layers\.2"):
        trainer.step({"inputs": list_batch()[0]})
    reference.assert_same_state(model.state_dict(), before)
    assert "forward" not in vars(model.layers[2])


# **** how a trainer is made ****


@pytest.mark.parametrize("device", ["quantum:0", "cpu:7", ""])
def test_an_unknown_device_is_refused_with_those_there_are(device: str) -> None:
    with pytest.raises(Unavailable, match="cpu"):
        relay.Trainer(gpt(), device=device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "microbatches=0"),
        ({"microbatches": 2.5}, "microbatches=2.5"),
        ({"slots": 0}, "slots=0"),
        ({"slots": "two"}, "slots='two'"),
        ({"stash": "disk"}, "stash='disk'"),
        ({"precision": "fp8"}, "precision='fp8'"),
        ({"state_dtype": "int4"}, "state_dtype='int4'"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm=0.0"),
        ({"clip_grad_value": -1.0}, "clip_grad_value=-1.0"),
        ({"parameter_groups": [{"params": ["nothing.*"], "lr": 0.1}]}, "nothing"),
        ({"parameter_groups": [{"params": ["*"], "momentum": 0.1}]}, "momentum"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"capacity": "much"}, "much"),
        ({"capacity": 0}, "0"),
        ({"loss": nn.functional.mse_loss}, "loss="),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_with_its_value(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        relay.Trainer(gpt(), **options)


@pytest.mark.parametrize(
    ("model", "loss", "error"),
    [
        ([], nn.functional.mse_loss, ValueError),
        ([nn.Linear(2, 2)], None, ValueError),
        ([nn.Linear(2, 2), torch.relu], nn.functional.mse_loss, TypeError),
        ("gpt", nn.functional.mse_loss, TypeError),
        (None, None, (TypeError, ValueError)),
    ],
    ids=["empty list", "list without loss", "a function in it", "a string", "None"],
)
def test_what_is_no_model_is_refused(model: Any, loss: Any, error: Any) -> None:
    with pytest.raises(error):
        relay.Trainer(model, loss=loss)


@pytest.mark.parametrize("optimizer", ["adam", torch.optim.AdamW, functools.partial(dict, lr=1), 0.1])
def test_what_is_no_optimizer_is_refused_with_what_to_give(optimizer: Any) -> None:
    with pytest.raises(TypeError, match=r"relay\.AdamW.*functools\.partial"):
        relay.Trainer(gpt(), optimizer=optimizer)


@pytest.mark.parametrize("bad", [{"lr": -1.0}, {"eps": -1e-8}, {"weight_decay": -0.1}, {"betas": (1.0, 0.9)}])
def test_hyperparameters_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="betas" if "betas" in bad else "negative"):
        relay.AdamW(**bad)


def test_the_optimizer_is_not_stepped_by_hand(build: Build) -> None:
    with pytest.raises(RuntimeError, match=r"trainer\.step"):
        build(gpt()).optimizer.step()


# **** models that change, and outputs of other classes ****


class Named:
    """An output class that nobody registered anywhere."""

    def __init__(self, loss: torch.Tensor | None, logits: torch.Tensor) -> None:
        self.loss = loss
        self.logits = logits


class NamedOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Named:
        for layer in self.layers:
            inputs = layer(inputs)
        return Named(None if labels is None else nn.functional.cross_entropy(inputs, labels), inputs)


def test_predict_gives_an_object_of_the_models_own_class_for_the_whole_batch(build: Build) -> None:
    torch.manual_seed(0)
    model = NamedOutputs()
    inputs = torch.randn(7, 8)
    expected = model(inputs).logits.detach()
    output = build(model, microbatches=3).predict({"inputs": inputs})
    assert type(output) is Named
    assert output.loss is None
    torch.testing.assert_close(output.logits, expected, rtol=1e-6, atol=1e-6)


def test_hooks_of_a_repeated_layer_run_once(build: Build) -> None:
    torch.manual_seed(0)
    model = NamedOutputs()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, inputs, output: output * 2)
        layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    batch = {"inputs": torch.randn(4, 8), "labels": torch.tensor([0, 1, 2, 3])}
    expected = model(**batch).loss.item()
    assert build(model, microbatches=1).step(batch).loss == expected


def test_a_number_that_changes_between_steps_is_seen(build: Build) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    torch.manual_seed(0)
    modules: list[nn.Module] = [Scaled() for _ in range(3)]
    batch = (torch.randn(4, 8), torch.randn(4, 8))
    trainer = build(modules, loss=nn.functional.mse_loss, microbatches=1)
    trainer.step(batch)
    for module in modules:
        module.scale = 3.0  # type: ignore[assignment]
    expected = nn.functional.mse_loss(nn.Sequential(*modules)(batch[0]), batch[1]).item()
    assert trainer.step(batch).loss == expected


@pytest.mark.parametrize("change", ["replaced", "cast", "taken"])
def test_a_model_that_is_no_longer_the_one_taken_over_is_refused_by_name(build: Build, change: str) -> None:
    model = NamedOutputs()
    batch = {"inputs": torch.randn(4, 8), "labels": torch.tensor([0, 1, 2, 3])}
    trainer = build(model)
    trainer.step(batch)
    if change == "replaced":
        model.layers[1].weight = nn.Parameter(torch.zeros(8, 8))
    elif change == "cast":
        model.double()
    else:
        build(model).step(batch)
    with pytest.raises(relay.ModelChanged, match=r"layers\.\d\.weight.*new\s+trainer"):
        trainer.step(batch)


def test_an_input_that_every_micro_batch_needs_whole_can_be_named(build: Build) -> None:
    class Masked(NamedOutputs):
        def forward(self, inputs: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> Named:  # type: ignore[override]
            return super().forward(inputs * mask.sum(0), labels)

    torch.manual_seed(0)
    model = Masked()
    batch = {"mask": torch.rand(8, 8), "inputs": torch.randn(8, 8), "labels": torch.arange(8)}
    expected = model(**batch).loss.item()
    loss = build(model, microbatches=2, shared_inputs=["mask"]).step(batch).loss
    assert loss == pytest.approx(expected, rel=1e-6)


def test_a_loss_that_is_a_module_with_tensors_of_its_own_works(build: Build) -> None:
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]))
    modules = [nn.Linear(8, 8), nn.Linear(8, 2)]
    inputs, targets = torch.randn(8, 8), torch.randint(0, 2, (8,))
    expected = loss(nn.Sequential(*modules)(inputs), targets).item()
    trainer = build(modules, loss=loss, microbatches=1)
    assert trainer.step((inputs, targets)).loss == expected
    assert list(trainer.state_dict()) == list(nn.Sequential(*modules).state_dict())


def test_a_buffer_that_the_forward_changes_and_uses_has_the_gradients_of_its_old_value(build: Build) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return x + torch.tanh(self.linear(x)) * self.count

    torch.manual_seed(0)
    modules: list[nn.Module] = [Counting() for _ in range(4)]
    plain = nn.Sequential(*copy.deepcopy(modules))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    trainer = build(modules, loss=nn.functional.mse_loss, microbatches=3)
    for _ in range(4):
        inputs, targets = torch.randn(6, 8), torch.randn(6, 8)
        total = 0.0
        for one, other in zip(inputs.chunk(3), targets.chunk(3), strict=True):
            loss = nn.functional.mse_loss(plain(one.clone()), other) * (2 / 6)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        assert trainer.step((inputs, targets)).loss == total
    for one, other in zip(trainer.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_of_a_batch_with_class_weights_is_the_same_however_it_is_cut(build: Build, reduction: str) -> None:
    torch.manual_seed(0)
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]), reduction=reduction)
    modules = [nn.Linear(8, 8), nn.Linear(8, 2)]
    inputs, targets = torch.randn(9, 8), torch.tensor([0, 0, 0, 1, 1, 0, 1, 1, 1])
    expected = loss(nn.Sequential(*modules)(inputs), targets).item()
    assert build(modules, loss=loss, microbatches=3).step((inputs, targets)).loss == pytest.approx(expected, rel=1e-6)
