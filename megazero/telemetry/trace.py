"""Records when each action of a step ran, for `telemetry.timeline` to draw.

A recorded step waits for the device at its beginning and at its end, so it is a little slower than the others; on a GPU
times are those of the compute stream, where a transfer takes as long as the stream waits for it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from megazero.errors import explained
from megazero.pipeline.executor import Executor
from megazero.pipeline.schedules import Action
from megazero.telemetry.sinks import keep_until
from megazero.telemetry.timeline import FILE


class ActionTrace:
    """Call it with an action, as a context manager around what the action does; ``step`` around a whole step.

    ``path``: a file to which each recorded step adds a line: when it began, in seconds since 1970 by this machine's
    clock, and from then on when each action started and ended. What is there of steps after ``last_step`` is dropped:
    they are run again.
    """

    def __init__(self, path: Path, device: torch.device, last_step: int) -> None:
        self._path, self._device, self.failed = path, device, False
        self._marks: list[tuple[Action, _Mark, _Mark]] = []
        self.go_back(last_step)

    def go_back(self, last_step: int) -> None:
        """Drop what is there of later steps."""
        if self._path.exists():
            keep_until(self._path, last_step)

    @contextmanager
    def __call__(self, action: Action) -> Iterator[None]:
        start = self._mark()
        yield
        self._marks.append((action, start, self._mark()))

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the actions inside as those of ``step``, and write them."""
        self._marks.clear()
        self._synchronize()
        begin, zero = time.time(), self._mark()
        yield
        self._synchronize()
        actions = [
            (action.kind.value, action.micro_batch, action.chunk, _seconds(zero, start), _seconds(zero, end))
            for action, start, end in self._marks
        ]
        self._marks.clear()
        line = json.dumps({"step": step, "begin": begin, "actions": actions}) + "\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(line)
        except OSError as error:  # training is worth more than its times
            self.failed = True
            told = f"log.timeline: {self._path}: cannot be written: {explained(error)}; no further steps are recorded"
            print(told, file=sys.stderr, flush=True)

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


_Mark = float | torch.cuda.Event


def _seconds(start: _Mark, end: _Mark) -> float:
    """Between two marks of one kind, both of which are past."""
    if isinstance(start, torch.cuda.Event):
        return start.elapsed_time(end) / 1e3
    return end - start


class StepRecorder:
    """Has an executor's steps recorded where that is wanted, on one rank for each place along the pipeline.

    ``directory``: log.timeline; None records nothing. ``coordinates``: this rank's along each axis.
    """

    def __init__(
        self,
        executor: Executor,
        directory: str | None,
        coordinates: Mapping[str, int],
        device: torch.device,
        last_step: int,
    ) -> None:
        self._executor = executor
        self._trace: ActionTrace | None = None
        if directory is not None and coordinates["tp"] == coordinates["dp"] == 0:
            self._trace = ActionTrace(Path(directory) / FILE.format(coordinates["pp"]), device, last_step)

    def go_back(self, last_step: int) -> None:
        """The run goes on after an earlier step."""
        if self._trace is not None:
            self._trace.go_back(last_step)

    @contextmanager
    def step(self, step: int, wanted: bool) -> Iterator[None]:
        """Around a step; it is recorded where it is ``wanted``."""
        if self._trace is None or self._trace.failed or not wanted:
            yield
            return
        self._executor.trace = self._trace
        try:
            with self._trace.step(step):
                yield
        finally:
            self._executor.trace = None
