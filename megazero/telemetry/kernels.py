"""Where a GPU's time goes, from the kernels that a profiler saw: computing, communicating, doing nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

Interval = tuple[int, int]
"""[start, end) in nanoseconds."""


class Kernel(NamedTuple):
    """``start``, ``end``: nanoseconds, on one clock for the kernels of a device."""

    name: str
    start: int
    end: int


class DeviceTime(NamedTuple):
    """Of one rank's device, milliseconds a step. ``exposed``: communication while nothing computes.

    ``idle``: no kernel at all, between the first and the last. ``kernels``: those that took most, with their share.
    """

    span: float
    compute: float
    communication: float
    exposed: float
    idle: float
    kernels: list[tuple[str, float]]

    @property
    def overlap(self) -> float:
        """The share of communication behind which something computed; 1 where there is none."""
        return 1 - self.exposed / self.communication if self.communication else 1.0


def is_communication(name: str) -> bool:
    return "nccl" in name.lower()


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint, ascending intervals that cover the same points."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def device_time(kernels: Sequence[Kernel], steps: int, most: int = 12) -> DeviceTime:
    """What ``steps`` steps' kernels of one device add up to."""
    if not kernels:
        return DeviceTime(0.0, 0.0, 0.0, 0.0, 0.0, [])
    compute = union((k.start, k.end) for k in kernels if not is_communication(k.name))
    communication = union((k.start, k.end) for k in kernels if is_communication(k.name))
    either = length(union((*compute, *communication)))
    span = max(k.end for k in kernels) - min(k.start for k in kernels)
    spent: Counter[str] = Counter()
    for kernel in kernels:
        spent[kernel.name] += kernel.end - kernel.start

    def per_step(nanoseconds: float) -> float:
        return nanoseconds / 1e6 / steps

    return DeviceTime(
        span=per_step(span),
        compute=per_step(length(compute)),
        communication=per_step(length(communication)),
        exposed=per_step(either - length(compute)),
        idle=per_step(span - either),
        kernels=[(name, per_step(time)) for name, time in spent.most_common(most)],
    )


def profile_steps(step: Callable[[], object], steps: int) -> DeviceTime:
    """Run ``step`` so many times under torch's profiler. Needs a CUDA device."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    cuda = torch.autograd.DeviceType.CUDA
    kernels = [
        Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == cuda and not event.name().startswith(("Context Sync", "Memcpy DtoH"))
    ]
    return device_time(kernels, steps)
