"""Work ahead of its use: order, bounds, errors, and no thread left behind."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest

from megazero.convert.ahead import Job, ahead


@pytest.mark.parametrize("workers", [1, 3])
def test_results_are_in_order_and_never_more_than_the_limit(workers):
    lock, alive, most = threading.Lock(), 0, 0
    sizes = [random.Random(1).choice([1, 5, 9]) for _ in range(60)] + [50, 1, 50, 50, 2]

    def job(number: int, size: int) -> Job[tuple[int, int]]:
        def make() -> tuple[int, int]:
            nonlocal alive, most
            with lock:
                alive += size
                most = max(most, alive)
                assert alive <= 20 or alive == size
            time.sleep(0.0005 * (number % 3))
            return number, size

        return Job(size, make)

    numbers = []
    for number, size in ahead((job(i, size) for i, size in enumerate(sizes)), workers, 20):
        numbers.append(number)
        with lock:
            alive -= size
    assert numbers == list(range(len(sizes)))
    assert most == 50


def test_an_error_comes_in_its_turn_and_ends_the_threads():
    def fail() -> int:
        raise ValueError("the third")

    jobs = [Job(1, lambda: 1), Job(1, lambda: 2), Job(1, fail), Job(1, lambda: 4)]
    before, results = threading.active_count(), []
    with pytest.raises(ValueError, match="the third"):
        for result in ahead(jobs, 2, 100):
            results.append(result)
    assert results == [1, 2] and threading.active_count() == before


def test_one_left_early_makes_no_more():
    made = []
    jobs = (Job(1, lambda number=number: made.append(number)) for number in range(1000))
    before = threading.active_count()
    with contextlib.closing(ahead(jobs, 1, 10)) as results:
        next(results)
    assert len(made) < 12 and threading.active_count() == before
