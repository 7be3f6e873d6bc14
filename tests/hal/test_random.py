"""Checks `hal.random`: the published answers of Philox, the layout of the counter, and that all paths agree.

What it is not: a test of the statistical quality of Philox, for which see Salmon et al. 2011. Every seed is
fixed where a statistical bound (five standard deviations) is checked, so that it holds always or never.
"""

from __future__ import annotations

import math
import os
import pickle
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal import random
from hal.random import RandomKey, keep_mask, keep_threshold, normal, philox4x32, stream_words, uniform, words

KEY = RandomKey(seed=0x0123456789ABCDEF, step=7, segment=3, microbatch=2)
ONES = 0xFFFFFFFF

# Random123, examples/kat_vectors, rows "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

keys = st.builds(
    RandomKey,
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**32 - 1),
    segment=st.integers(0, 2**20 - 1),
    microbatch=st.integers(0, 2**32 - 1),
)
ops = st.integers(0, 4095)
shapes = st.one_of(
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.integers(0, 5000).map(lambda count: (count,)),
)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_reference_gives_the_published_answers(counter, key, expected):
    assert philox4x32(counter, key).tolist() == list(expected)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_compiled_code_gives_the_published_answers(counter, key, expected):
    # 67 blocks, so that vector code and its scalar remainder both run, ending at the block that is known.
    blocks = min(67, counter[0] + 1)
    out = np.empty(4 * blocks, dtype=np.uint32)
    random._compiled_fill()(out, None, counter[0] - blocks + 1, *counter[1:], *key)
    assert out[-4:].tolist() == list(expected)


@pytest.mark.parametrize(
    ("key", "op", "counter", "philox_key"),
    [
        (RandomKey(0, 0, 0, 0), 0, (0, 0, 0), (0, 0)),
        (RandomKey(1, 2, 3, 4), 5, (2, 3 << 12 | 5, 4), (1, 0)),
        (RandomKey(0xAAAA_BBBB_CCCC_DDDD, 9, 0, 0), 4095, (9, 4095, 0), (0xCCCC_DDDD, 0xAAAA_BBBB)),
        (RandomKey(2**64 - 1, 2**32 - 1, 2**20 - 1, 2**32 - 1), 4095, (ONES, ONES, ONES), (ONES, ONES)),
    ],
)
def test_counter_layout_is_the_documented_one(key, op, counter, philox_key):
    assert stream_words(key, op) == (*counter, *philox_key)
    expected = [philox4x32((block, *counter), philox_key) for block in range(3)]
    assert words(key, op, 12).tolist() == np.concatenate(expected).tolist()


@settings(max_examples=200, deadline=None)
@given(key=keys, op=ops, shape=shapes, drop_probability=st.floats(0, 1))
def test_mask_equals_the_reference(key, op, shape, drop_probability):
    mask = keep_mask(key, op, shape, drop_probability)
    expected = words(key, op, math.prod(shape)).astype(np.uint64) >= np.uint64(round(drop_probability * 2**32))
    assert mask.dtype == torch.bool
    assert mask.device.type == "cpu"
    assert mask.is_contiguous()
    assert tuple(mask.shape) == shape
    assert np.array_equal(mask.numpy().reshape(-1), expected)


@settings(max_examples=100, deadline=None)
@given(key=keys, op=ops, shape=shapes)
def test_uniform_equals_the_reference(key, op, shape):
    numbers = uniform(key, op, shape)
    expected = (words(key, op, math.prod(shape)) >> 8).astype(np.float64) / 2**24
    assert numbers.dtype == torch.float32
    assert numbers.is_contiguous()
    assert tuple(numbers.shape) == shape
    assert np.array_equal(numbers.numpy().reshape(-1).astype(np.float64), expected)


@pytest.mark.parametrize("count", [1, 2, 5, 1000, random.CHUNK_ELEMENTS + 5, 2 * random.CHUNK_ELEMENTS])
def test_normal_follows_its_formula(count):
    numbers = normal(KEY, 1, (count,))
    raw = words(KEY, 1, count + count % 2).reshape(-1, 2)
    expected = []
    for first, second in raw.tolist():
        radius = math.sqrt(-2.0 * math.log(((first >> 8) + 1) / 2**24))
        angle = 2.0 * math.pi * (second >> 8) / 2**24
        expected += [radius * math.cos(angle), radius * math.sin(angle)]
    assert numbers.dtype == torch.float32
    assert numbers.shape == (count,)
    np.testing.assert_allclose(numbers.numpy(), np.array(expected[:count]), rtol=2**-23, atol=1e-15)


