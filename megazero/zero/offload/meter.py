"""How long a run waits for its host, and what would help: looked at once, over a few of the first steps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Kind = Literal["wait", "copies", "gradients", "update", "values", "files", "parameters"]
"""``wait``: the main thread's, for updates. ``copies``: its time to issue copies, long only where they are not
asynchronous. The worker's: waiting for ``gradients`` that are on their way, the ``update`` itself, handing on
``values``, waiting for ``files``. Another thread's: reading ``parameters`` from files."""

WARM, STEPS = 3, 5
SHARE = 0.15
LINK = 55e9
"""Bytes/s that pinned memory gives over PCIe 5 in one direction: a link busier than half of that is what waits."""


class Meter:
    """``moved``: bytes over the link, by direction. ``touched``: of host memory that the update passes over, so far.

    ``threads``, ``cores``: of the update, and those that there are for it. ``pinned``: whether copies are asynchronous.
    ``few_bits``: whether the update changes the form of state.
    """

    def __init__(self, moved: Counter[str], threads: int, cores: int, pinned: bool, few_bits: bool = False) -> None:
        self.seconds: Counter[Kind] = Counter()
        self.touched = 0
        self._bytes, self._threads, self._cores = moved, threads, cores
        self._pinned, self._few_bits = pinned, few_bits
        self._steps = 0
        self._begin: tuple[float, Counter, Counter, int] | None = None

    @contextmanager
    def timed(self, kind: Kind) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] += time.perf_counter() - begin

    def step(self, now: Callable[[], float] = time.perf_counter) -> str | None:
        """A step has been issued; after the first few, what the run should be told, if anything."""
        self._steps += 1
        if self._steps == WARM:
            self._begin = now(), self.seconds.copy(), self._bytes.copy(), self.touched
        if self._steps != WARM + STEPS or self._begin is None:
            return None
        begin, seconds, moved, touched = self._begin
        return self._advice(now() - begin, self.seconds - seconds, self._bytes - moved, self.touched - touched)

    def _advice(self, wall: float, seconds: Counter, moved: Counter, touched: int) -> str | None:
        link = max(moved.values(), default=0) / wall
        if seconds["copies"] > SHARE * wall and not self._pinned:
            return (
                f"offload: {seconds['copies'] / wall:.0%} of a step are copies that nothing overlaps, as the host's "
                "memory is not pinned: set pin_memory to true"
            )
        if seconds["wait"] > SHARE * wall:
            return f"offload: {seconds['wait'] / wall:.0%} of a step waits for the host: {self._slow(seconds, touched)}"
        if link > LINK / 2:
            return (
                f"offload: the link between device and host carries {link / 1e9:.0f} GB/s all the time and bounds the "
                "step: raise the micro-batch size, so that parameters and gradients are moved less often per token"
            )
        return None

    def _slow(self, seconds: Counter, touched: int) -> str:
        worker = {kind: seconds[kind] for kind in ("gradients", "update", "values", "files", "parameters")}
        slowest = max(worker, key=lambda kind: worker[kind])
        if slowest == "files":
            return (
                "the disk is slower than the update. Use a faster one, or moments bf16, or a smaller ratio in files, "
                "or more accumulation steps, so that there are fewer updates per token"
            )
        if slowest == "parameters":
            return (
                "parameters are read from the disk slower than they are used. Raise the micro-batch size, so that they "
                "are read less often per token, use a faster disk, or keep them in host memory (offload_param.device "
                "cpu)"
            )
        if slowest in ("gradients", "values"):
            fix = "raise the micro-batch size or the accumulation steps" if self._pinned else "set pin_memory to true"
            return f"copies between device and host are slower than the update; {fix}"
        rate = touched / worker["update"] / 1e9 if worker["update"] else 0.0
        told = f"the CPU's AdamW passes over {rate:.0f} GB/s of memory with {self._threads} threads"
        if 2 * self._threads <= self._cores:
            return f"{told}, and {self._cores} cores are there for it: leave offload_optimizer.threads at 0"
        wide = ", or keep masters and moments in float32 if they fit" if self._few_bits else ""
        return (
            f"{told}. Take more accumulation steps, so that there are fewer updates per token, or keep a part of the "
            f"state on the device (ratio){wide}"
        )
