"""Architectures that change while they train: which layers take part in a step, and edits of the list of layers.

Layers are the repeated blocks of a whole model, or the modules of a list, in order. It edits modules and says what
tensors are called before and after; memory and optimizer state follow by those names, in the store and the
optimizer. Invariant: a tensor that stays keeps its values and its optimizer state, whatever its name becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from relay.errors import PartitionError
from relay.partition.find_blocks import find_blocks

DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""What configurations call the number of layers: models that cut their list by it would not run a layer added."""


def layer_names(model: nn.Module, modules: Sequence[nn.Module]) -> list[str]:
    """The layers' names in order; `modules` is the list that a model was given as, or empty."""
    return [str(number) for number in range(len(modules))] if modules else list(find_blocks(model))


def chosen_layers(names: Sequence[str], active: Sequence[int | str]) -> tuple[str, ...]:
    """The names of the layers of a step, in the model's order. Raises ValueError for ones that are not there."""
    if isinstance(active, (str, int)):
        raise ValueError(
            f"active_layers={active!r} must be a list of layers, by index or by name: active_layers=[{active!r}]"
        )
    chosen = set()
    for one in active:
        if isinstance(one, str) and one in names:
            chosen.add(one)
        elif isinstance(one, int) and not isinstance(one, bool) and -len(names) <= one < len(names):
            chosen.add(names[one])
        else:
            known = ", ".join(names[:3])
            raise ValueError(f"active_layers holds {one!r}; the layers are 0 to {len(names) - 1}, or {known}, ...")
    return tuple(name for name in names if name in chosen)


def names_by_tensor(model: nn.Module) -> dict[int, str]:
    """The name of every parameter and buffer, by identity."""
    return {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def edit_blocks(
    model: nn.Module, within: str | None, change: Callable[[list[nn.Module]], list[nn.Module]]
) -> Callable[[], None]:
    """Change the list of a whole model's repeated blocks; returns what undoes it.

    `within` is the path of the list where the model has several. Raises PartitionError where it is not clear.
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
    """The list with a layer before `index` (which may be its length)."""
    _check_index(index, len(layers) + 1)
    return [*layers[:index], layer, *layers[index:]]


def removed(layers: list[nn.Module], index: int) -> list[nn.Module]:
    """The list without a layer. Raises ValueError for the last one."""
    _check_index(index, len(layers))
    if len(layers) == 1:
        raise ValueError("the only layer cannot be removed")
    return [*layers[:index], *layers[index + 1 :]]


def replaced(layers: list[nn.Module], index: int, layer: nn.Module) -> list[nn.Module]:
    """The list with another layer at `index`."""
    _check_index(index, len(layers))
    return [*layers[:index], layer, *layers[index + 1 :]]


def reordered(layers: list[nn.Module], order: Sequence[int]) -> list[nn.Module]:
    """The list in another order: `order[i]` is which of the layers comes i-th."""
    if sorted(order) != list(range(len(layers))):
        raise ValueError(f"order={list(order)!r} must hold each of 0 to {len(layers) - 1} once")
    return [layers[number] for number in order]


def _check_index(index: int, count: int) -> None:
    if not 0 <= index < count:
        raise IndexError(f"index {index} is out of range: there are places 0 to {count - 1}")


Renames = dict[str, str | None]
"""From what a tensor was called to what it is called now; None for one that is gone."""


def renames(before: dict[int, str], model: nn.Module) -> Renames:
    """What the names of a model's tensors have become."""
    after = names_by_tensor(model)
    return {name: after.get(identity) for identity, name in before.items()}
