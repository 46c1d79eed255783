"""Requests to stop after the step under way: a signal (SIGUSR1 is Slurm's warning) or a time limit; and how ranks hear
of each other's."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from types import FrameType
from typing import Any

import torch


class StopRequest:
    """Notes a signal; the ranks then agree on the step. A second SIGINT ends the process at once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Take over SIGTERM, SIGINT and SIGUSR1; only a main thread may."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                self._previous[number] = signal.signal(number, self._on_signal)

    def uninstall(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.reason = f"received {signal.Signals(number).name}"

    def requested(self, started: float, time_limit: float) -> bool:
        """Whether this rank wants to stop. ``started``: by time.monotonic(); ``time_limit``: minutes, 0 for none."""
        if self.reason is None and time_limit and time.monotonic() - started > 60 * time_limit:
            self.reason = f"train.time_limit of {time_limit:g} minutes is over"
        return self.reason is not None


_KEPT = 64
"""Flags of steps that nobody has asked about, in a loop that does not: the oldest of them has long arrived."""


class LateFlags:
    """Numbers that the device sums over all ranks once a step. The host looks at that of the step before the last: its
    value has long arrived, so the device keeps a step to work on."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._flags: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()
        self._raised = False  # by one that was not looked at in time

    def note(self, flag: torch.Tensor) -> None:
        """A step's sum, a scalar."""
        if len(self._flags) == _KEPT:
            self._raised |= self._oldest()
        if not self._cuda:
            self._flags.append((flag, None))
            return
        pinned = torch.empty((), dtype=flag.dtype, pin_memory=True)
        pinned.copy_(flag, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._flags.append((pinned, event))

    def up(self) -> bool:
        """Whether the sum of the step before the last, not looked at yet, is above 0: the same on every rank."""
        if self._raised or len(self._flags) < 2:
            raised, self._raised = self._raised, False
            return raised
        return self._oldest()

    def _oldest(self) -> bool:
        flag, event = self._flags.popleft()
        if event is not None:
            event.synchronize()
        return bool(flag > 0)
