"""A call that fails with an error of no library of ours."""

from __future__ import annotations


class Native(Exception):
    """An error of somebody else's library."""


def fail(text: str = "broken") -> None:
    raise Native(text)
