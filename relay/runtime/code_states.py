"""The states that a model's code has been compiled in: attributes, hooks, functions and all else that captures read.

A program belongs to the state that it was captured in. Before every step the state is found again, or a new one
begins and the model is compiled anew. It compiles nothing itself. Invariant: a state that is found is one in which
nothing that its captures read has changed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from relay.capture.guards.attribute_reads import Reads
from relay.capture.guards.code_guards import Change, CodeGuards
from relay.capture.guards.code_walk import follow, reads_by_class
from relay.capture.guards.executed_code import collected_code
from relay.capture.states.escaped_values import Known, noting, take_back

logger = logging.getLogger("relay")

MANY = 8
"""So many states are worth a warning."""

LIMIT = 16
"""States that are kept; the one that was found the longest ago goes first."""


class CodeState:
    """One state of the code. `guards` is None until something was captured in it."""

    def __init__(self) -> None:
        self.guards: CodeGuards | None = None

    def changed(self) -> str:
        """What has changed since, by its path; empty where it is as it was."""
        return "" if self.guards is None else self.guards.changed()


class CodeStates:
    """The states of one model's code, and of what else is called with it (the loss of a list of modules)."""

    def __init__(self, model: Callable[[], nn.Module], roots: Mapping[str, Any]) -> None:
        self._model = model
        self._roots = dict(roots)
        self._states: list[CodeState] = []
        self._reads: dict[type, set[str] | None] = {}
        self._own_changes: list[Change] = []
        self._begun = 0
        self._said: set[str] = set()
        self._known: Known = {}
        self._before = CodeGuards()

    def current(self) -> CodeState:
        """The state that the code is in now."""
        changed = ""
        for state in self._states:
            changed = state.changed()
            if not changed:
                self._states.remove(state)
                self._states.insert(0, state)
                return state
        if self._states:
            self._begun += 1
            logger.info("%s has changed since the model was compiled", changed)
            if self._begun == MANY:
                logger.warning(
                    "%s changes again and again, and the model is compiled anew each time (%d times so far). Keep what "
                    "changes from step to step in a buffer (register_buffer), or give it as part of the batch.",
                    changed, MANY,
                )  # fmt: skip
        self._states.insert(0, CodeState())
        del self._states[LIMIT:]
        return self._states[0]

    @contextmanager
    def capturing(self, state: CodeState) -> Iterator[list[tuple[nn.Module, Reads]]]:
        """Around captures in that state: what is put into the list yielded, modules with what was read of them, is
        what the state depends on from then on.

        What the captured code itself changes, as it runs in the trace, does not count: else no program would ever be
        found again.
        """
        self._before = before = state.guards or self._follow()
        captured: list[tuple[nn.Module, Reads]] = []
        with noting() as escapes, collected_code() as ran:
            yield captured
        places = {(id(one), name): (one, held) for _, one, name, held in before.places()}
        self._known = places | self._known  # places that the code itself changes are looked at once
        self._own_changes += before.changes()
        for module, reads in captured:
            self._add(reads_by_class(module, reads).items())
        escapes.taken = self._take_back()
        state.guards = self._follow()
        for message in escapes.messages(self._model(), ran, self._said):
            warnings.warn(message, stacklevel=2)

    def counted(self, state: CodeState) -> dict[Any, tuple[str, str, Any]]:
        """The plain numbers that have changed since captures in this state began, or since they ended: by guard the
        path, the name in code, and the number now."""
        return self._before.counted() | (state.guards.counted() if state.guards is not None else {})

    def settle(self, state: CodeState) -> None:
        """What has changed since the captures is changed by the code itself."""
        if state.guards is not None:
            self._own_changes += state.guards.changes()
            self._take_back()
            state.guards = self._follow()

    def changes_itself(self, changes: Iterable[Change]) -> None:
        """What these guards look at is changed by the code as it runs in steps, and is no change of the code."""
        self._own_changes += changes

    def clear(self) -> None:
        """Let go of all states: none is found again."""
        self._states.clear()
        self._own_changes.clear()

    def _take_back(self) -> list[str]:
        """Take out what traces have left in containers that the code reaches; their paths."""
        return take_back(follow(self._model(), self._reads, self._roots), self._known)

    def _add(self, reads: Iterable[tuple[type, set[str] | None]]) -> None:
        for kind, names in reads:
            known = self._reads.setdefault(kind, set())
            self._reads[kind] = None if names is None or known is None else known | names

    def _follow(self) -> CodeGuards:
        guards = follow(self._model(), self._reads, self._roots)
        guards.without(self._own_changes)
        return guards
