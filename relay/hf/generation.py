"""Text from a model that is relayed: a batch of prompts goes through the layers together, token by token.

Keys and values lie in host memory, in tensors of a few lengths, and each layer is sent those of its own, so that one
program serves all prompts of a bucket and one all tokens of a bucket. The layers are called by the model's own forward;
only the cache that it hands to them is another one. Invariant: under greedy choice the tokens are those of the model's
own `generate`, and the model is as it was afterwards.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from relay.errors import RelayError
from relay.hf.loss_module import WITHOUT_LOSS, LossModule
from relay.partition.find_blocks import find_blocks

SHORTEST = 16
"""The shortest bucket of a length. Each further one is twice as long."""


class CannotGenerate(RelayError):
    """A model that cannot generate through the relay.

    What to do: use the model's own `generate`, if it fits in memory.
    """


def generate(
    relay: Any,
    model: nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_new_tokens: int = 20,
    temperature: float = 0.0,
    top_p: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """Continue a batch of prompts. Returns prompts and new tokens, as `model.generate` does.

    Args:
        relay: the `relay.Trainer` whose model this is, or contains it.
        model: a causal language model of transformers.
        input_ids: prompts (rows, tokens), padded on the left.
        attention_mask: 0 where a prompt is padded; without it no token is padding.
        max_new_tokens: tokens to add at most.
        temperature: 0 takes the likeliest token; otherwise the logits are divided by it and a token is drawn.
        top_p: draw among the likeliest tokens whose probabilities add up to at least this.
        eos_token_id: tokens that end a row; the model's own if not given.
        pad_token_id: what follows the end of a row; the first token that ends rows if not given.
        seed: of the draws.

    Raises CannotGenerate for a model without a static cache, and ValueError for arguments out of range.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
    _check(model, input_ids, mask, max_new_tokens, temperature, top_p)
    ends = _ends(model, eos_token_id)
    filler = pad_token_id if pad_token_id is not None else (ends[0] if ends else 0)
    given = input_ids.shape[1]
    processors = _processors(model, input_ids, mask, ends, max_new_tokens)
    longest = bucket(given)
    padded = nn.functional.pad(input_ids, (longest - given, 0), value=filler)
    seen = nn.functional.pad(mask, (longest - given, 0))
    random = torch.Generator().manual_seed(seed)
    new: list[torch.Tensor] = []
    finished = torch.zeros(len(input_ids), dtype=torch.bool)
    with _cached_layers(model) as layers:
        outputs = _run(relay, {"input_ids": padded, "seen": seen})
        _check_layers(model, layers, outputs)
        cache = _HostCache(outputs, len(layers))
        for position in range(longest, longest + max_new_tokens):
            logits = outputs["logits"].float()
            if processors:
                logits = processors(torch.cat([input_ids, *(one[:, None] for one in new)], dim=1), logits)
            token = choose(logits, temperature, top_p, random)
            token = torch.where(finished, filler, token)
            new.append(token)
            finished |= torch.isin(token, torch.tensor(ends, dtype=token.dtype))
            if finished.all() or len(new) == max_new_tokens:
                break
            seen = torch.cat([seen, torch.ones(len(seen), 1, dtype=seen.dtype)], dim=1)
            length = bucket(position + 1)
            batch = {
                "input_ids": token[:, None],
                "seen": nn.functional.pad(seen, (0, length - seen.shape[1])),
                "position_ids": seen.sum(1, keepdim=True) - 1,
                "start": torch.tensor(position),
                **cache.tensors(length),
            }
            outputs = _run(relay, batch)
            cache.add(outputs, position)
    return torch.cat([input_ids, torch.stack(new, dim=1)], dim=1)


def bucket(length: int) -> int:
    """The length of the smallest bucket that is long enough."""
    found = SHORTEST
    while found < length:
        found *= 2
    return found


def choose(logits: torch.Tensor, temperature: float, top_p: float, random: torch.Generator) -> torch.Tensor:
    """The next token of each row: the likeliest at temperature 0, otherwise drawn."""
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.double() / temperature, dim=-1)
    if top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # the likeliest one is never left out
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered.masked_fill(beyond, 0.0))
    return torch.multinomial(probabilities, 1, generator=random).squeeze(1)


# -- checks -----------------------------------------------------------------------------------------------------


