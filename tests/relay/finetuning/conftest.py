"""Fine-tunings of these tests share what was captured, as the trainers of other tests do."""

from __future__ import annotations

from typing import Any

import pytest

from relay.finetuning import finetune
from relay.trainer import Trainer
from tests.support.shared_captures import share


@pytest.fixture(autouse=True)
def share_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*arguments: Any, **options: Any) -> Trainer:
        return share(Trainer(*arguments, **options))

    monkeypatch.setattr(finetune, "Trainer", make)
