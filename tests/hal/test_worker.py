"""Workers run calls in the order of submission, and outlive their errors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.errors import HalError, Unsupported
from hal.event import Event
from hal.worker import Worker
from tests.support.failing_calls import Native, fail

PATIENCE = 60  # seconds until a test that hangs is a failure


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
    chosen: list[int] = []
    for number in range(data.draw(st.integers(1, 25))):
        earlier = st.sets(st.integers(0, number - 1), max_size=3) if number else st.just(set())
        waits.append(data.draw(earlier))
        chosen.append(data.draw(st.integers(0, 2)))
        events.append(
            workers[chosen[-1]].submit(
                lambda number=number: order.append(number), [events[other] for other in waits[-1]], f"{number}"
            )
        )
    for event in events:
        event.wait()
    for worker in workers:
        worker.close()
    position = {number: at for at, number in enumerate(order)}
    assert sorted(order) == list(range(len(events)))
    for number, before in enumerate(waits):
        assert all(position[other] < position[number] for other in before)
        assert all(position[other] < position[number] for other in range(number) if chosen[other] == chosen[number])


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
