"""Checkpoints read back after they were saved, by threads of rank 0, while training goes on.

[Note: from the disk, and out of the way]
What was just written is still in memory, where it is as it was; so the kernel is told to forget a file before it is
read. Saves fsync, so that it can. After each piece a thread rests for as long as that took, so that half of the disk
and of a core is the others' at least; reading and checksums leave Python's lock to the thread that trains. (A low
priority would not be given back at the end, when the run waits.) A few threads share the files, as a large run's have
terabytes. Where saves come faster than they can be read back only the newest waits for its turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megazero.checkpoint.locate import DAMAGED, is_gone, read_whole, set_aside
from megazero.checkpoint.manifest import Manifest
from megazero.checkpoint.reader import Checkpoint
from megazero.checkpoint.writer import CheckpointWriter
from megazero.cores import own_cores
from megazero.errors import CheckpointError

_PAUSE = 10.0
"""Seconds before what could not be read, or was not right, is read once more: a disk far away may only be unwell."""

_READERS = 8
"""Most threads that read one checkpoint; each takes a core, of which the process may have fewer."""


class Outcome(NamedTuple):
    """``problem``: what is wrong with the checkpoint, and what became of it; "" where it is good."""

    path: Path
    problem: str


class Verifier:
    """Reads back what it is given, marks what is good, and has ``writer`` delete what need not stay any longer."""

    def __init__(self, writer: CheckpointWriter) -> None:
        self._writer = writer
        self._changed = threading.Condition()
        self._waiting: Path | None = None
        self._busy = self._stopped = self._hurries = False
        self._found = False  # what is wrong with the one that is being read
        self._outcomes: list[Outcome] = []
        self._thread: threading.Thread | None = None

    def add(self, path: Path) -> None:
        """Verify this checkpoint, in place of any whose turn has not come."""
        with self._changed:
            self._waiting = path
            self._changed.notify_all()
        if self._thread is None:
            # A daemon: a process that has failed does not wait for it.
            self._thread = threading.Thread(target=self._run, name="verifier", daemon=True)
            self._thread.start()

    def outcomes(self) -> list[Outcome]:
        """Those since the last call."""
        with self._changed:
            found, self._outcomes = self._outcomes, []
        return found

    def close(self, gives_up: Callable[[], bool]) -> None:
        """End the thread when it has verified what it was given, or as soon as ``gives_up`` says so."""
        thread = self._thread
        if thread is None:
            return
        with self._changed:
            self._hurries = True
            self._changed.notify_all()
            # It may have ended before: the system, say, had no further thread to read with.
            while thread.is_alive() and (self._busy or self._waiting) and not gives_up():
                self._changed.wait(0.2)
            self._stopped = True
            self._changed.notify_all()
        thread.join(_PAUSE)  # a disk that hangs holds nobody up

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while self._waiting is None and not self._stopped:
                    self._changed.wait()
                if self._stopped:
                    return
                path, self._waiting, self._busy = self._waiting, None, True
            outcome = self._verify(path)
            with self._changed:
                self._outcomes += [outcome] if outcome is not None else []

    def _verify(self, path: Path) -> Outcome | None:
        """None where it was not to be finished, or the checkpoint is gone."""
        problem = self._problem(path)
        if problem and not is_gone(path) and not self._stopped:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped, _PAUSE)
            problem = self._problem(path)
        if self._stopped or is_gone(path):
            return None
        if not problem:
            with suppress(OSError, CheckpointError):  # what it could not do the next save tries again
                self._writer.is_good(path)
            return Outcome(path, "")
        if set_aside(path):
            return Outcome(path, f"{problem} It is set aside as {path}{DAMAGED}")
        return Outcome(path, f"{problem} There is no other, so it stays where it is")

    def _problem(self, path: Path) -> str:
        self._found = False
        try:
            contents = read_whole(path)
        except CheckpointError as error:
            return f"{error}."
        files = len(contents.files)
        count = min(_READERS, own_cores(), files)
        problems = [f"{path}: could not be read to its end."] * count

        def read(index: int) -> None:
            problems[index] = self._read(path, contents, range(index, files, count))

        # Daemons as well, which those of an executor are not.
        readers = [threading.Thread(target=read, args=(i,), name=f"verifier {i}", daemon=True) for i in range(count)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return next(filter(None, problems), "")

    def _read(self, path: Path, contents: Manifest, ranks: Iterable[int]) -> str:
        """What is wrong with some ranks' files."""
        try:
            with Checkpoint(path, contents, past_cache=True) as checkpoint:
                begin = time.monotonic()
                for _ in checkpoint.verified_pieces(ranks):
                    with self._changed:
                        self._changed.wait_for(lambda: self._hurries, time.monotonic() - begin)
                    if self._stopped or self._found:
                        break
                    begin = time.monotonic()
        except CheckpointError as error:
            self._found = True
            return f"{error}."
        return ""
