"""A directory that appears whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from megazero.checkpoint import files
from megazero.errors import ConvertError, explained

_SUFFIX = ".converting"


def refuse_non_empty(path: str | os.PathLike[str]) -> None:
    """ConvertError unless there is nothing at the path, or an empty directory that can be replaced."""
    path = Path(path)
    try:
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise ConvertError(f"{path}: cannot be written: {explained(error)}") from error
    if taken:
        raise ConvertError(f"{path}: is there already and not empty; remove it or choose another")
    place = Path(os.path.realpath(path))
    if place.is_mount():
        raise ConvertError(f"{path}: is where a disk is mounted; choose a directory inside it")
    if place == Path(os.path.realpath(".")):
        raise ConvertError(f"{path}: is the directory you are in, which the result would replace; choose one inside it")


@contextlib.contextmanager
def new_directory(target: str | os.PathLike[str]) -> Iterator[Path]:
    """A scratch directory beside ``target``, which takes its name when the block ends well and is removed when not.

    What a conversion into the same target that was killed has left is removed first. Raises ConvertError where another
    one is under way, the target holds anything, or it cannot be written.
    """
    refuse_non_empty(target)
    place = Path(os.path.realpath(target))
    scratch = place.with_name(f".{place.name}{_SUFFIX}")
    with contextlib.ExitStack() as stack:
        try:
            files.make_directory(place.parent)
            stack.enter_context(_claimed(scratch))
            yield scratch
            files.sync_directory(scratch)
            os.rename(scratch, place)
            files.sync_directory(place.parent)
        except OSError as error:
            raise ConvertError(f"{target}: cannot be written: {explained(error)}") from error


@contextlib.contextmanager
def _claimed(scratch: Path) -> Iterator[None]:
    """The scratch directory, empty, locked by this process while inside; what is left of it at the end is removed.

    The lock is on the directory itself and goes with the process, however that ends; it needs no file that could stay.
    """
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(scratch)
        descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _lock(descriptor, scratch)
            if not _is_at(descriptor, scratch):
                continue  # renamed or removed by its owner between the two calls
            try:
                _empty(scratch)
                yield
            finally:
                if _is_at(descriptor, scratch):
                    shutil.rmtree(scratch, ignore_errors=True)
            return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, scratch: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConvertError(f"{scratch}: another conversion into the same place is under way") from None
    except OSError:  # a file system without locks: one under way and the rest of a dead one look the same
        if os.listdir(descriptor):
            raise ConvertError(f"{scratch}: is there already; remove it if no conversion is under way") from None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _empty(directory: Path) -> None:
    for entry in os.scandir(directory):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
