"""Work done ahead of who uses it: reading and converting go on while what was made before is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """Something to make, and how many bytes it takes in memory."""

    def __init__(self, size: int, make: Callable[[], T]) -> None:
        self.size, self.make = size, make


def ahead(jobs: Iterable[Job[T]], workers: int, limit: int) -> Iterator[T]:
    """The jobs' results, in order, made by ``workers`` threads.

    At most ``limit`` bytes of results exist at a time, counting the one handed out last until the next is asked for,
    and those being made; a larger one is alone. An exception of a job is raised in its turn. Close the iterator where
    it is left early (contextlib.closing), so that no thread goes on.
    """
    waiting: deque[tuple[int, Future[T]]] = deque()
    upcoming = iter(jobs)
    following = next(upcoming, None)
    used = held = 0
    pool = ThreadPoolExecutor(workers)
    try:
        while following is not None or waiting:
            while following is not None and (used == 0 or used + following.size <= limit):
                waiting.append((following.size, pool.submit(following.make)))
                used += following.size
                following = next(upcoming, None)
            held, future = waiting.popleft()
            yield future.result()
            del future
            used -= held
    finally:
        pool.shutdown(cancel_futures=True)
