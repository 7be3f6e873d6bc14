"""A model together with the loss that a trainer computes from it: the module that Relay trains where the two differ.

A label smoother, a loss function of the user's or a `compute_loss` of a subclass take the model's outputs. They are
traced with the model. What the code of `compute_loss` mentions of the trainer is watched, so that a change of it is
noticed before the next step. Invariant: the loss is what `compute_loss` returns for the batch.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from relay.capture.guards.followed_code import is_data
from relay.capture.guards.followed_code import mentioned_by as names_in

COUNT = "num_items_in_batch"
WITHOUT_LOSS = "relay_without_loss"
"""An entry of a batch that has no labels: the model alone is called."""

UNWATCHED = frozenset(
    {
        "model", "model_wrapped", "accelerator", "optimizer", "lr_scheduler", "callback_handler", "train_dataset",
        "eval_dataset", "data_collator", "processing_class", "gather_function", "relay_trainer", "relay_metrics",
        "ref_model", "_metrics", "_total_train_tokens",
    }
)  # fmt: skip
"""Attributes of a trainer that a loss may use, and that do not change what it computes."""

PLAIN = (bool, int, float, str, type(None))


class LossModule(nn.Module):
    """(batch) -> a dict with the loss, and the model's other outputs.

    Args:
        inner: the model.
        trainer: the trainer whose `compute_loss` is called.
    """

    def __init__(self, inner: nn.Module, trainer: Any) -> None:
        super().__init__()
        self.inner = inner
        self.__dict__["owner"] = weakref.ref(trainer)
        self._mentioned = mentioned_by(type(trainer), "compute_loss")
        self.watched: dict[str, Any] = {}
        self.look_again()
        self.train(inner.training)

    def forward(self, **inputs: Any) -> dict[str, Any]:
        trainer, _ = self.__dict__["owner"](), self.watched
        inner = Widened(self.inner) if trainer.relay_precision != "fp32" else self.inner
        if inputs.pop(WITHOUT_LOSS, False):
            return by_name(inner(**inputs))
        count = inputs.pop(COUNT, None)
        with no_writes(trainer):
            loss, outputs = trainer.compute_loss(inner, inputs, return_outputs=True, num_items_in_batch=count)
        return {"loss": loss, **by_name(outputs)}

    def look_again(self) -> None:
        """Read again what `compute_loss` mentions, before a step compares it."""
        trainer = self.__dict__["owner"]()
        for name in self._mentioned - UNWATCHED:
            if name == "args":
                plain = {key: value for key, value in vars(trainer.args).items() if isinstance(value, PLAIN)}
                self.watched.setdefault("args", {}).update(plain)
            elif name in vars(trainer) or is_data(inspect.getattr_static(type(trainer), name, None)):
                self.watched[name] = getattr(trainer, name)


def mentioned_by(kind: type, method: str) -> frozenset[str]:
    """The attributes of itself that a method reads, and those that methods read which it calls."""
    found: set[str] = set()
    waiting = [method]
    while waiting:
        name = waiting.pop()
        for base in kind.__mro__:
            function = vars(base).get(name)
            for used in own_attributes(function) - found if inspect.isfunction(function) else ():
                found.add(used)
                waiting.append(used)
    return frozenset(found)


def own_attributes(function: Any) -> set[str]:
    """The names that a method reads as attributes of its first argument, or of `super()`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # typed into an interpreter: every name counts
        return set(names_in(function.__code__))
    own = function.__code__.co_varnames[:1]
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (
            (isinstance(node.value, ast.Name) and node.value.id in own)
            or (isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super")
        )
    }


@contextmanager
def no_writes(trainer: Any) -> Iterator[None]:
    """Warn of attributes that `compute_loss` sets: it is traced, so they are not set in every step."""
    before = dict(vars(trainer))
    yield
    set_now = [name for name, value in vars(trainer).items() if before.get(name, trainer) is not value]
    if set_now:
        warnings.warn(
            f"{type(trainer).__name__}.compute_loss sets {', '.join(set_now)}. Relay traces compute_loss once for each "
            "shape of batch, so this runs then, and not in every step. Compute such numbers in a callback, from "
            "trainer.relay_metrics.",
            stacklevel=3,
        )


class Widened:
    """A model whose outputs in half precision are given as float32, as accelerate gives them under mixed precision."""

    def __init__(self, model: nn.Module) -> None:
        self.__dict__["_model"] = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return widened(self.__dict__["_model"](*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)


def widened(output: Any) -> Any:
    """An output with float32 in place of half precision."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    if isinstance(output, Mapping):
        return type(output)({key: widened(value) for key, value in output.items()})  # type: ignore[call-arg]
    if type(output) in (list, tuple):
        return type(output)(widened(value) for value in output)
    return output


def by_name(outputs: Any) -> dict[str, Any]:
    """A model's outputs besides its loss, by name and in their order."""
    if isinstance(outputs, Mapping):
        return {key: value for key, value in outputs.items() if key != "loss"}
    if isinstance(outputs, torch.Tensor):
        return {"output_0": outputs}
    return {f"output_{number}": value for number, value in enumerate(outputs) if number}
