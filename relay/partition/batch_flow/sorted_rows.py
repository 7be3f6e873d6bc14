"""Layers that sort rows by expert for products in groups, and put them back: whether each sample is computed alone.

A permutation and its inverse are not followed op by op. Instead the layer runs on made-up numbers, once on the whole
batch and once on parts of it: a layer of routed experts gives each sample the same numbers, unless it has a capacity
(tokens beyond it are dropped) or mixes samples otherwise. Numbers are drawn twice, the second time alike in all rows,
so that all go to the same experts. Dropout and noise are off. Invariant: the layer is left as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from relay.capture import BlockCall
from relay.capture.fake_tensors import is_fake
from relay.capture.guards.mutated_arguments import call_recorded
from relay.capture.guards.plain_tensors import PlainTensors
from relay.capture.guards.unsupported import hooks_wait, inside_layer
from relay.graph.pytree import tensor_leaves
from relay.partition.batch_flow.labels import Kind, Label, rows
from relay.partition.find_blocks import undisturbed

CLOSE = 1e-3
"""How near two results are, relative to the largest value: products of other shapes round otherwise."""


def computes_rows_alone(
    call: BlockCall,
    small: Sequence[torch.Tensor],
    large: Sequence[torch.Tensor],
    given: Sequence[Label],
    lengths: tuple[int, int],
) -> tuple[Label, ...] | None:
    """The labels of a layer's outputs if each sample's are the same beside other samples, of MIXED kind where not.

    `small` and `large` are examples of the inputs for a micro-batch and for the batch, of these `lengths`. None if it
    cannot be found out.
    """
    states = [*call.block.parameters(), *call.block.buffers()]
    if any(is_fake(one) or one.is_meta for one in states) or lengths[0] >= lengths[1]:
        return None
    if any(label.kind not in (Kind.ROWS, Kind.FREE) for label in given):
        return None
    found: list[Label] | None = None
    try:
        for alike in (False, True):
            whole = _made_up(large, given, alike)
            expected = _run(call, whole)
            for start in (0, lengths[1] - lengths[0]):
                part = [_part(one, label, start, lengths) for one, label in zip(whole, given, strict=True)]
                labels = _compare(_run(call, part), expected, start, lengths)
                found = labels if found is None else list(map(_worse, found, labels))
    except Exception:  # made-up numbers may be none that it takes
        return None
    return None if found is None else tuple(found)


def _made_up(examples: Sequence[torch.Tensor], given: Sequence[Label], alike: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for example, label in zip(examples, given, strict=True):
        shape = list(example.shape)
        if alike and label.kind is Kind.ROWS:
            shape[label.dim] = 1
        if example.dtype.is_floating_point:
            numbers = torch.randn(shape, generator=generator).to(example.dtype)
        else:
            numbers = torch.zeros(shape, dtype=example.dtype)
        made.append(numbers.expand(example.shape).clone())
    return made


def _part(tensor: torch.Tensor, label: Label, start: int, lengths: tuple[int, int]) -> torch.Tensor:
    """The rows of the samples from `start` on, as many as a micro-batch has."""
    if label.kind is not Kind.ROWS:
        return tensor
    apart = tensor.unflatten(label.dim, (-1, lengths[1], label.unit))
    return apart.narrow(label.dim + 1, start, lengths[0]).flatten(label.dim, label.dim + 2).clone()


def _compare(
    parts: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], start: int, lengths: tuple[int, int]
) -> list[Label]:
    labels = []
    for part, whole in zip(parts, wholes, strict=True):
        differing = [dim for dim in range(whole.dim()) if part.shape[dim] != whole.shape[dim]]
        label = Label(Kind.MIXED)
        if len(differing) == 1 and whole.shape[differing[0]] % lengths[1] == 0:
            asked = rows(differing[0], whole.shape[differing[0]] // lengths[1])
            own = _part(whole, asked, start, lengths)
            if own.shape == part.shape and _close(part, own):
                label = asked
        labels.append(label)
    return labels


def _close(first: torch.Tensor, second: torch.Tensor) -> bool:
    if not first.is_floating_point():
        return torch.equal(first, second)
    largest = float(second.abs().max()) if second.numel() else 0.0
    return bool(((first - second).abs() <= CLOSE * largest).all())


def _worse(first: Label, second: Label) -> Label:
    return first if first == second else Label(Kind.MIXED)


def _run(call: BlockCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    args, kwargs = call.input_tree.fill(tensors)
    with (
        _disable_current_modes(), torch.random.fork_rng(devices=()), inside_layer(), hooks_wait(), torch.no_grad(),
        undisturbed(call.block), PlainTensors(call.block), _buffers_restored(call.block), _WithoutDraws(),
    ):  # fmt: skip
        output, _ = call_recorded(call.forward, args, kwargs, call.recorded)
        return list(tensor_leaves(output)[0])


@contextmanager
def _buffers_restored(block: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        yield
    finally:
        for buffer, numbers in before:
            buffer.copy_(numbers)


class _WithoutDraws(TorchDispatchMode):
    """Dropout keeps everything, and what is drawn is one number."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, torch.Tensor):
            result.fill_(1)
        return result
