"""TODO."""

from relay.models.gpt import GPT

__all__ = ["GPT"]
