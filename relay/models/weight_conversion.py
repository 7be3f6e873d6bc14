"""How tensors of a Hugging Face folder become a model's, and the way back: names, and what is merged or split.

The rules are those of the installed transformers (`transformers.conversion_mapping`): a Mixtral's folder has a tensor
for each expert where the module has all of them in one, and a folder of a base model lacks the prefix that its tensors
have in a model with a head. The tensors of any other model have the same names in file and module. No file is read or
written here. Invariant: every conversion was run on tensors without memory when it was planned, so its names, shapes
and dtypes are known before any data is read.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from relay.errors import RelayError

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Conversion:
    """Tensors that are converted together.

    Attributes:
        sources: names of the tensors that it takes.
        results: what it gives, by name, on the meta device.
        convert: from the sources by name to the results by name. It may take tensors out of the dict that it is given.
    """

    sources: tuple[str, ...]
    results: Tensors
    convert: Callable[[Tensors], Tensors]


def is_transformers_model(model: nn.Module) -> bool:
    """Whether a model's class is derived from transformers' `PreTrainedModel`. Imports nothing."""
    library = sys.modules.get("transformers.modeling_utils")  # there is no such model before it is imported
    return library is not None and isinstance(model, library.PreTrainedModel)


def plan_loading(model: nn.Module, stored: Mapping[str, torch.Tensor]) -> list[Conversion]:
    """The conversions from the tensors of a folder (on the meta device) to the model's."""
    rules: list[Any] = _loading_rules(model)
    if not is_transformers_model(model):
        return [_renamed(name, name, tensor) for name, tensor in stored.items()]
    from transformers import core_model_loading as library

    renamings, converters = _kinds(rules)
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix, own = str(getattr(model, "base_model_prefix", "")), model.state_dict()
    members: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(stored, key=library.dot_natural_key):
        new, pattern = library.rename_source_key(name, renamings, converters, prefix, own)
        if new not in own and name in own:  # a name that a rule for older folders takes for an older one
            new, pattern = library.rename_source_key(name, [], [], prefix, own)
        if new not in own:
            new, pattern = name, None
        members.setdefault(new, []).append((name, pattern))
    model._weight_conversions = [rule for rule in rules if rule.was_used()]  # type: ignore[assignment]
    plan = []
    for new, sources in members.items():
        if sources[0][1] is None:
            plan += [_renamed(name, new, stored[name]) for name, _ in sources]
        else:
            plan.append(_converted(model, by_pattern[sources[0][1]], new, sources, stored, lambda name: name))
    return plan


def plan_saving(model: nn.Module, state: Mapping[str, torch.Tensor]) -> list[Conversion]:
    """The conversions from the model's tensors (on the meta device) to those of a folder."""
    if not is_transformers_model(model):
        return [_renamed(name, name, tensor) for name, tensor in state.items()]
    from transformers import core_model_loading as library

    renamings, converters = _kinds([rule.reverse_transform() for rule in reversed(_saving_rules(model))])
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    members: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(state, key=library.dot_natural_key):
        new, pattern = library.apply_converters(name, converters)
        if pattern is None:
            new = library.apply_renamings(name, renamings)
        members.setdefault(new, []).append((name, pattern))
    plan = []
    for new, sources in members.items():
        if sources[0][1] is None:
            plan += [_renamed(name, new, state[name]) for name, _ in sources]
        else:
            plan.append(
                _converted(
                    model,
                    by_pattern[sources[0][1]],
                    new,
                    sources,
                    state,
                    lambda name: library.apply_renamings(name, renamings),
                )
            )
    return plan


def _loading_rules(model: Any) -> list[Any]:
    if not is_transformers_model(model):
        return []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError as missing:
        raise RelayError(
            "This version of transformers has no rules for the names of weights (transformers.conversion_mapping). "
            "Install transformers 5 or newer, or load the model by from_pretrained."
        ) from missing
    return list(get_model_conversion_mapping(model))


def _saving_rules(model: Any) -> list[Any]:
    """The rules that the model was loaded by, as transformers notes them; else those of its class."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    used = getattr(model, "_weight_conversions", None)
    if isinstance(used, list):
        return used
    rules = get_model_conversion_mapping(model, add_legacy=False)
    return [rule for rule in rules if not isinstance(rule, PrefixChange)]


def _kinds(rules: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Rules that rename a tensor, and those that compute new ones."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    return (
        [rule for rule in rules if isinstance(rule, WeightRenaming)],
        [rule for rule in rules if isinstance(rule, WeightConverter)],
    )


def _renamed(old: str, new: str, tensor: torch.Tensor) -> Conversion:
    return Conversion((old,), {new: tensor}, lambda tensors: {new: tensors.pop(old)})


def _converted(
    model: nn.Module,
    converter: Any,
    first: str,
    sources: Sequence[tuple[str, str | None]],
    tensors: Mapping[str, torch.Tensor],
    rename: Callable[[str], str],
) -> Conversion:
    """A conversion by one of the library's converters. `first` is the name that it gives to its first result."""

    def convert(given: Tensors) -> Tensors:
        own = copy.deepcopy(converter)  # it collects what it converts
        for name, pattern in sources:
            own.add_tensor(first, name, pattern, given.pop(name))
        results = own.convert(first, model=model, config=model.config)
        return {rename(name): found[0] if isinstance(found, list) else found for name, found in results.items()}

    names = tuple(name for name, _ in sources)
    try:
        results = convert({name: tensors[name] for name in names})
    except Exception as failure:
        raise RelayError(
            f"The rules of transformers for {type(model).__name__} do not convert "
            f"{', '.join(names[:3])}{' and so on' if len(names) > 3 else ''} ({len(names)} tensors): "
            f"{type(failure).__name__}: {failure}. Is config.json the one of this folder?"
        ) from failure
    return Conversion(names, results, convert)
