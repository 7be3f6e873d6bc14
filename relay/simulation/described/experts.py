"""Routed experts of a model: how many parameters they hold, how many a token uses, and how many a step's tokens touch.

They are found by their tensors: a module with stacked matrices, one for each expert, or a ModuleList called `experts`.
How many experts a token is sent to is in the configuration. Shared experts, which every token uses, are not routed.

Invariant: without routed experts all parameters are active.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "num_selected_experts", "top_k")
"""What configurations call the number of experts that a token is sent to."""


class RoutedExperts(NamedTuple):
    """The parameters of all routed experts, how many experts a layer has, and how many a token is sent to."""

    parameters: int
    experts: int
    chosen: int

    @property
    def unused(self) -> int:
        """The parameters that a token does not use."""
        return self.parameters * (self.experts - self.chosen) // self.experts

    def touched(self, tokens: float) -> float:
        """The share of a layer's experts that so many tokens touch on average, if every expert is as likely."""
        return 1.0 - (1.0 - self.chosen / self.experts) ** tokens


def routed_experts(module: nn.Module) -> RoutedExperts | None:
    """The routed experts of a model with a configuration of transformers; None where it has none."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "get_text_config"):
        return None
    text = config.get_text_config()
    chosen = next((value for name in _CHOSEN if isinstance(value := getattr(text, name, None), int)), None)
    if chosen is None:
        return None
    parameters, experts = 0, 0
    for name, part in module.named_modules():
        count = getattr(part, "num_experts", None)
        own = list(part.parameters(recurse=False))
        if any(tensor.dim() == 3 and tensor.shape[0] == count for tensor in own):
            parameters += sum(tensor.numel() for tensor in own if tensor.shape[0] == count)
            experts = max(experts, int(count))  # type: ignore[arg-type]
        elif name.rpartition(".")[2] == "experts" and isinstance(part, nn.ModuleList) and len(part) > 1:
            parameters += sum(tensor.numel() for tensor in part.parameters())
            experts = max(experts, len(part))
    return RoutedExperts(parameters, experts, min(chosen, experts)) if experts else None
