"""Conversations as tokens, with a mask of those that the assistant wrote: the only ones that are trained.

Where the tokenizer's template marks the assistant's turns ({% generation %}), its own mask is used. Otherwise a
conversation is rendered whole and up to each turn, and the difference of the two texts is the turn. Invariant: the
tokens are those of the whole rendered conversation, as the model sees them when it is used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from relay.errors import RelayError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{{ '\n' }}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Trained(NamedTuple):
    """The tokens of a row, and whether each is trained."""

    tokens: list[int]
    trained: list[bool]


def set_template(tokenizer: Any, given: str | None) -> None:
    """Give the tokenizer the template in the file `given`, or "chatml". Raises RelayError if it has none at all."""
    if given == "chatml":
        tokenizer.chat_template = CHATML
    elif given is not None:
        try:
            tokenizer.chat_template = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as wrong:
            raise RelayError(
                f"--chat-template {given} cannot be read: {wrong}. Give a file with a Jinja template, or chatml."
            ) from wrong
    elif not getattr(tokenizer, "chat_template", None):
        raise RelayError(
            "The tokenizer has no chat template, so conversations cannot be rendered. Give --chat-template with a "
            "file, or --chat-template chatml for the usual one."
        )


def conversation(value: Any) -> list[dict[str, Any]]:
    """The messages of a field, in the form of the template. Raises ValueError with what is wrong."""
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"A conversation is a list of messages with role and content; received {value!r:.80}.")
    messages = []
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping):
            raise ValueError(f"Message {number} is not an object with role and content; received {message!r:.80}.")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if message.get("weight") not in (None, 1):
            raise ValueError(
                f"Message {number} has the weight {message['weight']!r:.20}; every turn of the assistant is trained "
                "alike. Leave the field out, or leave out conversations whose turns are not to be trained."
            )
        if not isinstance(role, str) or (content is None and not message.get("tool_calls")):
            raise ValueError(f"Message {number} lacks role or content; it has {', '.join(map(str, message))}.")
        content = _text_of(content, number)
        rest = {k: v for k, v in message.items() if k not in ("from", "value", "weight") and v is not None}
        messages.append({**rest, "role": ROLES.get(role, role), "content": "" if content is None else content})
    return messages


def _text_of(content: Any, number: int) -> Any:
    """The content of a message; of one in parts, as `[{"type": "text", "text": ...}]`, their texts joined."""
    if not isinstance(content, (list, tuple)):
        return content
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"Message {number} has a part of type {kind!r:.40}, and only texts are trained.")
    return "".join(part["text"] for part in content)


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], first: int = 0) -> Trained:
    """The tokens of a conversation, with those of assistant turns from message `first` on trained.

    Raises ValueError if nothing of it is the assistant's, or if a turn cannot be told from the rest.
    """
    turns = [number for number in range(first, len(messages)) if messages[number]["role"] == "assistant"]
    if not turns:
        raise ValueError("The conversation has no turn of the assistant, so nothing of it is trained.")
    for number, message in enumerate(messages):
        if message.get("tool_calls"):
            _check_calls(tokenizer, messages[:number], message)
    if first == 0 and _GENERATION.search(tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""):
        try:
            found = tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except Exception as wrong:
            raise _refused(wrong) from wrong
        trained = [bool(mark) for mark in found["assistant_masks"]]
        if not any(trained):
            raise ValueError("The chat template marks no token of this conversation as the assistant's.")
        return Trained(list(found["input_ids"]), trained)
    whole = rendered_text(tokenizer, messages)
    spans = [_span(tokenizer, messages, turn, whole) for turn in turns]
    return spans_trained(tokenizer, whole, spans, special=False)


def _check_calls(tokenizer: Any, before: Sequence[Mapping[str, Any]], message: Mapping[str, Any]) -> None:
    """Raise ValueError if the template renders a message with calls of tools as if it had none."""
    without = {name: value for name, value in message.items() if name != "tool_calls"}
    if rendered_text(tokenizer, [*before, message]) == rendered_text(tokenizer, [*before, without]):
        raise ValueError(
            f"The chat template leaves out the tool_calls of message {len(before) + 1}, so a turn without a word would "
            "be learned. Give a --chat-template that renders them, or leave the conversation out."
        )


def spans_trained(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], special: bool) -> Trained:
    """The tokens of a text, with those trained that lie within one of the spans of characters."""
    if not getattr(tokenizer, "is_fast", False):
        raise RelayError(
            f"{type(tokenizer).__name__} does not tell which characters a token stands for, which is needed to mask "
            "prompts. Use a tokenizer with a tokenizer.json."
        )
    found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    marks = [
        end > start and any(low <= start and end <= high for low, high in spans)
        for start, end in found["offset_mapping"]
    ]
    return Trained(list(found["input_ids"]), marks)


def rendered_text(tokenizer: Any, messages: Sequence[Mapping[str, Any]], ask: bool = False) -> str:
    """A conversation as the template has it; with `ask`, up to where the assistant begins. Raises ValueError."""
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask))
    except Exception as wrong:
        raise _refused(wrong) from wrong


def _refused(wrong: Exception) -> Exception:
    """What the template's own code raised, which decides what it refuses, and how."""
    from jinja2 import TemplateSyntaxError

    if isinstance(wrong, TemplateSyntaxError):
        return RelayError(f"The chat template is no Jinja template: line {wrong.lineno}: {wrong.message}")
    return ValueError(f"The chat template refuses this conversation: {' '.join(str(wrong).split())}")


def _span(tokenizer: Any, messages: Sequence[Mapping[str, Any]], turn: int, whole: str) -> tuple[int, int]:
    """The characters of one turn of the assistant, with what ends it."""
    before = rendered_text(tokenizer, messages[:turn], ask=True) if turn else ""
    begin = len(before)
    if not whole.startswith(before):
        begin = _common(before, whole)
    upto = rendered_text(tokenizer, messages[: turn + 1])
    content = str(messages[turn]["content"]).strip()
    if whole.startswith(upto):
        if content and content not in upto[begin:]:  # left out, or written otherwise, as templates do with thoughts
            other = {**messages[turn], "content": f"{messages[turn]['content']} other"}
            if rendered_text(tokenizer, [*messages[:turn], other]) == upto:
                raise ValueError(f"The chat template leaves out the content of message {turn + 1}, the assistant's.")
        return begin, len(upto)
    # Some templates write the last turn otherwise than earlier ones.
    found = whole.find(content, begin) if content else -1
    if found < 0:
        raise ValueError(
            f"The chat template does not render message {turn + 1} as it stands, so its tokens cannot be told from the "
            "others. Give a --chat-template with {% generation %} around the assistant's turns."
        )
    end = found + len(content)
    for name in sorted(map(str, getattr(tokenizer, "all_special_tokens", ())), key=len, reverse=True):
        if whole.startswith(name, end):
            return begin, end + len(name)
    return begin, end


def _common(one: str, other: str) -> int:
    """The length of what two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