def test_normal_is_finite_at_the_ends_of_its_words():
    out = np.empty(8, dtype=np.float32)
    random._write_normal(np.array([0, 0, 0, ONES, ONES, 0, ONES, ONES], dtype=np.uint32), out)
    largest = math.sqrt(48 * math.log(2))
    # The largest angle is one step short of a full turn.
    short = math.sin(-2 * math.pi / 2**24)
    np.testing.assert_allclose(out, [largest, 0, largest, largest * short, 0, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("count", [random.CHUNK_ELEMENTS - 1, random.CHUNK_ELEMENTS + 1, 100_003])
def test_large_draws_equal_the_reference(count):
    reference = words(KEY, 9, count)
    assert np.array_equal(keep_mask(KEY, 9, (count,), 0.25).numpy(), reference >= 2**30)
    assert np.array_equal(uniform(KEY, 9, (count,)).numpy(), (reference >> 8).astype(np.float32) * np.float32(2**-24))


@pytest.mark.parametrize("drop_probability", [0.001, 0.1, 0.25, 0.5, 0.9])
def test_mask_drops_the_asked_fraction(drop_probability):
    count = 1_000_003
    dropped = count - int(keep_mask(KEY, 4, (count,), drop_probability).sum())
    deviation = math.sqrt(count * drop_probability * (1 - drop_probability))
    assert abs(dropped - count * drop_probability) < 5 * deviation


def test_uniform_and_normal_have_their_moments():
    count = 1_000_000
    numbers = uniform(KEY, 5, (count,)).double()
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 5 * math.sqrt(1 / 12 / count)
    assert abs(numbers.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / count)
    numbers = normal(KEY, 5, (count,)).double()
    assert abs(numbers.mean()) < 5 / math.sqrt(count)
    assert abs(numbers.var() - 1) < 5 * math.sqrt(2 / count)
    assert abs((numbers**4).mean() - 3) < 5 * math.sqrt(96 / count)
    pairs = numbers.view(-1, 2)
    assert abs((pairs[:, 0] * pairs[:, 1]).mean()) < 5 / math.sqrt(count / 2)


def test_every_part_of_the_key_changes_the_mask():
    """All pairs of masks are independent: at probability one half they agree on half of their elements."""
    count = 100_000
    draws = [
        (KEY, 0),
        (KEY, 1),
        (KEY, 4095),
        (RandomKey(KEY.seed ^ 1, 7, 3, 2), 0),
        (RandomKey(KEY.seed ^ 1 << 63, 7, 3, 2), 0),
        (RandomKey(KEY.seed, 8, 3, 2), 0),
        (RandomKey(KEY.seed, 7, 4, 2), 0),
        (RandomKey(KEY.seed, 7, 3, 3), 0),
        (RandomKey(KEY.seed, 3, 7, 2), 0),
        (RandomKey(KEY.seed, 2, 3, 7), 0),
    ]
    masks = [keep_mask(key, op, (count,), 0.5) for key, op in draws]
    for index, mask in enumerate(masks):
        for other in masks[:index]:
            agreeing = int((mask == other).sum())
            assert abs(agreeing - count / 2) < 5 * math.sqrt(count / 4)


@settings(max_examples=50, deadline=None)
@given(key=keys, op=ops, long=st.integers(0, 3000), data=st.data())
def test_a_shorter_draw_is_the_beginning_of_a_longer_one(key, op, long, data):
    short = data.draw(st.integers(0, long))
    assert torch.equal(keep_mask(key, op, (short,), 0.3), keep_mask(key, op, (long,), 0.3)[:short])
    assert torch.equal(uniform(key, op, (short,)), uniform(key, op, (long,))[:short])
    assert torch.equal(normal(key, op, (short,)), normal(key, op, (long,))[:short])
    assert np.array_equal(words(key, op, short), words(key, op, long)[:short])


def test_shape_only_arranges_the_elements():
    flat = keep_mask(KEY, 0, (24,), 0.5)
    assert torch.equal(keep_mask(KEY, 0, torch.Size([2, 3, 4]), 0.5).view(-1), flat)
    assert torch.equal(keep_mask(KEY, 0, [4, 6], 0.5).view(-1), flat)
    assert torch.equal(keep_mask(KEY, 0, (), 0.5), flat[0])
    assert keep_mask(KEY, 0, (5, 0, 3), 0.5).shape == (5, 0, 3)
    assert uniform(KEY, 0, (0,)).shape == (0,)
    assert normal(KEY, 0, ()).shape == ()


def test_several_threads_draw_the_same(monkeypatch):
    # Forget the compiled code, so that the threads also race for the first use.
    monkeypatch.setattr(random, "_fill_compiled", None)
    barrier = threading.Barrier(8)

    def draw(_: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        barrier.wait()
        with torch.no_grad():
            return keep_mask(KEY, 1, (100_001,), 0.1), uniform(KEY, 1, (50_001,)), normal(KEY, 1, (50_001,))

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(draw, range(8)))
    for result in results[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(result, results[0], strict=True))


def test_torch_modes_and_defaults_change_nothing():
    expected = keep_mask(KEY, 1, (1001,), 0.1), uniform(KEY, 1, (1001,)), normal(KEY, 1, (1001,))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with torch.device("meta"), torch.enable_grad():
        drawn = keep_mask(KEY, 1, (1001,), 0.1), uniform(KEY, 1, (1001,)), normal(KEY, 1, (1001,))
    for ours, theirs in zip(drawn, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert not ours.requires_grad
    assert torch.equal(torch.get_rng_state(), state)


def test_interpreter_runs_while_a_mask_is_filled():
    keep_mask(KEY, 0, (4,), 0.5)

    def ran_meanwhile() -> bool:
        span = []

        def work() -> None:
            span.append(time.perf_counter())
            keep_mask(KEY, 0, (2**28,), 0.5)
            span.append(time.perf_counter())

        worker = threading.Thread(target=work)
        worker.start()
        moments = []
        while worker.is_alive():
            moments.append(time.perf_counter())
            time.sleep(0.001)
        quarter = (span[1] - span[0]) / 4
        return any(span[0] + quarter < moment < span[1] - quarter for moment in moments)

    # A busy machine may keep this thread waiting for all of one draw, though hardly for all of five.
    assert any(ran_meanwhile() for _ in range(5))


@pytest.mark.parametrize("zero", [0, 0.0, -0.0, 1e-12])
def test_probability_zero_keeps_all(zero):
    assert keep_threshold(zero) == 0
    assert bool(keep_mask(KEY, 2, (10_001,), zero).all())


@pytest.mark.parametrize("probability", [1, 1.0, 1 - 1e-12, np.float32(1)])
def test_probability_one_drops_all(probability):
    assert keep_threshold(probability) == 2**32
    assert not bool(keep_mask(KEY, 2, (10_001,), probability).any())


def test_word_at_the_threshold_is_kept_and_word_below_it_dropped():
    # Enough elements for every lane of a block, in vector code and in its scalar remainder.
    count = 300
    for element, word in enumerate(words(KEY, 2, count).tolist()):
        assert bool(keep_mask(KEY, 2, (count,), word / 2**32)[element])
        assert not bool(keep_mask(KEY, 2, (count,), (word + 1) / 2**32)[element])


@pytest.mark.parametrize(
    ("field", "limit"), [("seed", 2**64), ("step", 2**32), ("segment", 2**20), ("microbatch", 2**32)]
)
def test_key_names_the_field_that_is_wrong(field, limit):
    good = {"seed": 1, "step": 2, "segment": 3, "microbatch": 4}
    for value in (-1, limit, 0.5, None, "7"):
        with pytest.raises(ValueError, match=rf"RandomKey\.{field} .*expected.*{limit - 1}, received"):
            RandomKey(**{**good, field: value})
    assert getattr(RandomKey(**{**good, field: limit - 1}), field) == limit - 1


def test_key_is_a_value():
    same = RandomKey(KEY.seed, KEY.step, KEY.segment, KEY.microbatch)
    assert same == KEY
    assert hash(same) == hash(KEY)
    assert pickle.loads(pickle.dumps(KEY)) == KEY
    with pytest.raises(AttributeError):
        KEY.step = 1  # type: ignore[misc]


def test_a_segments_draws_are_the_same_under_the_key_of_one_before_it():
    before = RandomKey(KEY.seed, KEY.step, KEY.segment - 2, KEY.microbatch)
    assert words(KEY, 7, 9).tolist() == words(before, 2 * 4096 + 7, 9).tolist()


@pytest.mark.parametrize("op", [-1, 2**32, 1.0])
def test_bad_op_is_named(op):
    for draw in (
        lambda: words(KEY, op, 1),
        lambda: keep_mask(KEY, op, (1,), 0.5),
        lambda: uniform(KEY, op, (1,)),
        lambda: normal(KEY, op, (1,)),
    ):
        with pytest.raises(ValueError, match=r"^op .*expected.*received"):
            draw()


@pytest.mark.parametrize("shape", [(-1,), (2, -3), (2**33, 3), (1.5,), ("4",), 4, None])
def test_bad_shape_is_named(shape):
    for draw in (
        lambda: keep_mask(KEY, 0, shape, 0.5),
        lambda: uniform(KEY, 0, shape),
        lambda: normal(KEY, 0, shape),
    ):
        with pytest.raises(ValueError, match=r"^shape .*expected.*received"):
            draw()


@pytest.mark.parametrize("count", [-1, 2**34 + 1, 2.0])
def test_bad_count_is_named(count):
    with pytest.raises(ValueError, match=r"^count .*expected.*received"):
        words(KEY, 0, count)


@pytest.mark.parametrize("drop_probability", [-0.1, 1.0000001, math.nan, math.inf, "0.5", None])
def test_bad_probability_is_named(drop_probability):
    with pytest.raises(ValueError, match=r"^drop_probability .*expected.*received"):
        keep_mask(KEY, 0, (1,), drop_probability)


@pytest.fixture
def copied_package(tmp_path):
    """A copy of the module that cannot have its own cache folder, even for root: a file is in its place."""
    package = tmp_path / "site" / "hal"
    package.mkdir(parents=True)
    for module in ("random.py", "numba_cache.py"):
        shutil.copy(Path(random.__file__).with_name(module), package / module)
    (package / "__pycache__").write_text("")
    return tmp_path


def draw_in_a_new_process(folder: Path, cache_home: Path) -> str:
    """The mask's number of kept elements, and then what the module logged, as another process prints them."""
    script = (
        "import logging, sys\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')\n"
        "from hal.random import RandomKey, keep_mask\n"
        "assert 'numba' not in sys.modules\n"
        "print(int(keep_mask(RandomKey(1, 2, 3, 4), 5, (1000,), 0.5).sum()))\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    environment |= {
        "PYTHONPATH": str(folder / "site"),
        "HOME": str(cache_home),
        "XDG_CACHE_HOME": str(cache_home),
    }
    environment |= {"LOCALAPPDATA": str(cache_home)}
    finished = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_read_only_package_is_cached_for_the_user_and_damage_is_survived(copied_package):
    expected = str(int(keep_mask(RandomKey(1, 2, 3, 4), 5, (1000,), 0.5).sum()))
    cache_home = copied_package / "home"
    assert draw_in_a_new_process(copied_package, cache_home).split() == [expected]
    indices = list(cache_home.rglob("*.nbi"))
    assert indices
    for file in indices:
        file.write_bytes(file.read_bytes()[:3])
    damaged = draw_in_a_new_process(copied_package, cache_home)
    assert expected in damaged.split()
    assert "because its cache cannot be used" in damaged


def test_no_place_for_a_cache_is_survived(copied_package):
    expected = str(int(keep_mask(RandomKey(1, 2, 3, 4), 5, (1000,), 0.5).sum()))
    cache_home = copied_package / "file"
    cache_home.write_text("")
    printed = draw_in_a_new_process(copied_package, cache_home)
    assert expected in printed.split()
    assert "because its cache cannot be used" in printed
