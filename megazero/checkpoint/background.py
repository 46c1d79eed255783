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
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from megazero.checkpoint.writer import AnyChunk, ChunkData, split
from megazero.errors import CheckpointError

# float32 elements. Torch rounds pinned memory up to a power of two of bytes, so it is taken in pieces of one.
_SLAB = 64 * 2**20

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
        self._outcome = _Outcome()
        atexit.register(_end_with_error, self._outcome)

    def save(
        self, write: Write, chunks: Iterable[AnyChunk], rank_state: Mapping[str, torch.Tensor], where: Path
    ) -> None:
        """Copies the state and lets a thread ``write`` it; ``where`` is for the error. Waits for the save before, and
        raises its error."""
        self.wait()
        state = {key: tensor.detach().to("cpu", copy=True) for key, tensor in rank_state.items()}
        try:
            staged = iter(self._staging.copy(chunks))
        except Exception as error:  # the other ranks are to hear of it, in the first phase of the save
            staged = _raising(error)
        # Not a daemon: a process that ends waits for it.
        self._thread = threading.Thread(target=self._run, args=(write, staged, state, where), name="checkpoint")
        self._thread.start()

    def _run(self, write: Write, chunks: Iterator[AnyChunk], state: Mapping[str, torch.Tensor], where: Path) -> None:
        try:
            self._staging.synchronize()
            self._outcome.path = write(chunks, state)
        except Exception as error:
            self._outcome.error = CheckpointError(f"{where}: the save in the background failed: {error}")

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
        self._thread.join()
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
    """Copies of tensors in host memory: pinned, and made on a stream of their own, where the tensors are on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._done: torch.cuda.Event | None = None
        self._slabs: list[torch.Tensor] = []
        self._slab = self._used = 0

    def copy(self, chunks: Iterable[AnyChunk]) -> list[ChunkData]:
        """The same chunks with copies of their tensors; on a GPU these are there after ``synchronize``."""
        self._slab = self._used = 0
        parts = [part for chunk in chunks for part in split(ChunkData(*chunk))]
        left = sum(part.box.numel for part in parts)
        if self._stream is None:
            return [self._copied(part, left) for part in parts]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = [self._copied(part, left) for part in parts]
            self._done = torch.cuda.Event()
            self._done.record()
        return copies

    def _copied(self, part: ChunkData, total: int) -> ChunkData:
        tensor = part.tensor if isinstance(part.tensor, torch.Tensor) else part.tensor()
        copy = self._room(part.box.numel, total).view(part.box.shape)
        copy.copy_(tensor.view(part.box.shape), non_blocking=True)
        return part._replace(tensor=copy)

    def _room(self, numel: int, total: int) -> torch.Tensor:
        """So many float32 elements of host memory that no other chunk has; ``total``: of all chunks."""
        while self._slab < len(self._slabs) and self._used + numel > self._slabs[self._slab].numel():
            self._slab, self._used = self._slab + 1, 0
        if self._slab == len(self._slabs):
            size = max(numel, min(total, _SLAB))
            self._slabs.append(torch.empty(size, dtype=torch.float32, pin_memory=self._stream is not None))
        self._used += numel
        return self._slabs[self._slab][self._used - numel : self._used]

    def release(self) -> None:
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def synchronize(self) -> None:
        if self._done is not None:
            self._done.synchronize()
