"""A tokenizer and a small Llama for each file, and captures that fine-tunings share, as trainers of other tests do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.documentation_chats import save_llama, train_tokenizer
from relay.finetuning import finetune
from relay.trainer import Trainer
from tests.support.shared_captures import share


@pytest.fixture(autouse=True)
def share_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*arguments: Any, **options: Any) -> Trainer:
        return share(Trainer(*arguments, **options))

    monkeypatch.setattr(finetune, "Trainer", make)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finetuning")


@pytest.fixture(scope="module")
def llama(place: Path, tokenizer: Any) -> Path:
    return save_llama(place / "llama", tokenizer)
