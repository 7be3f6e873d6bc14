"""The host counts every byte that it hands out, keeps to its capacity, and runs tasks whose errors travel."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.device import Device
from hal.errors import HalError, OutOfMemory
from hal.host import Host, Ledger
from tests.support.failing_calls import Native, fail

PATIENCE = 60  # seconds until a test that hangs is a failure


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
allocations = st.lists(
    st.tuples(st.sampled_from(["weights", "moments"]), dtypes, st.integers(0, 999), st.booleans()), max_size=12
)


@settings(deadline=None)
@given(wanted=allocations)
def test_the_ledger_is_byte_exact_by_state_and_dtype(wanted: list[tuple[str, torch.dtype, int, bool]]) -> None:
    host = Host()
    allocated: list[tuple[str, torch.Tensor]] = []
    for state, dtype, count, give_back in wanted:
        tensor = host.alloc(count, dtype, state)
        assert (tensor.numel(), tensor.dtype, tensor.dim()) == (count, dtype, 1)
        if give_back:
            host.free(tensor, state)
        else:
            allocated.append((state, tensor))
    expected: dict[tuple[str, torch.dtype], int] = {}
    for state, tensor in allocated:
        if tensor.nbytes:
            expected[state, tensor.dtype] = expected.get((state, tensor.dtype), 0) + tensor.nbytes
    assert {(state, dtype): size for state, dtype, size in host.ledger.rows()} == expected
    assert host.ledger.total == host.memory().in_use == sum(tensor.nbytes for _, tensor in allocated)
    host.close()


@given(count=st.integers(1, 5000), dtype=dtypes)
def test_host_memory_is_aligned_to_a_cache_line(count: int, dtype: torch.dtype) -> None:
    assert Host().alloc(count, dtype, "weights").data_ptr() % 64 == 0


def test_the_host_keeps_to_its_capacity_and_says_what_did_not_fit() -> None:
    host = Host(capacity=1000)
    weights = host.alloc(200, torch.float32, "master weights")
    with pytest.raises(OutOfMemory) as caught:
        host.alloc(101, torch.int16, "step counts")
    assert (caught.value.requested, caught.value.in_use, caught.value.capacity) == (202, 800, 1000)
    assert "step counts (int16) on the host" in str(caught.value)
    assert host.memory().in_use == host.ledger.total == 800
    host.free(weights, "master weights")
    assert host.memory().in_use == host.ledger.total == 0
    assert host.alloc(250, torch.float32, "first moments").numel() == 250
    assert host.memory().peak == 1000


def test_memory_that_the_system_refuses_is_an_out_of_memory_that_counts_nothing() -> None:
    host = Host()
    with pytest.raises(OutOfMemory) as caught:
        host.alloc(2**58, torch.float32, "master weights")
    assert caught.value.requested == 2**60
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert host.memory().in_use == host.ledger.total == 0


def test_less_than_nothing_cannot_be_allocated() -> None:
    host = Host()
    with pytest.raises(ValueError, match="-4 bytes"):
        host.alloc(-1, torch.float32, "master weights")
    assert host.ledger.rows() == []


def test_a_printed_ledger_has_a_row_for_each_state_and_a_total() -> None:
    ledger = Ledger()
    ledger.add("master weights", torch.float32, 4_000_000)
    ledger.add("moments", torch.bfloat16, 2_500)
    ledger.add("master weights", torch.float32, 1)
    lines = str(ledger).splitlines()
    assert [re.split(r"\s{2,}", line.strip()) for line in lines] == [
        ["master weights", "float32", "4,000,001 B", "4.00 MB"],
        ["moments", "bfloat16", "2,500 B", "2.50 kB"],
        ["total", "4,002,501 B", "4.00 MB"],
    ]
    assert len({len(line) for line in lines}) == 1


def test_an_empty_ledger_prints_a_total_of_nothing() -> None:
    assert str(Ledger()).split() == ["total", "0", "B", "0", "B"]


def test_the_errors_of_tasks_travel_to_the_tasks_that_wait_and_to_no_other(host: Host) -> None:
    other = Host()
    ran: list[str] = []
    first = host.run(lambda: fail("disk full"), label="saving")
    waits = other.run(lambda: ran.append("waits"), [first])
    later = host.run(lambda: ran.append("later"))
    later.wait()
    with pytest.raises(HalError, match=r"saving failed.*disk full") as caught:
        waits.wait()
    assert isinstance(caught.value.__cause__, Native)
    assert ran == ["later"]
    other.close()


def test_closing_a_host_finishes_its_tasks_and_is_harmless_twice() -> None:
    host = Host()
    gate = threading.Event()
    ran: list[int] = []
    host.run(lambda: gate.wait(PATIENCE) and None)
    host.run(lambda: ran.append(1))
    closing = threading.Thread(target=host.close)
    closing.start()
    gate.set()
    closing.join()
    host.close()
    assert ran == [1]


def test_closing_a_host_that_shares_a_devices_cores_finishes_its_tasks_too(unified: Device) -> None:
    host = unified.host()
    gate = threading.Event()
    ran: list[int] = []
    host.run(lambda: gate.wait(PATIENCE) and None)
    host.run(fail)
    host.run(lambda: ran.append(1))
    closing = threading.Thread(target=host.close)
    closing.start()
    gate.set()
    closing.join()
    assert ran == [1]
    unified.alloc(64).free()  # the device itself is still open
    unified.close()
    host.close()


def test_a_devices_host_has_a_capacity_of_its_own(unified: Device) -> None:
    host = unified.host(capacity=100)
    with pytest.raises(OutOfMemory):
        host.alloc(101, torch.uint8, "weights")
    host.alloc(100, torch.uint8, "weights")
    assert unified.memory().in_use == 0
    assert host.memory().in_use == 100


def test_a_devices_host_runs_tasks_in_order_with_its_kernels(unified: Device) -> None:
    host = unified.host()
    numbers = torch.zeros(4)
    seen: list[list[float]] = []
    queue = unified.queue("compute")
    for value in range(5):
        queue.fill(unified.adopt(numbers), float(value))
        last = host.run(lambda: seen.append(numbers.tolist()))
    last.wait()
    assert seen == [[float(value)] * 4 for value in range(5)]
