"""What layers leave for each other, for the loss or for the model in plain Python: shared lists, objects and closures.

Layers are captured one by one, after the forward has ended, so a list of auxiliary losses that one appends to and
another reads, or a flag that one sets and the next looks at, would be what it was then. It is refused by name. A shared
list that is only written to (for inspection) does no harm. Whether it is read is decided by the source of the functions
that ran. Invariant: nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType

from torch import nn

from relay.capture.fake_tensors import modes_off
from relay.capture.guards.counters import is_read
from relay.capture.guards.executed_code import recorded_code
from relay.capture.guards.plain_tensors import KeepsState
from relay.capture.states.lasting_state import LastingStates, draws_from


class SharedStates:
    """Watches the calls of layers, and of what is around them, in one run of a forward."""

    def __init__(self) -> None:
        self._names: dict[Hashable, str] = {}
        self._reached: dict[Hashable, set[int]] = {}
        self._ran: dict[Hashable, set[CodeType]] = {}
        self._changed: list[tuple[Hashable, int, str, frozenset[str]]] = []

    @contextmanager
    def call(self, key: Hashable, name: str, modules: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
        """Around a call of these modules, which are one layer."""
        with modes_off():
            before = LastingStates(modules)
        with recorded_code() as ran:
            yield
        with modes_off():
            if drawn := before.drawn_from():
                raise draws_from(f"layer {name!r}", drawn, name)
            self._names[key] = name
            self._changed += [(key, *found) for found in before.changes()]
            self._reached.setdefault(key, set()).update(before.identities, before.now().identities)
            self._ran.setdefault(key, set()).update(ran)

    def note(self, key: Hashable, states: LastingStates, ran: set[CodeType]) -> None:
        """What else reads such states, with the code that ran."""
        self._names[key] = "the model"
        self._reached[key] = states.identities
        self._ran[key] = ran

    def check(self) -> None:
        """Raise KeepsState for what one changed and another reads."""
        for key, identity, path, names in self._changed:
            for other, reached in self._reached.items():
                if other == key or identity not in reached:
                    continue
                if any(is_read(name, self._ran[other]) for name in names):
                    raise KeepsState(
                        f"layer {self._names[key]!r} changes {path!r}, which is also held and read by "
                        f"{self._names[other]!r}. Only the outputs of layers are passed between them, so it would find "
                        "what was there when it was compiled. Return it as an output, or pass it as an argument.",
                        layer=self._names[key],
                    )
