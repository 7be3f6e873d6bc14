"""Threads that start together, for tests of what may be called from several at once."""

from __future__ import annotations

import threading
from collections.abc import Callable


def at_once(count: int, task: Callable[[int], None]) -> None:
    """Run `task`, given its number, in that many threads; the first error of any is raised here."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def guarded(number: int) -> None:
        try:
            start.wait()
            task(number)
        except BaseException as failure:
            errors.append(failure)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
