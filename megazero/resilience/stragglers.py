"""Ranks that are slower than the others of their pipeline stage, which have the same work."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from megazero.topology import Topology

_STEPS = 3
"""A rank is named that was slow in each of as many logged steps: one may be chance."""
_EXCESS = 0.01
"""Seconds by which it must be slower, whatever the factor."""


class Slow(NamedTuple):
    """A rank, its seconds per step and those of the median of its stage, each the least excess of the last steps."""

    rank: int
    seconds: float
    median: float


class Stragglers:
    """Gathers each rank's own time at logging steps, where the host has waited for the device in any case.

    Where ranks wait for each other inside a computation (tensor parallelism, ZeRO-3's gathers) they look alike: the
    group of a slow rank is slow, and of equal ones nobody is named.
    """

    def __init__(self, topology: Topology, factor: float) -> None:
        self._topology, self._factor = topology, factor
        self._history: deque[list[float]] = deque(maxlen=_STEPS)
        self._named: list[int] = []

    def gather(self, seconds: float) -> list[Slow]:
        """The ranks that are slow now, where these are others than last time; every rank calls it at the same step."""
        layout, device = self._topology.layout, self._topology.device
        times = torch.zeros(layout.world_size, dtype=torch.float64, device=device)
        times[self._topology.rank] = seconds
        dist.all_reduce(times)
        self._history.append(times.tolist())
        stages = {rank: layout.coordinates(rank)["pp"] for rank in range(layout.world_size)}
        slow = slow_ranks(self._history, stages, self._factor) if len(self._history) == _STEPS else []
        before, self._named = self._named, [found.rank for found in slow]
        return slow if self._named != before else []


def slow_ranks(history: Sequence[Sequence[float]], stages: Mapping[int, int], factor: float) -> list[Slow]:
    """Ranks above ``factor`` times the median of their stage in every step of ``history``, the slowest first.

    The lower of two medians, so that of two ranks the slower one can be named.
    """
    found: dict[int, list[Slow]] = {}
    for times in history:
        for stage in set(stages.values()):
            members = [rank for rank in stages if stages[rank] == stage]
            ordered = sorted(times[rank] for rank in members)
            median = ordered[(len(ordered) - 1) // 2]
            for rank in members:
                if times[rank] > max(factor * median, median + _EXCESS):
                    found.setdefault(rank, []).append(Slow(rank, times[rank], median))
    always = [
        min(steps, key=lambda slow: slow.seconds - slow.median)
        for steps in found.values()
        if len(steps) == len(history)
    ]
    return sorted(always, key=lambda slow: slow.median - slow.seconds)
