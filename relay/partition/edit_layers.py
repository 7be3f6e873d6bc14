"""Architectures that change during training: which layers are active in a step, and edits of the list of layers.

Layers are the repeated blocks of a whole model, or the modules of a list, in order. This module edits the model and
reports how its tensors were renamed; the layer store and the optimizer move weights and states by those names.
Invariant: a tensor that stays in the model keeps its values and its optimizer state under its new name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from relay.errors import PartitionError
from relay.partition.find_blocks import find_blocks

DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""The names that configurations use for the number of layers. A model that reads it would not run an added layer."""


def layer_names(model: nn.Module, modules: Sequence[nn.Module]) -> list[str]:
    """The names of the layers in order. `modules` is the list that the model was given as, or empty."""
    return [str(number) for number in range(len(modules))] if modules else list(find_blocks(model))


def chosen_layers(names: Sequence[str], active: Sequence[int | str]) -> tuple[str, ...]:
    """The names of the active layers, in the model's order. Raises ValueError for a layer that does not exist."""
    if isinstance(active, (str, int)):
        raise ValueError(
            f"active_layers={active!r} must be a list of layers, by index or by name: active_layers=[{active!r}]"
        )
    chosen = set()
    for layer in active:
        if isinstance(layer, str) and layer in names:
            chosen.add(layer)
        elif isinstance(layer, int) and not isinstance(layer, bool) and -len(names) <= layer < len(names):
            chosen.add(names[layer])
        else:
            known = ", ".join(names[:3])
            raise ValueError(f"active_layers holds {layer!r}; the layers are 0 to {len(names) - 1}, or {known}, ...")
    return tuple(name for name in names if name in chosen)


def names_by_tensor(model: nn.Module) -> dict[int, str]:
    """The name of every parameter and buffer, by the tensor's id."""
    return {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def edit_blocks(
    model: nn.Module, within: str | None, change: Callable[[list[nn.Module]], list[nn.Module]]
) -> Callable[[], None]:
    """Replace a whole model's list of repeated blocks by `change(list)`. Returns a function that undoes the change.

    `within` is the path of the list to change; it may be None if the model has only one. Configurations that state the
    number of layers are updated as well. Raises PartitionError if `within` is not the path of such a list.
    """
    paths = list(dict.fromkeys(name.rpartition(".")[0] for name in find_blocks(model)))
    if within is None and len(paths) == 1:
        within = paths[0]
    if within not in paths:
        raise PartitionError(
            f"within={within!r} is not one of the model's lists of layers ({', '.join(map(repr, paths))}). Name one."
        )
    container = model.get_submodule(within)
    before = dict(container._modules)
    layers = change([layer for layer in before.values() if layer is not None])
    _fill(container, layers)
    settings = []
    for module in model.modules():
        config = getattr(module, "config", None)
        settings += [(config, name) for name in DEPTHS if getattr(config, name, None) == len(before)]
    for config, name in settings:
        setattr(config, name, len(layers))

    def undo() -> None:
        container._modules.clear()
        container._modules.update(before)
        for config, name in settings:
            setattr(config, name, len(before))

    return undo


def _fill(container: nn.Module, layers: Sequence[nn.Module]) -> None:
    container._modules.clear()
    container._modules.update({str(number): layer for number, layer in enumerate(layers)})


def inserted(layers: list[nn.Module], index: int, layer: nn.Module) -> list[nn.Module]:
    """The list with `layer` inserted before `index`, which may be the list's length. Raises IndexError."""
    _check_index(index, len(layers) + 1)
    return [*layers[:index], layer, *layers[index:]]


def removed(layers: list[nn.Module], index: int) -> list[nn.Module]:
    """The list without the layer at `index`. Raises IndexError, or ValueError if it is the only layer."""
    _check_index(index, len(layers))
    if len(layers) == 1:
        raise ValueError("the only layer cannot be removed")
    return [*layers[:index], *layers[index + 1 :]]


def replaced(layers: list[nn.Module], index: int, layer: nn.Module) -> list[nn.Module]:
    """The list with `layer` in place of the layer at `index`. Raises IndexError."""
    _check_index(index, len(layers))
    return [*layers[:index], layer, *layers[index + 1 :]]


def reordered(layers: list[nn.Module], order: Sequence[int]) -> list[nn.Module]:
    """The list in another order: layer `order[i]` becomes layer i. Raises ValueError if that is no permutation."""
    if sorted(order) != list(range(len(layers))):
        raise ValueError(f"order={list(order)!r} must hold each of 0 to {len(layers) - 1} once")
    return [layers[number] for number in order]


def _check_index(index: int, count: int) -> None:
    if not 0 <= index < count:
        raise IndexError(f"index {index} is out of range: it must be from 0 to {count - 1}")


Renames = dict[str, str | None]
"""New names of tensors by their old names; None for a tensor that is no longer in the model."""


def renames(before: dict[int, str], model: nn.Module) -> Renames:
    """The new names of a model's tensors, given their names before an edit (`names_by_tensor`)."""
    after = names_by_tensor(model)
    return {name: after.get(identity) for identity, name in before.items()}
