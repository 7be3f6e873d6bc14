"""The table of small models: each with what is odd about it, and how equal it must be to plain PyTorch.

Tests take their cases from here with `cases`; the classes are in the files beside. A new odd model is a class there and
a row here. Models with nothing odd about them, which a test spoils in one way (`unspoiled`, `plain_models`), and single
modules of which only the core lowering is tested (`tests/support/core_modules.py`) are not in it. Invariant: names are
unique within a group, and every row has something to tell that is odd.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from tests.support.zoo import cut_off_models as cut_off
from tests.support.zoo import odd_layers, odd_models, odd_values, small_models
from tests.support.zoo.families import FAMILIES, Family
from tests.support.zoo.plain_models import WIDTH, Block, Stack


class Group(enum.Enum):
    """What the models of a group are there to test."""

    ODD = "models whose layers are called, connected or made in unusual ways"
    REUSED = "models that call their layers several times"
    CUT_OFF = "models parts of which no gradient reaches"
    CUT_OFF_LIST = "lists of modules parts of which no gradient reaches"
    FAMILY = "architectures of other people"
    DEVICE = "models that every device trains"


@dataclass(frozen=True)
class Entry:
    """A row. `make` gives the model (a list of modules in CUT_OFF_LIST), with weights drawn by torch's seed.

    `tolerance` is the largest relative error of a gradient: 0 stands for losses and parameters equal to the last bit.
    `untouched`: some parameters have no gradient in any step, and must stay as they are. `family`
    has the batches of an architecture.
    """

    group: Group
    name: str
    make: Callable[[], Any]
    oddity: str
    tolerance: float = 0.0
    microbatches: int = 3
    untouched: bool = False
    family: Family | None = None


def _odd(name: str, make: Callable[[], nn.Module], oddity: str) -> Entry:
    return Entry(Group.ODD, name, make, oddity)


def _reused(make: Callable[[], nn.Module], oddity: str) -> Entry:
    return Entry(Group.REUSED, getattr(make, "__name__", ""), make, oddity)


def _cut_off(name: str, make: Callable[[], nn.Module], oddity: str, untouched: bool = True) -> Entry:
    return Entry(Group.CUT_OFF, name, make, oddity, microbatches=2, untouched=untouched)


def _cut_off_list(name: str, middle: tuple[Callable[[], nn.Module], ...], oddity: str) -> Entry:
    """A list of modules: a linear one, those in the middle, and another block."""

    def make() -> list[nn.Module]:
        return [nn.Linear(WIDTH, WIDTH), *(each() for each in middle), Block()]

    return Entry(Group.CUT_OFF_LIST, name, make, oddity, microbatches=2, untouched=True)


def _family(name: str, oddity: str) -> Entry:
    family = FAMILIES[name]
    return Entry(Group.FAMILY, name, lambda: family.make(0.0), oddity, family=family)


def _device(name: str, oddity: str) -> Entry:
    def make() -> nn.Module:
        return small_models.build(name)

    return Entry(Group.DEVICE, name, make, oddity, 1e-5, small_models.MICROBATCHES)


of, in_the_middle = odd_models.of, cut_off.InTheMiddle

TABLE: tuple[Entry, ...] = (
    _odd("Dataclasses", odd_values.Dataclasses, "layers take a dataclass and return one"),
    _odd("KeywordsOnly", odd_values.KeywordsOnly, "layers take keywords alone, one of them a number that changes"),
    _odd("DictsChanged", odd_values.DictsChanged, "layers return nothing and change the dict that they are given"),
    _odd("ObjectsChanged", odd_values.ObjectsChanged, "layers write to an object of the model's own"),
    _odd("ViewsAndNothings", odd_values.ViewsAndNothings, "layers return views, None, an empty tensor, a tensor twice"),
    _odd("IntegersBetween", odd_values.IntegersBetween, "layers hand on integers"),
    _odd("DenseNet", odd_values.DenseNet, "layers of growing size take a list of all earlier results"),
    _odd("GrowingMemory", odd_values.GrowingMemory, "what layers hand on grows from layer to layer"),
    _odd("Backwards", odd_models.Backwards, "layers are called in reverse"),
    _odd("InModuleDict", odd_models.InModuleDict, "layers are in a ModuleDict"),
    _odd("Stages", odd_models.Stages, "lists of layers in a list, with a loss at the end of each"),
    _odd("Hybrid", odd_models.Hybrid, "layers of two classes in turn, and one without parameters"),
    _odd("Reversible", odd_models.Reversible, "two streams that are exchanged between layers"),
    _odd("Slices", odd_models.Slices, "slices of a Sequential are called"),
    _odd("ParametersGiven", odd_models.ParametersGiven, "layers are given parameters, buffers and computed weights"),
    _odd("Hooked", odd_models.Hooked, "hooks on layers and within them change what passes"),
    _odd("Quantised", odd_layers.Quantised, "a codebook between two lists of layers, with losses of its own"),
    _odd("checkpointed", lambda: odd_models.Checkpointed(False), "layers are checkpointed already"),
    _odd("checkpointed, reentrant", lambda: odd_models.Checkpointed(True), "layers are checkpointed in the older way"),
    _odd("custom gradients", of(odd_layers.StraightThrough), "gradients that are not those of what is computed"),
    _odd("hooks without a question", of(odd_layers.Watched), "hooks on values, whether gradients flow or not"),
    _odd("Fourier", of(odd_layers.Fourier), "complex numbers within a layer"),
    _odd("old weight norm", of(odd_layers.OldWeightNorm), "weights computed by a hook before the forward"),
    _odd("moving average of weights", of(odd_layers.Shadowed), "a buffer that follows the weights"),
    _odd("attributes", of(odd_layers.Seen), "a result left in an attribute, and a plain tensor in another"),
    _reused(odd_models.Universal, "one layer is called four times"),
    _reused(odd_models.ThereAndBack, "layers are called in order and then in reverse"),
    _reused(odd_models.Siamese, "inputs and targets pass through the same layers"),
    _cut_off("no_grad", cut_off.NoGradLayers, "no_grad around the first layers"),
    _cut_off("no_grad and BatchNorm", lambda: cut_off.NoGradLayers(cut_off.Normalised), "statistics change untrained"),
    _cut_off("no_grad and layers that ask", lambda: cut_off.NoGradLayers(cut_off.Asking), "data decide under no_grad"),
    _cut_off("set_grad_enabled", cut_off.SetGradEnabled, "gradients are switched on from layer to layer"),
    _cut_off("inference_mode", cut_off.Inference, "inference mode around layers and the head"),
    _cut_off("head alone", cut_off.HeadAlone, "nothing but the head is trained"),
    _cut_off("own target", cut_off.OwnTarget, "the layers make their own target without gradients", untouched=False),
    _cut_off(
        "own target and layers that ask", lambda: cut_off.OwnTarget(cut_off.Asking),
        "the same, and data decide", untouched=False,
    ),
    _cut_off("given to both", cut_off.GivenToBoth, "a parameter is used without gradients and then with them"),
    _cut_off("detach between", cut_off.DetachBetween, "a detach between two layers"),
    _cut_off("not in the loss", cut_off.Unused, "two layers make a result that is not in the loss"),
    _cut_off("detaches its input", lambda: in_the_middle(cut_off.DetachesInput), "one layer detaches its input"),
    _cut_off("every layer detaches its input", lambda: Stack(cut_off.DetachesInput), "only the last layer is reached"),
    _cut_off("decorated", lambda: in_the_middle(cut_off.WithoutGradients), "a forward decorated with no_grad"),
    _cut_off("detached branch", lambda: Stack(cut_off.DetachedBranch), "a part used detached, and a part not at all"),
    _cut_off("asks and detaches", lambda: in_the_middle(cut_off.AskingDetached), "data decide, and the input is cut"),
    _cut_off("recurrent and detached", lambda: in_the_middle(cut_off.Recurrent), "a GRU behind a detach"),
    _cut_off("checkpointed", cut_off.CheckpointedUntrained, "an older checkpoint, which needs a gradient to its input"),
    _cut_off_list("detaches its input", (Block, cut_off.DetachesInput), "a later layer detaches its input"),
    _cut_off_list("decorated", (Block, cut_off.WithoutGradients, Block), "a forward decorated with no_grad"),
    _cut_off_list("detached branch", (cut_off.DetachedBranch, cut_off.DetachedBranch), "parts used detached"),
    _cut_off_list("one of two outputs", (cut_off.Twofold, cut_off.TakesFirst), "one of two outputs is dropped"),
    _cut_off_list("asks and detaches", (Block, cut_off.AskingDetached), "data decide, and the input is cut"),
    _cut_off_list("recurrent and detached", (cut_off.Recurrent,), "a GRU behind a detach"),
    _cut_off_list("detaches at the end", (Block, Block, cut_off.DetachesInput), "the last but one layer detaches"),
    _family("gpt2", "tied embeddings, and Conv1D in place of Linear"),
    _family("bert-mlm", "attention masks over padding"),
    _family("bert-tied", "attention masks, and tied embeddings"),
    _family("bert-classifier", "a loss over rows, and a pooler that reads one position"),
    _family("roberta", "positions counted from the padding, and tied embeddings"),
    _family("llama", "rotary positions, and keys shared by groups of heads"),
    _family("mistral", "a sliding window"),
    _family("qwen3", "norms of queries and keys, and tied embeddings"),
    _family("gemma", "scaled embeddings that are tied, and norms that add one to their weight"),
    _family("mixtral", "experts: data decide which rows a matrix multiplies"),
    _family("t5", "an encoder and a decoder, whose layers share position biases"),
    _family("t5-tied", "the same, with one matrix used three times, twice of which in one segment"),
    _family("vit", "images in patches"),
    _family("nn.Transformer", "torch's own encoder and decoder"),
    _family("nn.TransformerEncoder", "torch's own encoder, whose fast path must not be taken"),
    _family("resnet", "BatchNorm, and stages of different shapes"),
    _device("gpt", "tied embeddings, and causal attention"),
    _device("bert", "dropout with the relay's masks, and attention masks over padding"),
    _device("llama", "rotary positions, groups of heads, and gated layers"),
)  # fmt: skip


def entries(group: Group) -> dict[str, Entry]:
    """The rows of a group, by name."""
    return {entry.name: entry for entry in TABLE if entry.group is group}


def cases(group: Group) -> list[Any]:
    """The rows of a group as cases of a parametrised test; those are skipped whose library is missing."""
    return [pytest.param(entry, id=entry.name, marks=_marks(entry)) for entry in entries(group).values()]


def _marks(entry: Entry) -> list[pytest.MarkDecorator]:
    if entry.family is None or entry.family.available:
        return []
    return [pytest.mark.skip(reason=f"needs {entry.family.needs}")]
