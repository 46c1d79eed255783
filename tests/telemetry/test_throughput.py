"""Rates from a clock that the test turns."""

from __future__ import annotations

import pytest

from megazero.telemetry.throughput import Throughput


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_windows_are_separate_and_pauses_are_left_out():
    clock = Clock()
    throughput = Throughput(flops_per_token=1e9, world_size=4, peak_flops=1e13, clock=clock)
    clock.now += 2.0
    first = throughput.window(tokens=4000)
    assert (first.tokens_per_second, first.elapsed_s) == (2000.0, 2.0)
    assert first.tflops_per_gpu == pytest.approx(2000 * 1e9 / 4 / 1e12)
    assert first.mfu == pytest.approx(2000 * 1e9 / 4 / 1e13)

    clock.now += 1.0
    with throughput.paused():
        clock.now += 50.0
    second = throughput.window(tokens=3000)
    assert (second.tokens_per_second, second.elapsed_s) == (3000.0, 53.0)

    clock.now += 1.5
    assert throughput.window(tokens=3000).tokens_per_second == 2000.0


def test_unknown_peak_gives_no_mfu():
    clock = Clock()
    throughput = Throughput(1e9, 1, None, clock=clock)
    clock.now += 1
    assert throughput.window(10).mfu is None