def _check(
    model: nn.Module, input_ids: torch.Tensor, mask: torch.Tensor, count: int, temperature: float, top_p: float
) -> None:
    name = type(model).__name__
    if input_ids.dim() != 2 or not input_ids.numel() or mask.shape != input_ids.shape:
        raise ValueError(f"input_ids must be (rows, tokens), with a mask of its shape; got {tuple(input_ids.shape)}.")
    if not bool(mask[:, -1].all()):
        raise ValueError("Prompts must be padded on the left: the last token of a row is masked.")
    if count < 1 or temperature < 0 or not 0 < top_p <= 1:
        raise ValueError(
            f"max_new_tokens={count} must be at least 1, temperature={temperature} not negative, and top_p={top_p} "
            "in (0, 1]."
        )
    base = _base(model)
    own = inspect.signature(base.forward).parameters
    if not getattr(base, "_can_compile_fullgraph", False) or getattr(_config(model), "is_encoder_decoder", False):
        raise CannotGenerate(f"{name} has no static key-value cache in transformers, so Relay cannot generate with it.")
    if not {"position_ids", "attention_mask"} <= own.keys() or not {"cache", "past_key_values"} & own.keys():
        raise CannotGenerate(f"{name} takes no position_ids, which prompts of different lengths need.")
    if base.config._attn_implementation not in ("sdpa", "eager"):
        raise CannotGenerate(
            f"{name} has attn_implementation={base.config._attn_implementation!r}, which takes no mask of Relay's. "
            "Load it with attn_implementation='sdpa'."
        )
    window = getattr(_config(model), "sliding_window", None)
    kinds = set(getattr(_config(model), "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    longest = bucket(input_ids.shape[1]) + count
    if kinds or (window is not None and longest > window and "sliding_attention" in _kinds(model)):
        reason = f"layers of kind {', '.join(sorted(kinds))}" if kinds else f"a window of {window} tokens"
        raise CannotGenerate(f"{name} has {reason}, and Relay's cache holds all of {longest} tokens for every layer.")


def _kinds(model: nn.Module) -> Sequence[str]:
    return getattr(_config(model), "layer_types", None) or ["sliding_attention"]


def _check_layers(model: nn.Module, layers: Sequence[nn.Module], outputs: Any) -> None:
    missing = [number for number in range(len(layers)) if f"keys_{number}" not in outputs]
    if missing:
        raise CannotGenerate(
            f"{type(model).__name__}: layer {missing[0]} does not put keys and values into the cache once in a "
            "forward, so Relay cannot generate with it."
        )


def _ends(model: nn.Module, given: int | Sequence[int] | None) -> list[int]:
    if given is None:
        given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if given is None:
        return []
    return [given] if isinstance(given, int) else list(given)


def _processors(model: nn.Module, input_ids: torch.Tensor, mask: torch.Tensor, ends: list[int], count: int) -> Any:
    """What the model's generation_config changes in logits, such as a penalty of repetitions, by its library's code."""
    base = _base(model)
    if not hasattr(base, "_get_logits_processor"):
        return []
    given = {"do_sample": False, "num_beams": 1, "max_new_tokens": count, "eos_token_id": ends or None}
    config, _ = base._prepare_generation_config(None, **given)
    config.max_length = input_ids.shape[1] + count
    base._prepare_special_tokens(config, True, device=input_ids.device)
    return base._get_logits_processor(
        config, input_ids.shape[1], device=str(input_ids.device), model_kwargs={"attention_mask": mask}
    )


def _base(model: nn.Module) -> Any:
    """The model of the library inside of one with adapters."""
    whole: Any = model
    return whole.get_base_model() if hasattr(model, "get_base_model") else model


def _config(model: nn.Module) -> Any:
    return _base(model).config.get_text_config()


# -- the model with a cache that is given ----------------------------------------------------------------------------


class _HostCache:
    """The keys and values of all layers in host memory, with room for a bucket's length."""

    def __init__(self, outputs: Any, layers: int) -> None:
        self._held = {f"{kind}_{n}": outputs[f"{kind}_{n}"] for n in range(layers) for kind in ("keys", "values")}

    def tensors(self, length: int) -> dict[str, torch.Tensor]:
        """The tensors, made longer where a bucket has been filled."""
        for name, held in self._held.items():
            if held.shape[2] < length:
                self._held[name] = nn.functional.pad(held, (0, 0, 0, length - held.shape[2]))
        return self._held

    def add(self, outputs: Any, position: int) -> None:
        """Write the keys and values of a token."""
        for name, held in self._held.items():
            held[:, :, position : position + 1] = outputs[name]


class _LayerCache:
    """What a layer is given as its cache: earlier keys and values, and where the new ones go."""

    is_compileable = True

    def __init__(self, keys: torch.Tensor | None, values: torch.Tensor | None, start: torch.Tensor | None) -> None:
        self._earlier, self._start = (keys, values), start
        self.new: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the new keys and values. Returns all that the layer attends to."""
        if self.new is not None:
            raise CannotGenerate("A layer puts keys and values into the cache more than once in a forward.")
        self.new = (keys, values)
        earlier_keys, earlier_values = self._earlier
        if earlier_keys is None or earlier_values is None or self._start is None:
            return keys, values
        places = torch.arange(earlier_keys.shape[2], device=keys.device)
        here = (places == self._start)[:, None]  # over rows and heads; elementwise, so rows can be cut
        return torch.where(here, keys, earlier_keys), torch.where(here, values, earlier_values)

    def get_seq_length(self, *_: Any) -> int:
        return 0


class _ModelCache:
    """What the model's forward hands to its layers. Only its class is looked at."""

    is_compileable = True

    def get_seq_length(self, *_: Any) -> int:
        return 0


@functools.cache
def _with_cache(kind: type) -> type:
    """A class of layers whose forward takes keys, values and a place, and returns the new keys and values too."""

    def forward(
        self: Any, keys: Any, values: Any, start: Any, name: str, args: Any, kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        cache = _LayerCache(keys, values, start)
        hidden = kind.forward(self, *args, **kwargs, **{name: cache})  # type: ignore[attr-defined]
        return (hidden[0] if isinstance(hidden, tuple) else hidden, *(cache.new or ()))

    return type(f"Cached{kind.__name__}", (kind,), {"forward": forward})


class _Caller:
    """Stands in the model's list of layers: calls a layer with its own keys and values.

    What is traced with is in `state`, an object that is no part of the code that a step compares.
    """

    def __init__(self, layer: nn.Module, number: int, state: threading.local) -> None:
        self.layer, self.number, self.state = layer, number, state

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given, number = self.state.given, self.number
        name = next(name for name, one in kwargs.items() if isinstance(one, _ModelCache))
        others = {key: one for key, one in kwargs.items() if key != name}
        earlier = given.get(f"keys_{number}"), given.get(f"values_{number}"), given.get("start")
        hidden, *new = self.layer(*earlier, name, args, others)
        self.state.found.update({f"{kind}_{number}": one for kind, one in zip(("keys", "values"), new, strict=False)})
        return hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["layer"], name)


class _CallerList(nn.ModuleList):
    """A list of layers that gives its callers to the code of the model."""

    def __init__(self, layers: Sequence[nn.Module], state: threading.local) -> None:
        super().__init__(layers)
        self.callers = tuple(_Caller(layer, number, state) for number, layer in enumerate(layers))

    def __getitem__(self, index: Any) -> Any:
        return self.callers[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callers)


_LISTS: weakref.WeakKeyDictionary[nn.Module, tuple[_CallerList, Callable[..., Any]]] = weakref.WeakKeyDictionary()
"""The same objects for each call of `generate`, so that what was compiled is found again."""


@contextmanager
def _cached_layers(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The model with layers that take and return keys and values. Yields its layers."""
    base = _base(model)
    blocks = find_blocks(base)
    lists = {name.rpartition(".")[0] for name in blocks}
    if len(lists) != 1:
        raise CannotGenerate(f"{type(model).__name__} has {len(lists)} lists of layers, and Relay generates with one.")
    parent_name, _, attribute = lists.pop().rpartition(".")
    parent, layers = base.get_submodule(parent_name), list(blocks.values())
    if base not in _LISTS or list(_LISTS[base][0].children()) != layers:
        state = threading.local()
        _LISTS[base] = _CallerList(layers, state), _forward_with_cache(weakref.ref(base), state)
    callers, forward = _LISTS[base]
    callers.training = base.training
    before = parent._modules[attribute]
    kinds = [type(layer) for layer in layers]
    own = vars(base).get("forward")
    try:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = _with_cache(cast(Any, kind))
        parent._modules[attribute] = callers
        base.__dict__["forward"] = forward
        yield layers
    finally:
        for layer, kind in zip(layers, kinds, strict=True):
            layer.__class__ = kind
        parent._modules[attribute] = before
        del base.__dict__["forward"]
        if own is not None:
            base.__dict__["forward"] = own


def _forward_with_cache(model: weakref.ref[Any], state: threading.local) -> Callable[..., dict[str, Any]]:
    """A forward that takes tokens and the cache as tensors, and returns the last logits and the new keys and values."""

    def forward(
        input_ids: torch.Tensor,
        seen: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        start: torch.Tensor | None = None,
        **given: Any,
    ) -> dict[str, Any]:
        base: Any = model()
        columns = torch.arange(seen.shape[1], device=seen.device)
        rows = torch.arange(input_ids.shape[1], device=seen.device) + (0 if start is None else start)
        allowed = (columns[None, :] <= rows[:, None])[None] & seen.bool()[:, None, :]
        allowed = (allowed | ~allowed.any(-1, keepdim=True))[:, None]  # a row of padding attends to all: no NaN
        mask = allowed
        if base.config._attn_implementation == "eager":
            mask = torch.zeros(allowed.shape, dtype=base.dtype, device=seen.device)
            mask = mask.masked_fill(~allowed, torch.finfo(base.dtype).min)
        if position_ids is None:
            position_ids = (seen.cumsum(1) - 1).clamp(min=0)
        state.given, state.found = {**given, "start": start}, {}
        name = "cache" if "cache" in inspect.signature(type(base).forward).parameters else "past_key_values"
        try:
            output = type(base).forward(
                base, input_ids=input_ids, attention_mask=mask, position_ids=position_ids, use_cache=True,
                logits_to_keep=1, return_dict=True, **{name: _ModelCache()},
            )  # fmt: skip
            return {"logits": output.logits[:, -1], **state.found}
        finally:
            state.given, state.found = {}, {}

    return forward


def _run(relay: Any, batch: dict[str, Any]) -> Any:
    """One forward of the relay's model."""
    inner = isinstance(relay._model, LossModule)
    return relay.predict({**batch, WITHOUT_LOSS: True} if inner else batch)
