"""Saves that a thread writes while training goes on.

[Note: one save in flight]
A save copies the state to host memory when it is asked for and returns; the next one waits for it first, so the buffers
of the copies are used again and a checkpoint never mixes two steps. Every rank starts the same saves in the same order,
and the phases of a save end on all ranks alike, so a save that fails does so on every rank, if not at the same moment:
whoever wants to stop for it must agree on when.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path

import torch

from megazero.checkpoint.writer import AnyChunk, ChunkData, split
from megazero.errors import CheckpointError
from megazero.host_memory import HostMemory, check_host_memory, wait_for_all

_AT_A_TIME = 64 * 2**20
"""Bytes of copies that are issued before the ones before them are waited for."""

Write = Callable[[Iterable[AnyChunk], Mapping[str, torch.Tensor]], Path]


class _Outcome:
    """What became of a save, kept apart from its buffers for the process's end."""

    error: CheckpointError | None = None
    path: Path | None = None


class BackgroundSaver:
    """At most one save under way; the host memory for its copies stays for the next one.

    ``device``: where the state is.
    """

    def __init__(self, device: torch.device) -> None:
        self._staging = _Staging(device)
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._outcome = _Outcome()
        self._joining = self._issuing = 0.0
        atexit.register(_end_with_error, self._outcome)

    def reserve(self, numel: int) -> None:
        """Take host memory for copies of so many elements, which a first save would else do. Called on every rank.
        Raises ConfigError where a machine has not as much."""
        wait_for_all()  # until the others have what they take before
        self._staging.check(numel)
        wait_for_all()
        self._staging.take(numel)

    def save(
        self, write: Write, chunks: Iterable[AnyChunk], rank_state: Mapping[str, torch.Tensor], where: Path
    ) -> None:
        """Copies the state and lets a thread ``write`` it; ``where`` is for the error. Waits for the save before, and
        raises its error."""
        self.wait()
        begin = time.perf_counter() - self._joining
        state = {key: tensor.detach().to("cpu", copy=True) for key, tensor in rank_state.items()}
        failed = None
        try:
            self._staging.begin(chunks)
        except Exception as error:
            failed = error
        self._ended.clear()
        # Not a daemon: a process that ends waits for it.
        self._thread = threading.Thread(target=self._run, args=(write, failed, state, where), name="checkpoint")
        self._thread.start()
        self._issuing, self._joining = time.perf_counter() - begin, 0.0

    def pause(self) -> float:
        """Seconds that training has waited for the last save: for the one before it to end, for its copies to be
        issued, and to be made."""
        return self._issuing + self._staging.waited()

    def _run(self, write: Write, failed: Exception | None, state: Mapping[str, torch.Tensor], where: Path) -> None:
        try:
            # The other ranks are to hear of an error, in the first phase of the save.
            chunks = self._copies() if failed is None else _raising(failed)
            self._outcome.path = write(chunks, state)
        except Exception as error:
            self._outcome.error = CheckpointError(f"{where}: the save in the background failed: {error}")
        finally:
            self._ended.set()

    @torch.no_grad()
    def _copies(self) -> Iterator[AnyChunk]:
        try:
            return iter(self._staging.copies())
        except Exception as error:
            return _raising(error)

    def release(self) -> None:
        """Call before the state changes: what follows on the current stream comes after the copies."""
        self._staging.release()

    @property
    def pending(self) -> bool:
        """Whether a save was started that ``wait`` has not been called for since: the same on every rank."""
        return self._thread is not None

    @property
    def failed(self) -> bool:
        """Whether the save under way is known, on this rank, to have failed."""
        return self._outcome.error is not None

    def finished(self) -> Path | None:
        """The checkpoint that has become whole since the last call, if any."""
        path, self._outcome.path = self._outcome.path, None
        return path

    def wait(self) -> None:
        """Returns when no save is under way; raises the CheckpointError of one that failed, once, on every rank."""
        if self._thread is None:
            return
        begin = time.perf_counter()
        # Not join: where a signal's exception interrupts that, Python before 3.13 takes the thread for ended.
        self._ended.wait()
        self._joining = time.perf_counter() - begin
        self._thread = None
        error, self._outcome.error = self._outcome.error, None
        if error is not None:
            raise error


def _raising(error: Exception) -> Iterator[AnyChunk]:
    raise error
    yield  # a generator, so that it raises where it is read


