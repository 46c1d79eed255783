"""One rank's file of offloaded state: claimed for as long as the process lives, read and written past the page cache.

[Note: who owns a directory] Each process has a directory of its own under the path that the user gives, with a file
``lock`` that it holds locked (flock) to its end, however that comes. Whoever starts removes the directories whose lock
nobody holds: they are of processes that were killed. Claiming and removing happen under one lock on the path, so that
no directory is seen before it is locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch

from megazero.errors import OffloadError

PAGE = 4096
"""Bytes; offsets, lengths and addresses of direct reads and writes are multiples of it."""

_PREFIX = "megazero-offload-"


class StateFile:
    """``direct``: whether the page cache is bypassed by the file system; else it is told to drop what was used."""

    def __init__(
        self,
        directory: str,
        needed: int,
        field: str = "offload_optimizer.nvme_path",
        beside: StateFile | None = None,
    ) -> None:
        """``needed``: bytes that the file will have; ``field``: the setting that ``directory`` is of; ``beside``:
        another one, which may be on the same disk and is yet to be filled. Raises OffloadError where they cannot be
        had."""
        self._field, self._needed = field, needed
        root = Path(os.path.expanduser(directory))
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _locked(root):
                _remove_dead(root)
                self.directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
                lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OffloadError(
                f"{field}: {directory} cannot be used: {error.strerror}; give a directory on a local disk that this "
                "user can write to"
            ) from None
        self.path = self.directory / "state"
        self._descriptor, self.direct = _open(self.path, field)
        self.close = weakref.finalize(self, _close, self._descriptor, lock, self.directory)
        self.size = 0
        try:
            if beside is not None and os.stat(beside.directory).st_dev == os.stat(self.directory).st_dev:
                needed += beside._needed - beside.size
            self._check_space(needed, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        except OffloadError:
            self.close()
            raise

    def _check_space(self, needed: int, ranks: int) -> None:
        room = os.statvfs(self.directory)
        free = room.f_bavail * room.f_frsize
        if needed * ranks > free:
            of_state = self._field.startswith("offload_optimizer")
            fix = "keep more on the device (ratio)" if of_state else "keep them in host memory (device cpu)"
            raise OffloadError(
                f"{self._field}: {needed * ranks / 1e9:.1f} GB are needed in {self.directory.parent} ({ranks} x "
                f"{needed / 1e9:.1f} GB), and {free / 1e9:.1f} GB are free; make room, give another disk, or {fix}"
            )

    def claim(self, size: int) -> int:
        """The offset of ``size`` further bytes, zeros, which the file system has set apart."""
        start, self.size = self.size, self.size + size
        if size:
            try:
                os.posix_fallocate(self._descriptor, start, size)
            except OSError as error:
                self.close()
                raise self._error("made larger", error) from None
        return start

    def read(self, pages: torch.Tensor, offset: int) -> None:
        """Fill a uint8 tensor of whole pages."""
        view, done = memoryview(pages.numpy()), 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise self._error("read", error) from None
            if not count or (count % PAGE and done + count < len(view)):
                raise OffloadError(
                    f"{self.path}: is shorter than it was written, at byte {offset + done}: something else has changed "
                    "it. Nothing of this step is saved; start again from the last checkpoint"
                )
            done += count
        self._drop(offset, len(view))

    def write(self, pages: torch.Tensor, offset: int) -> None:
        """As ``read``, the other way."""
        view, done = memoryview(pages.numpy()), 0
        while done < len(view):
            try:
                done += os.pwritev(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise self._error("written", error) from None
        self._drop(offset, len(view))

    def _drop(self, offset: int, size: int) -> None:
        if not self.direct:
            os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_DONTNEED)

    def _error(self, what: str, error: OSError) -> OffloadError:
        fix = "check the disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "make room on the disk, or give another one"
        return OffloadError(
            f"{self.path}: could not be {what}: {error.strerror}; {fix}, and start again from the last checkpoint"
        )


def _open(path: Path, field: str) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise OffloadError(f"{field}: {path} cannot be made: {error.strerror}") from None
    path.unlink(missing_ok=True)  # some file systems make the file before they refuse
    return os.open(path, flags, 0o600), False


def _close(descriptor: int, lock: int, directory: Path) -> None:
    os.close(descriptor)
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    descriptor = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_dead(root: Path) -> None:
    for directory in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or locked by who lives
            lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory)
            finally:
                os.close(lock)
