"""Tokens per second, FLOP/s, MFU and the time left, from the host's clock between logging steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Speed over one window of steps. ``tflops_per_gpu`` are model TFLOP/s; ``mfu`` is a fraction of the peak."""

    tokens_per_second: float
    tflops_per_gpu: float
    mfu: float | None
    elapsed_s: float


class Throughput:
    """Times windows of training steps.

    ``flops_per_token``: model FLOPs; ``peak_flops``: of one GPU, FLOP/s, or None; ``clock``: seconds.
    A window ends when the loss has been read from the device, which waits for all work of its steps, so
    the host's clock is right there without a synchronisation of its own.
    """

    def __init__(
        self,
        flops_per_token: float,
        world_size: int,
        peak_flops: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._flops_per_token, self._world_size, self._peak = flops_per_token, world_size, peak_flops
        self._clock = clock
        self._begin = self._window_begin = clock()
        self._paused_s = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside counts in no window: evaluation, saving. Enter it with the device idle."""
        begin = self._clock()
        try:
            yield
        finally:
            self._paused_s += self._clock() - begin

    def restart(self) -> None:
        """Begin a window; what was going on since the last one is in none."""
        self._window_begin, self._paused_s = self._clock(), 0.0

    def window(self, tokens: int) -> Rates:
        """Close the window that ends here; ``tokens`` of all its global batches together."""
        now = self._clock()
        seconds = max(now - self._window_begin - self._paused_s, 1e-9)
        self._window_begin, self._paused_s = now, 0.0
        flops = tokens * self._flops_per_token / seconds / self._world_size
        return Rates(
            tokens_per_second=tokens / seconds,
            tflops_per_gpu=flops / 1e12,
            mfu=flops / self._peak if self._peak else None,
            elapsed_s=now - self._begin,
        )
