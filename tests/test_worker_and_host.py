"""Workers run calls in order and outlive their errors; the host counts every byte that it hands out."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.device import Device
from hal.errors import HalError, OutOfMemory, Unsupported
from hal.event import Event
from hal.host import Host, Ledger
from hal.registry import open as open_device
from hal.worker import Worker

PATIENCE = 60  # seconds until a test that hangs is a failure


class Native(Exception):
    """An error of somebody else's library."""


def fail(text: str = "broken") -> None:
    raise Native(text)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker("test")
    yield made
    made.close()


@pytest.fixture
def other() -> Iterator[Worker]:
    made = Worker("other")
    yield made
    made.close()


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


@pytest.fixture
def device() -> Iterator[Device]:
    made = open_device("cpu")
    yield made
    made.close()


def test_calls_run_one_after_another_in_the_order_of_submission(worker: Worker) -> None:
    gate = threading.Event()
    order: list[int] = []
    worker.submit(lambda: gate.wait(PATIENCE) and None, (), "gate")
    events = [worker.submit(lambda number=number: order.append(number), (), "call") for number in range(100)]
    assert order == []
    assert not any(event.done() for event in events)
    gate.set()
    events[-1].wait()
    assert order == list(range(100))
    assert all(event.done() for event in events)


def test_submission_does_not_wait_for_the_call(worker: Worker) -> None:
    gate = threading.Event()
    event = worker.submit(lambda: gate.wait(PATIENCE) and None, (), "gate")
    assert not event.done()
    gate.set()
    event.wait()
    assert event.done()


def test_a_call_waits_for_the_events_of_another_worker(worker: Worker, other: Worker) -> None:
    gate = threading.Event()
    order: list[str] = []
    other.submit(lambda: gate.wait(PATIENCE) and None, (), "gate")
    first = other.submit(lambda: order.append("first"), (), "first")
    second = worker.submit(lambda: order.append("second"), [first], "second")
    assert not second.done()
    gate.set()
    second.wait()
    assert order == ["first", "second"]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_graph_of_waits_over_several_workers_runs_in_an_order_that_it_allows(data: st.DataObject) -> None:
    workers = [Worker(f"{number}") for number in range(3)]
    order: list[int] = []
    events: list[Event] = []
    waits: list[set[int]] = []
    places: list[int] = []
    for number in range(data.draw(st.integers(1, 25))):
        earlier = st.sets(st.integers(0, number - 1), max_size=3) if number else st.just(set())
        waits.append(data.draw(earlier))
        places.append(data.draw(st.integers(0, 2)))
        events.append(
            workers[places[-1]].submit(
                lambda number=number: order.append(number), [events[one] for one in waits[-1]], f"{number}"
            )
        )
    for event in events:
        event.wait()
    for worker in workers:
        worker.close()
    position = {number: at for at, number in enumerate(order)}
    assert sorted(order) == list(range(len(events)))
    for number, before in enumerate(waits):
        assert all(position[one] < position[number] for one in before)
        assert all(position[one] < position[number] for one in range(number) if places[one] == places[number])


def test_a_worker_survives_every_kind_of_error(worker: Worker) -> None:
    def leave() -> None:
        raise SystemExit(3)

    failed = [worker.submit(fail, (), "a call"), worker.submit(leave, (), "an exit")]
    fine = worker.submit(lambda: None, (), "after them")
    fine.wait()
    for event in failed:
        assert event.done()
        with pytest.raises(BaseException):  # noqa: B017, PT011
            event.wait()


def test_a_foreign_error_is_named_and_chained(worker: Worker) -> None:
    with pytest.raises(HalError) as caught:
        worker.submit(lambda: fail("no paper"), (), "printing").wait()
    assert isinstance(caught.value.__cause__, Native)
    for part in ("printing", "'test'", "Native", "no paper"):
        assert part in str(caught.value)


def test_an_error_of_ours_travels_as_it_is(worker: Worker) -> None:
    error = Unsupported("no such op", op="aten.x")

    def call() -> None:
        raise error

    with pytest.raises(Unsupported) as caught:
        worker.submit(call, (), "a call").wait()
    assert caught.value is error


def test_an_error_can_be_waited_for_again_and_by_several_threads(worker: Worker) -> None:
    event = worker.submit(fail, (), "a call")
    seen: list[BaseException] = []

    def look() -> None:
        try:
            event.wait()
        except HalError as failure:
            seen.append(failure)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    look()
    assert len(seen) == 5
    assert len({id(failure) for failure in seen}) == 1


def test_closing_runs_what_is_queued(worker: Worker) -> None:
    gate = threading.Event()
    ran: list[int] = []
    worker.submit(lambda: gate.wait(PATIENCE) and None, (), "gate")
    for number in range(10):
        worker.submit(lambda number=number: ran.append(number), (), "call")
    closing = threading.Thread(target=worker.close)
    closing.start()
    gate.set()
    closing.join()
    assert ran == list(range(10))


def test_a_closed_worker_takes_nothing_more_and_closes_twice(worker: Worker) -> None:
    worker.submit(lambda: None, (), "call")
    worker.close()
    worker.close()
    with pytest.raises(HalError, match="'test' is closed, so a copy cannot"):
        worker.submit(lambda: None, (), "a copy")


def test_a_worker_that_never_ran_closes() -> None:
    Worker("idle").close()


