"""Whether the run's directories are what it takes them for: one place that all machines share, with room in it, and
data that are the same everywhere. Functions may raise OSError, unless they say what is wrong."""

from __future__ import annotations

import os
import socket
import tempfile
import time
import uuid
import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from megazero.checkpoint.locate import step_directories
from megazero.config import Config
from megazero.models.parameters import parameter_count
from megazero.places import file_system
from megazero.topology import Topology

_PATIENCE = 10.0
"""Seconds after which what one machine has written must be seen on another: NFS may take some."""
_LOOKED_AT = 64 * 2**10
"""Bytes at each end of a data file."""
_STATE_BYTES = 12
"""Of a parameter in a checkpoint: weight and two moments, each in float32."""


class Probe(NamedTuple):
    """A file that rank 0 has written, on ``host``; ``path`` is "" where it could not. ``times``: of the directory's
    last access and change before that, in ns."""

    path: str
    host: str
    content: str
    times: tuple[int, int]


def nearest(path: str | Path) -> Path:
    """The path, or the nearest directory above it that is there."""
    whole = Path(os.path.abspath(path))
    return next(place for place in (whole, *whole.parents) if place.exists())


def write_probe(directory: str, topology: Topology) -> Probe:
    """Rank 0 leaves a file where ``directory`` is, or will be; every rank is told of it."""
    told = [Probe("", "", "", (0, 0))]
    if topology.rank == 0:
        content = uuid.uuid4().hex
        with suppress(OSError):  # writable_problem says why
            place = nearest(directory)
            before, path = place.stat(), place / f".megazero-probe-{uuid.uuid4().hex}"
            path.write_text(content)
            told = [Probe(str(path), socket.gethostname(), content, (before.st_atime_ns, before.st_mtime_ns))]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def local_problem(directory: str, probe: Probe) -> str:
    """What is wrong where rank 0's file is not seen here: a directory of this machine alone; "" where it is seen."""
    if not probe.path:
        return ""
    deadline = time.monotonic() + _PATIENCE
    while True:
        with suppress(OSError):
            # Here too where checkpoint.dir is: a relative path may start from elsewhere.
            if (nearest(directory) / Path(probe.path).name).read_text() == probe.content:
                return ""
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    kind, mount = file_system(nearest(directory))
    return (
        f"checkpoint.dir = {directory}: what rank 0 on {probe.host} writes to {Path(probe.path).parent} is not seen "
        f"here ({kind} mounted at {mount}): give a directory that all machines share"
    )


def remove_probe(probe: Probe, topology: Topology) -> None:
    """When every rank has looked: leave no trace."""
    if topology.rank == 0 and probe.path:
        with suppress(OSError):
            os.unlink(probe.path)
            os.utime(Path(probe.path).parent, ns=probe.times)


def writable_problem(directory: str) -> str:
    """Why nothing can be written where ``directory`` is, or will be; "" where it can."""
    place = nearest(directory)
    if not place.is_dir():
        return f"checkpoint.dir = {directory}: {place} is a file; checkpoint.dir must be a directory"
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return f"checkpoint.dir = {directory}: cannot write in {place}: {error.strerror}; choose another checkpoint.dir"


def room(config: Config, step: int) -> tuple[str, str]:
    """(what is wrong, what the user should know) of the space for the checkpoints that a run from ``step`` on will
    write, "" for nothing."""
    settings, left = config.checkpoint, config.train.steps - step
    if settings.dir is None or left <= 0:
        return "", ""
    place = nearest(settings.dir)
    space, size = os.statvfs(place), _STATE_BYTES * parameter_count(config.model.architecture)
    free, saves = space.f_bavail * space.f_frsize, -(-left // (settings.save_interval or left))
    # What is deleted in turn is there until the next one is whole, and read back.
    there = len(step_directories(Path(settings.dir))) if Path(settings.dir).is_dir() else 0
    at_once = min(saves, max(1, settings.keep + 1 - there) if settings.keep else 1)
    if free < at_once * size:
        return (
            f"checkpoint.dir = {settings.dir}: {at_once * size:,} bytes will be written ({at_once} more of {size:,} "
            f"at once), and {free:,} are free in {place}: make room, choose another, or lower checkpoint.keep"
        ), ""
    if not settings.keep and free < saves * size:
        return "", (
            f"warning: {saves} checkpoints of {size:,} bytes are to come, and {free:,} are free in {place}: set "
            f"checkpoint.keep, or make room in time"
        )
    return "", ""


def data_facts(config: Config) -> dict[str, str]:
    """What each data file is here, by setting and path: its size, and a checksum of both its ends."""
    blends = {"data.train": config.data.train or (), "data.valid": config.data.valid or ()}
    paths = [(field, f"{prefix}{end}") for field, blend in blends.items() for _, prefix in blend for end in _ENDS]
    return {f"{field}: {path}": _described(Path(path)) for field, path in paths}


_ENDS = (".bin", ".idx")


def _described(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size, begin = os.fstat(file.fileno()).st_size, file.read(_LOOKED_AT)
            file.seek(max(0, size - _LOOKED_AT))
            return f"{size:,} bytes, checksum {zlib.crc32(file.read(), zlib.crc32(begin)):08x}"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
