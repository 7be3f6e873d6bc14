"""Recording which attributes code reads of a module affects no other thread, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from torch import nn

from relay.capture.guards.attribute_reads import recorded_reads


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.number = 3
        self.unread = 4


def hooked() -> bool:
    return "__getattribute__" in nn.Module.__dict__


def test_what_is_read_is_noted_module_by_module() -> None:
    layer = Layer()
    with recorded_reads(layer) as reads:
        assert layer.number == 3
        assert layer.inner.in_features == 2
    assert "number" in (reads[id(layer)] or ())
    assert "unread" not in (reads[id(layer)] or ())
    assert "in_features" in (reads[id(layer.inner)] or ())
    assert not hooked()


def test_a_class_that_has_a_hook_of_its_own_counts_as_read_whole() -> None:
    class Own(Layer):
        def __getattribute__(self, name: str) -> object:
            return super().__getattribute__(name)

    layer = Own()
    with recorded_reads(layer) as reads:
        assert layer.number == 3
    assert reads[id(layer)] is None


def test_an_error_inside_takes_the_hook_away_too() -> None:
    with pytest.raises(AttributeError, match="absent"), recorded_reads(Layer()):
        _ = Layer().absent
    assert not hooked()


def test_recordings_within_one_another_each_note_what_is_read_while_they_are_open() -> None:
    layer = Layer()
    with recorded_reads(layer) as outer:
        with recorded_reads(layer) as inner:
            _ = layer.number
        _ = layer.unread
        assert hooked()
    assert "number" in (inner[id(layer)] or ())
    assert "unread" not in (inner[id(layer)] or ())
    assert {"number", "unread"} <= (outer[id(layer)] or set())
    assert not hooked()


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_reads_of_other_threads_are_not_noted_and_their_recordings_are_their_own() -> None:
    layer, seen = Layer(), []

    def elsewhere() -> None:
        _ = layer.unread
        with recorded_reads(layer) as theirs:
            _ = layer.number
        seen.append(theirs[id(layer)])

    with recorded_reads(layer) as reads:
        in_thread(elsewhere)
        assert hooked()
    assert not {"unread", "number"} & (reads[id(layer)] or set())
    assert "number" in seen[0]
    assert not hooked()


def test_a_hook_that_was_there_before_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, calls = object.__getattribute__, []

    def theirs(module: nn.Module, name: str) -> object:
        calls.append(name)
        return plain(module, name)

    monkeypatch.setattr(nn.Module, "__getattribute__", theirs, raising=False)
    layer = Layer()
    with recorded_reads(layer) as reads:
        _ = layer.number
    assert nn.Module.__dict__["__getattribute__"] is theirs
    assert "number" in (reads[id(layer)] or ())
    assert "number" in calls
