"""What all tests share: trainers that are closed, and `--adversary`, the simulator in the CPU's place.

`pytest --adversary late` (or `eager`, or `random:SEED`) runs the tests of SCHEDULER and no others. Each trainer that
would have had the CPU has a simulated device in its place, which runs calls in that order over poisoned memory:
unified where it was `cpu`, apart where it was `cpu:discrete`. What the tests expect stays as it is, to the bit.

The environment is set before numpy and torch are imported, here and in the processes that tests start: everything runs
on one thread. Two test processes that each spin on all cores wait for each other most of the time. And Python keeps
what it compiled, whatever the shell has set: else each process compiles the project anew, and each test process the
tests, with pytest's assertions written into them.
"""

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support.matrix import mark_what_is_not_sampled

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

MACHINES = Path(__file__).parent / "support" / "machines"

SCHEDULER = (
    "edit_layers", "checkpoint", "clipping", "cut_off_models", "eager_fallback", "dropout", "evaluation", "exact_ties",
    "deferred_updates", "exactness", "families", "faults", "fixed_loss_scale", "head_chunks", "layer_chunks",
    "memory_model", "muon_on_device", "optimizer_options",
    "narrow_gradients", "overflow", "precision", "resident_layers", "resume", "semantics", "split_masters",
    "tied_weights", "whole_batch_head",
)  # fmt: skip
"""The files `test_*.py` that train through the schedule and the parameter server on a device they name."""

NOT_SIMULATED = {
    "test_layers_that_are_alike_are_captured_and_compiled_once": "counts the kernels of the CPU",
    "test_every_parameter_keeps_its_dtype": "has parameters in float64, in which no described machine computes",
    "test_the_watchdog_says_what_a_step_waits_for": "is about the time that passes on a clock",
}
"""Tests of those files that are about something else, by name, and why."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--adversary", metavar="ORDER", help="the scheduler's tests on the simulator: eager, late or random:SEED"
    )


def pytest_configure() -> None:
    """Heed Ctrl-C as at a terminal: a process that a shell starts in the background ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects what is marked exhaustive
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_what_is_not_sampled(items)
    # The longest run first, or one process would have them left as the others have nothing to take from it.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if config.getoption("--adversary") is None:
        return
    if gone := [name for name in SCHEDULER if not any(Path(__file__).parent.rglob(f"test_{name}.py"))]:
        raise pytest.UsageError(f"SCHEDULER in {__file__} names files that are not there: {', '.join(gone)}")
    chosen = [item for item in items if item.path.stem.removeprefix("test_") in SCHEDULER]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen
    for item in items:
        reason = NOT_SIMULATED.get(getattr(item, "originalname", ""))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


# How long an example takes depends on what else the machine does, and so does how long it takes to make one.
hypothesis.settings.register_profile(
    "no clocks", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("no clocks")


def pytest_collection_finish() -> None:
    """All is imported. Tracing makes and drops objects by the hundred thousand; to look for cycles among them every few
    hundred would take a tenth of the time."""
    gc.set_threshold(10_000)
    freeze_the_heap()


def freeze_the_heap() -> None:
    """Collect what is garbage, and exempt the rest from later collections.

    PyTorch's objects and the shared captures stay until the end, a million and more. Each full collection would go
    through all of them again, for seconds.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def freeze_after_each_file() -> Iterator[None]:
    """The captures that a file's tests made are kept for others."""
    yield
    freeze_the_heap()


@pytest.fixture(autouse=True)
def adversary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--adversary`, a simulated device wherever the CPU is opened."""
    order = request.config.getoption("--adversary")
    if order is not None:
        from hal import registry

        opened = registry.open
        name, _, seed = order.partition(":")
        options = f"order={name},seed={seed or 0},poison=on"
        simulated = {
            "cpu": f"sim:{MACHINES / 'unified.toml'},{options}",
            "cpu:discrete": f"sim:{MACHINES / 'apart.toml'},{options}",
        }
        monkeypatch.setattr(
            registry, "open", lambda device, capacity=None: opened(simulated.get(device, device), capacity)
        )


@pytest.fixture
def build() -> Iterator[Callable[..., Any]]:
    """Makes trainers and closes them after the test. Trainers of models built alike share what was captured."""
    import relay
    from tests.support.shared_captures import share

    made: list[relay.Trainer] = []

    def make(*arguments: Any, **options: Any) -> relay.Trainer:
        made.append(share(relay.Trainer(*arguments, **options)))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture(params=["cpu", "cpu:discrete"])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each CPU device in turn; a file about another device has a fixture of that name of its own."""
    from tests.support.cpu_devices import opened

    with opened(request.param) as made:
        yield made


@pytest.fixture
def unified() -> Iterator[Any]:
    from tests.support.cpu_devices import opened

    with opened("cpu") as made:
        yield made


@pytest.fixture
def discrete() -> Iterator[Any]:
    from tests.support.cpu_devices import opened

    with opened("cpu:discrete") as made:
        yield made


@pytest.fixture
def gate() -> Iterator[Any]:
    """Holds back what waits for its event until the test opens it."""
    from hal.conformance.gate import Gate

    with Gate() as made:
        yield made


@pytest.fixture(params=["cpu", "cpu:discrete"])
def bench(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A slot on each CPU device in turn."""
    from tests.support.slot_bench import Bench

    with closing(Bench(request.param)) as made:
        yield made


@pytest.fixture
def apart() -> Iterator[Any]:
    """A slot on the CPU device whose memory is apart from the host's."""
    from tests.support.slot_bench import Bench

    with closing(Bench("cpu:discrete")) as made:
        yield made
