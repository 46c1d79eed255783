"""Ranks as threads of one process, for saves by many ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class ThreadGroup:
    """One rank of ``size`` threads that meet at a shared table."""

    def __init__(self, rank: int, size: int, table: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._table, self._barrier = rank, size, table, barrier

    def all_gather(self, value: Any) -> list[Any]:
        self._table[self.rank] = value
        self._barrier.wait(timeout=60)
        values = list(self._table)
        self._barrier.wait(timeout=60)
        return values

    def gather(self, value: Any) -> list[Any] | None:
        values = self.all_gather(value)
        return values if self.rank == 0 else None


def run_ranks(size: int, work: Callable[[ThreadGroup], Any]) -> list[Any]:
    """What ``work(group)`` returns or raises, by rank."""
    table, barrier = [None] * size, threading.Barrier(size)

    def one(rank: int) -> Any:
        try:
            return work(ThreadGroup(rank, size, table, barrier))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
