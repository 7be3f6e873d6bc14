"""What all tests share: numpy's matrix products on one thread, as torch's are, and trainers that are closed.

Two test processes whose products each spin on all cores wait for each other most of the time, and the number of
threads must be set before numpy is imported.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def build() -> Iterator[Callable[..., Any]]:
    """Makes trainers and closes them after the test."""
    import relay

    made: list[relay.Trainer] = []

    def make(*arguments: Any, **options: Any) -> relay.Trainer:
        made.append(relay.Trainer(*arguments, **options))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()
