"""Keyword arguments that a function of ours does not take, refused in its own name.

Python would name the inner class that they are handed on to. It checks names, and that several values were given where
one is chosen from several; what values may be is said by `relay.options`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any


def refuse_unknown(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for a keyword that is not known, with the one that it resembles."""
    for name in given:
        if name not in known:
            near = [one for one in known if one.startswith(name)] or difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else f" It takes {', '.join(known)}."
            raise TypeError(f"relay.{function}() takes no {name!r}.{hint}")


def several(function: str, name: str, values: Any) -> tuple[Any, ...]:
    """The values to choose from. TypeError for a single one, ValueError for none."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(f"relay.{function}() chooses {name} among several: give a list, such as [{values!r}].")
    found = tuple(values)
    if not found:
        raise ValueError(f"relay.{function}() chooses {name} among those given, and none were: {name}={values!r}.")
    return found
