"""Models whose layers take and return unusual values: objects, dicts, nothing, integers, views.

They are made of `odd_models.Layers`, and take and return what `plain_models` does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.zoo.odd_models import Layers
from tests.support.zoo.plain_models import WIDTH, Block


@dataclasses.dataclass(frozen=True)
class State:
    hidden: Tensor
    memory: Tensor
    depth: int = 0


class OfState(Block):
    def forward(self, state: State) -> State:  # type: ignore[override]
        hidden = super().forward(state.hidden + state.memory)
        return State(hidden, state.memory * 0.5 + hidden, state.depth + 1)


class Dataclasses(Layers):
    """Layers that take a dataclass and return one."""

    def __init__(self) -> None:
        super().__init__(OfState)

    def run(self, value: Tensor) -> Tensor:
        state = State(value, torch.zeros_like(value))
        for layer in self.layers:
            state = layer(state)
        return state.hidden + state.memory * state.depth


class ByKeyword(Block):
    def forward(self, *, hidden: Tensor, scale: float, extra: Tensor | None = None) -> Tensor:  # type: ignore[override]
        hidden = super().forward(hidden) * scale
        return hidden if extra is None else hidden + extra


class KeywordsOnly(Layers):
    def __init__(self) -> None:
        super().__init__(ByKeyword)

    def run(self, value: Tensor) -> Tensor:
        first = value
        for number, layer in enumerate(self.layers):
            value = layer(hidden=value, scale=0.5 + number, extra=first if number == 1 else None)
        return value


class IntoDict(Block):
    def forward(self, state: dict[str, Any]) -> None:  # type: ignore[override]
        state["hidden"] = super().forward(state["hidden"])
        state.setdefault("kept", []).append(state["hidden"] * 0.5)


class DictsChanged(Layers):
    """Layers that return nothing: they change the dict they are given, and a list within it."""

    def __init__(self) -> None:
        super().__init__(IntoDict)

    def run(self, value: Tensor) -> Tensor:
        state: dict[str, Any] = {"hidden": value}
        kept = state["kept"] = []  # type: ignore[var-annotated]
        for layer in self.layers:
            layer(state)
        assert len(kept) == len(self.layers)
        return state["hidden"] + kept[0] * kept[1]


class Cell:
    """An object of the model's own that layers write to."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class IntoObject(Block):
    def forward(self, cell: Cell) -> None:  # type: ignore[override]
        cell.value = super().forward(cell.value)


class ObjectsChanged(Layers):
    def __init__(self) -> None:
        super().__init__(IntoObject)

    def run(self, value: Tensor) -> Tensor:
        cell = Cell(value)
        for layer in self.layers:
            layer(cell)
        return cell.value


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, value: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
        first, second, third = self.inner(value).split(WIDTH, -1)
        return first, {"turned": second.transpose(0, 1)}, (value, mask), third[:, :0], first


class ViewsAndNothings(Layers):
    """Layers that return views, their own input, None, a tensor without elements, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__(Several)

    def run(self, value: Tensor) -> Tensor:
        mask = None
        for layer in self.layers:
            first, second, (same, mask), empty, again = layer(value, mask)
            value = first * 0.5 + second["turned"].transpose(0, 1) + same + again + empty.sum()
        return value


class Moved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)

    def forward(self, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return value + self.table(positions), (positions * 3 + 1) % 16


class IntegersBetween(Layers):
    """Layers that hand on integers."""

    def __init__(self) -> None:
        super().__init__(Moved)

    def run(self, value: Tensor) -> Tensor:
        positions = (value[..., 0] * 4).long().abs() % 16
        for layer in self.layers:
            value, positions = layer(value, positions)
        return value


class Dense(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH * count, WIDTH)

    def forward(self, features: list[Tensor]) -> Tensor:
        return torch.tanh(self.inner(torch.cat(features, -1)))


class DenseNet(Layers):
    """Layers of other sizes each, that take a list of all that came before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Dense(count) for count in range(1, 4))

    def run(self, value: Tensor) -> Tensor:
        features = [value]
        for layer in self.layers:
            features.append(layer(features))
        return features[-1] + features[-2]


class Growing(Block):
    def forward(self, value: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(value + memory.mean(1, keepdim=True)), torch.cat([memory, value], 1)


class GrowingMemory(Layers):
    """Layers that hand on more each time."""

    def __init__(self) -> None:
        super().__init__(Growing)

    def run(self, value: Tensor) -> Tensor:
        memory = value
        for layer in self.layers:
            value, memory = layer(value, memory)
        return value + memory.mean((1, 2), keepdim=True)
