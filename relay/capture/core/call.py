"""One call to be rewritten to core form, with its arguments by name.

Part of the core lowering (`relay.capture.core.lowering`).
"""

from __future__ import annotations

from typing import Any

from torch import fx

from relay.capture.core.builder import part_spec

_KEYWORDS = {"dtype", "approximate"}


class Call:
    """One call to be rewritten. `wanted` is the shape and dtype of its result, or a tuple of these."""

    def __init__(self, target: Any, args: list[Any], kwargs: dict[str, Any], wanted: Any) -> None:
        self.target, self.args, self.kwargs, self.wanted = target, args, kwargs, wanted

    def get(self, name: str) -> Any:
        """The argument of that name in ATen's schema, or its default. Raises KeyError for an unknown name."""
        for position, argument in enumerate(self.target._schema.arguments):
            if argument.name == name:
                if position < len(self.args):
                    return self.args[position]
                return self.kwargs.get(name, argument.default_value)
        raise KeyError(name)

    @property
    def x(self) -> Any:
        """The first argument."""
        return self.args[0]

    @property
    def spec(self) -> Any:
        """The first argument's shape and dtype."""
        return part_spec(self.args[0])

    def dim(self, name: str = "dim") -> int:
        """An argument that is a dimension, as a number from 0."""
        return int(self.get(name)) % max(len(self.spec.shape), 1)


def with_defaults(
    target: Any, args: list[Any], kwargs: dict[str, Any], wanted: Any
) -> tuple[list[Any], dict[str, Any]]:
    """The positional arguments with defaults and dimensions counted from 0, and the keyword arguments that matter."""
    call = Call(target, args, kwargs, wanted)
    rank = len(call.spec.shape) if args and isinstance(args[0], fx.Node) else 0
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in target._schema.arguments:
        value = call.get(argument.name)
        if argument.name == "dim" and isinstance(value, int) and rank:
            value %= rank
        elif argument.name in ("dim", "dims") and isinstance(value, (list, tuple)) and rank:
            value = [entry % rank for entry in value]
        if not argument.kwarg_only:
            positional.append(value)
        elif argument.name in _KEYWORDS and argument.name != "dtype":
            named[argument.name] = value
    return positional, named
