"""Files that people write, and names in them: read whole, but not whatever the size; of this directory alone."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

_MOST = 2**26


def is_name(name: object) -> bool:
    """Whether it is the name of a file in whatever directory, and leads nowhere else."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        return False
    try:
        return len(os.fsencode(name)) <= 255
    except UnicodeEncodeError:  # half of a character
        return False


def read_small(path: str | os.PathLike[str], pipe: bool = False) -> bytes:
    """What is in a file of settings or names. ``pipe``: it may be one, as in ``--hostfile <(nodes)``; of another,
    reading might never end. Raises OSError where it cannot be read, and for over 64 MiB."""
    mode = os.stat(path).st_mode
    if not pipe and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with Path(path).open("rb") as file:
        content = file.read(_MOST + 1)
    if len(content) > _MOST:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return content


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A section of a JSON file, as ``object_pairs_hook``. Raises ValueError where it has a name twice."""
    section: dict[str, Any] = {}
    for name, value in pairs:
        if name in section:
            raise ValueError(f"{name!r} is given twice in one section; leave out one")
        section[name] = value
    return section
