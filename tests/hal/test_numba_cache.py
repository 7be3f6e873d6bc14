"""Compiled code is that of the source it is compiled from, whatever a cache holds and whoever died while writing it."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hal.numba_cache import compiled

numba = pytest.importorskip("numba")

SOURCE = """
import helper

def constant(value):
    return value + {constant} + helper.more(0)
"""
HELPER = """
import numba

@numba.njit
def more(value):
    return value + {constant}
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], int]:
    """Writes a kernel that adds two constants, the second in a file of its own, and gives what it makes of 0."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path / "cache"))

    def make(constant: int, more: int) -> int:
        modules: dict[str, Any] = {}
        for name, text, number in (("helper", HELPER, more), ("kernel", SOURCE, constant)):
            (tmp_path / f"{name}.py").write_text(text.format(constant=number))
            spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            modules[name] = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, modules[name])
            source = (tmp_path / f"{name}.py").read_text()  # not through a .pyc, which is by the second
            exec(compile(source, str(tmp_path / f"{name}.py"), "exec"), vars(modules[name]))
        signature = [numba.types.int64(numba.types.int64)]
        return int(compiled(modules["kernel"].constant, signature, [modules["helper"].__file__])(0))

    return make


def test_a_kernel_is_cached_and_found_again(build: Callable[[int, int], int], tmp_path: Path) -> None:
    assert build(1, 10) == 11
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.nbc")}
    assert files
    assert build(1, 10) == 11
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.nbc")}


def test_a_change_in_a_file_that_it_takes_code_from_counts(build: Callable[[int, int], int]) -> None:
    assert build(1, 10) == 11
    assert build(1, 20) == 21


def test_a_writer_that_died_half_way_leaves_no_code_of_an_older_source(
    build: Callable[[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert build(1, 10) == 11
    with monkeypatch.context() as dying:
        dying.setattr(numba.core.caching.IndexDataCacheFile, "_save_data", lambda *_: None)
        assert build(2, 10) == 12
    assert build(2, 10) == 12