def test_threads_that_submit_at_once_share_one_queue_that_runs_one_call_at_a_time() -> None:
    for _ in range(20):  # the first submission starts the thread: the race is there
        worker = Worker("shared")
        together = threading.Barrier(4)
        running = threading.Semaphore(1)
        runners: set[int] = set()
        events: list[Event] = []
        overlaps: list[int] = []

        def call(running=running, runners=runners, overlaps=overlaps) -> None:
            if not running.acquire(blocking=False):
                overlaps.append(1)
                return
            runners.add(threading.get_ident())
            running.release()

        def submit(together=together, events=events, worker=worker, call=call) -> None:
            together.wait()
            events.extend(worker.submit(call, (), "call") for _ in range(5))

        threads = [threading.Thread(target=submit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for event in events:
            event.wait()
        worker.close()
        assert len(events) == 20
        assert len(runners) == 1
        assert not overlaps


def test_what_is_submitted_while_closing_runs_or_is_refused_and_never_hangs() -> None:
    for _ in range(20):
        worker = Worker("closing")
        together = threading.Barrier(2)
        events: list[Event] = []

        def submit(together=together, events=events, worker=worker) -> None:
            together.wait()
            try:
                for _ in range(50):
                    events.append(worker.submit(lambda: None, (), "call"))
            except HalError:
                return

        thread = threading.Thread(target=submit)
        thread.start()
        together.wait()
        worker.close()
        thread.join()
        assert all(event.done() for event in events)


def test_the_start_hook_runs_first_on_the_worker_itself() -> None:
    seen: list[int] = []
    worker = Worker("hooked", on_start=lambda: seen.append(threading.get_ident()))
    worker.submit(lambda: seen.append(threading.get_ident()), (), "call").wait()
    worker.close()
    assert len(seen) == 2
    assert seen[0] == seen[1] != threading.get_ident()


def test_a_finished_call_keeps_nothing_alive(worker: Worker) -> None:
    class Large:
        pass

    large = Large()
    gone = weakref.ref(large)
    event = worker.submit(lambda large=large: None, (), "call")
    del large
    event.wait()
    worker.drain()
    gc.collect()
    # The worker lets go after it wakes the waiter; the call behind it shows that it has.
    worker.submit(lambda: None, (), "call").wait()
    assert gone() is None


def test_a_span_starts_after_what_it_waited_for(worker: Worker, other: Worker) -> None:
    first = other.submit(lambda: None, (), "first")
    second = worker.submit(lambda: None, [first], "second")
    second.wait()
    assert first.span()[0] <= first.span()[1] <= second.span()[0] <= second.span()[1]
    assert second.elapsed() == second.span()[1] - second.span()[0]


# -- the host -------------------------------------------------------------------------------------------------

dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8])
allocations = st.lists(
    st.tuples(st.sampled_from(["weights", "moments"]), dtypes, st.integers(0, 999), st.booleans()), max_size=12
)


@settings(deadline=None)
@given(wanted=allocations)
def test_the_ledger_is_byte_exact_by_state_and_dtype(wanted: list[tuple[str, torch.dtype, int, bool]]) -> None:
    host = Host()
    held: list[tuple[str, torch.Tensor]] = []
    for state, dtype, count, give_back in wanted:
        tensor = host.alloc(count, dtype, state)
        assert (tensor.numel(), tensor.dtype, tensor.dim()) == (count, dtype, 1)
        if give_back:
            host.free(tensor, state)
        else:
            held.append((state, tensor))
    expected: dict[tuple[str, torch.dtype], int] = {}
    for state, tensor in held:
        if tensor.nbytes:
            expected[state, tensor.dtype] = expected.get((state, tensor.dtype), 0) + tensor.nbytes
    assert {(state, dtype): size for state, dtype, size in host.ledger.rows()} == expected
    assert host.ledger.total == host.memory().in_use == sum(tensor.nbytes for _, tensor in held)
    host.close()


@given(count=st.integers(1, 5000), dtype=dtypes)
def test_host_memory_is_aligned_to_a_cache_line(count: int, dtype: torch.dtype) -> None:
    assert Host().alloc(count, dtype, "weights").data_ptr() % 64 == 0


def test_the_host_keeps_to_its_capacity_and_says_what_did_not_fit() -> None:
    host = Host(capacity=1000)
    kept = host.alloc(200, torch.float32, "master weights")
    with pytest.raises(OutOfMemory) as caught:
        host.alloc(101, torch.int16, "step counts")
    assert (caught.value.requested, caught.value.in_use, caught.value.capacity) == (202, 800, 1000)
    assert "step counts (int16) on the host" in str(caught.value)
    assert host.memory().in_use == host.ledger.total == 800
    host.free(kept, "master weights")
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


def test_closing_a_host_that_shares_a_devices_cores_finishes_its_tasks_too(device: Device) -> None:
    host = device.host()
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
    device.alloc(64).free()  # the device itself is still open
    device.close()
    host.close()


def test_a_devices_host_has_a_capacity_of_its_own(device: Device) -> None:
    host = device.host(capacity=100)
    with pytest.raises(OutOfMemory):
        host.alloc(101, torch.uint8, "weights")
    host.alloc(100, torch.uint8, "weights")
    assert device.memory().in_use == 0
    assert host.memory().in_use == 100


def test_a_devices_host_runs_tasks_in_order_with_its_kernels(device: Device) -> None:
    host = device.host()
    numbers = torch.zeros(4)
    seen: list[list[float]] = []
    queue = device.queue("compute")
    for value in range(5):
        queue.fill(device.adopt(numbers), float(value))
        last = host.run(lambda: seen.append(numbers.tolist()))
    last.wait()
    assert seen == [[float(value)] * 4 for value in range(5)]
