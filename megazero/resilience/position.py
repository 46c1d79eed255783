"""Where a rank is in its step: written by the thread that trains, read by the watchdog's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from megazero.pipeline.schedules import COMMUNICATION, Action, Kind

_RING = 256
"""Marks on the device that are kept: several steps of most schedules."""

IDLE, READING = "between steps", "reading data"

COMPUTATION = frozenset(Kind) - COMMUNICATION - {Kind.GATHER, Kind.REDUCE}


class Moment(NamedTuple):
    """``since``: by time.monotonic(). ``changes``: how many moments came before. ``limited``: nobody may stay in it."""

    step: int
    what: Action | str
    since: float
    changes: int
    limited: bool


class Position:
    """The moment that the host is at; on a GPU also the one that the device is at, which comes after.

    [Note: the watchdog costs no step]
    A note is one assignment and, on a GPU, one recorded event: the host waits for nothing, here or in the watchdog's
    thread, which asks events whether they are past. The ring's events are recorded anew while that thread may be
    asking them; an answer is then that of the later moment, which is no harm.
    """

    def __init__(self, device: torch.device) -> None:
        self.now = Moment(0, "starting", time.monotonic(), 0, limited=False)
        self._device, self._cuda = device, device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(_RING)] if self._cuda else []
        self._marked: list[Moment | None] = [None] * _RING

    def at(self, what: Action | str, step: int | None = None, limited: bool = True) -> None:
        """The host begins ``what``; in the step it was in, unless that is given."""
        before = self.now
        slot = before.changes % _RING
        self._marked[slot] = before
        if self._cuda:
            self._events[slot].record()
        step = before.step if step is None else step
        self.now = Moment(step, what, time.monotonic(), before.changes + 1, limited)

    def idle(self) -> None:
        """What follows is the caller's, and may last."""
        self.at(IDLE, limited=False)

    def enter_thread(self) -> None:
        """A thread will ask where the device is: on this one, as otherwise it would take memory on the first GPU."""
        if self._cuda:
            torch.cuda.set_device(self._device)

    def device_at(self) -> Moment | None:
        """The oldest of the moments whose work the device has not finished; None where it has done all, or is a CPU."""
        unfinished = None
        if self._cuda:
            for moment in self._back_from(self.now.changes - 1):
                if self._events[moment.changes % _RING].query():
                    break
                unfinished = moment
        return unfinished

    def busy(self) -> float:
        """Seconds that this rank computed and read data in the step it is in, transfers apart, as far as the ring goes
        back. On a GPU the device must have done what came before the moment at hand."""
        total, after = 0.0, self.now
        for moment in self._back_from(self.now.changes - 1):
            if moment.step != self.now.step:
                break
            if moment.what == READING:
                total += after.since - moment.since
            elif isinstance(moment.what, Action) and moment.what.kind in COMPUTATION:
                total += self._seconds(moment, after)
            after = moment
        return total

    def _seconds(self, moment: Moment, after: Moment) -> float:
        if not self._cuda:
            return after.since - moment.since
        start, end = self._events[(moment.changes - 1) % _RING], self._events[moment.changes % _RING]
        # The oldest moment of the ring has nothing before it.
        return 0.0 if moment.changes <= self.now.changes - _RING else start.elapsed_time(end) / 1e3

    def _back_from(self, index: int) -> Iterator[Moment]:
        """The moments in the ring, the newest first."""
        for number in range(index, max(-1, index - _RING), -1):
            moment = self._marked[number % _RING]
            if moment is None or moment.changes != number:
                return
            yield moment


def describe(moment: Moment) -> str:
    """step 7: forward of micro-batch 2"""
    if moment.what == "starting":
        return "starting"
    # A peer is a rank of the pipeline, and not of the job.
    what = str(moment.what).replace("_", " ").replace(" rank ", " pipeline rank ")
    return f"step {moment.step}: {what}"