def _end_with_error(outcome: _Outcome) -> None:
    """At the process's end, when the thread is done: an error that nobody has asked for is not lost."""
    if outcome.error is None:
        return
    sys.stdout.flush()
    print(f"error: {outcome.error}", file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(2)  # the exit status cannot be changed in any other way by now


class _Staging:
    """Copies of tensors in host memory: pinned, and made on a stream of their own, where the tensors are on a GPU.

    [Note: copies by a thread]
    A GPU may take copies of all streams and directions in the order in which they were issued, and once a queue of it
    is full the host waits. Were all copies of a save issued at once, the next micro-batch's tokens would arrive after
    them. So a thread issues them, a little at a time, and ``release`` waits until it has.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._memory = device, HostMemory(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._chunks: list[AnyChunk] = []  # until they are copied: whoever replaces the state lets go of its memory
        self._copies: list[ChunkData] | None = None
        self._begin = self._done = None  # events: the state is there, the copies are
        self._issued = threading.Event()
        self._issued.set()
        self._wait: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # of the compute stream: begin and end
        self._room = torch.empty(0)

    def check(self, numel: int) -> None:
        """Raises ConfigError where so many elements more than there are do not fit into host memory."""
        fix = "leave checkpoint.async_save out, or take fewer processes to a machine"
        check_host_memory("checkpoint.async_save", 4 * max(0, numel - self._room.numel()), fix)

    def take(self, numel: int) -> None:
        """Room for as many float32 elements."""
        if numel > self._room.numel():
            self._room = torch.empty(0)  # what was there is let go of first
            self._room = self._memory.empty(numel, torch.float32, pin=True)

    def begin(self, chunks: Iterable[AnyChunk]) -> None:
        """Copy these, or on a GPU let ``copies`` do it in another thread."""
        self._chunks, self._copies, self._wait = list(chunks), None, None
        if self._stream is None:
            self._copies = [_copied(part, place) for part, place in self._places()]
            self._chunks = []
        else:
            self._issued.clear()
            self._begin = torch.cuda.Event()
            self._begin.record(torch.cuda.current_stream(self._device))

    def copies(self) -> list[ChunkData]:
        """The same chunks with copies of their tensors, when they are there."""
        if self._copies is not None:
            return self._copies
        try:
            copies = self._copy_by_and_by()
        finally:
            self._issued.set()
        assert self._done is not None
        self._done.synchronize()
        self._chunks = []
        return copies

    def _copy_by_and_by(self) -> list[ChunkData]:
        torch.cuda.set_device(self._device)
        copies, issued, marks = [], 0, deque[torch.cuda.Event]()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._begin)
            for part, place in self._places():
                copies.append(_copied(part, place))
                issued += place.nbytes
                if issued >= _AT_A_TIME:
                    marks.append(torch.cuda.Event(blocking=True))
                    marks[-1].record()
                    issued = 0
                if len(marks) > 1:
                    marks.popleft().synchronize()
            self._done = torch.cuda.Event(blocking=True)
            self._done.record()
        return copies

    def _places(self) -> Iterator[tuple[ChunkData, torch.Tensor]]:
        """What is to be copied, and where to."""
        parts = [part for chunk in self._chunks for part in split(ChunkData(*chunk))]
        ends = list(accumulate(part.box.numel for part in parts))
        if ends and ends[-1] > self._room.numel():
            self.check(ends[-1])
            self.take(ends[-1])
        return ((part, self._room[end - part.box.numel : end]) for part, end in zip(parts, ends, strict=True))

    def release(self) -> None:
        """Order what follows on the current stream after the copies."""
        if self._stream is None or self._begin is None or self._wait is not None:
            return
        stream = torch.cuda.current_stream(self._device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        self._issued.wait()
        if self._done is not None:
            stream.wait_event(self._done)
        end.record(stream)
        self._wait = begin, end

    def waited(self) -> float:
        """Seconds that what was issued after ``release`` has waited."""
        if self._wait is None:
            return 0.0
        begin, end = self._wait
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def _copied(part: ChunkData, place: torch.Tensor) -> ChunkData:
    tensor = part.tensor if isinstance(part.tensor, torch.Tensor) else part.tensor()
    copy = place.view(part.box.shape)
    copy.copy_(tensor.view(part.box.shape), non_blocking=True)
    return part._replace(tensor=copy)
