"""Commands that import much and make much: Python's cyclic collector looks over it seldom.

It looks over everything that lives whenever a quarter has been added, and nearly all that lives are the modules of
torch: a quarter of the time of `relay plan` went there. A process that somebody else's code shares is left as it is.
"""

import gc
import sys
from typing import Any

import click

SELDOM = (20_000, 20, 20)
"""Thresholds of the three generations: some megabytes of garbage at most."""


class SeldomCollected(click.Command):
    """A command that ends within seconds."""

    def make_context(self, *arguments: Any, **settings: Any) -> click.Context:
        # Before its options are looked at, since checking them imports torch; where that is here, others are too.
        if "torch" not in sys.modules:
            gc.set_threshold(*SELDOM)
        return super().make_context(*arguments, **settings)
