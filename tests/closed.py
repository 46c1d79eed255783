"""A directory that a test may not enter, whoever runs it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def closed_directory() -> Iterator[Path]:
    """One that this process may not enter while the context lasts; root, who may enter any, is somebody else."""
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        os.chmod(place, 0o755)
        closed = Path(place, "closed")
        closed.mkdir(mode=0)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            yield closed
        finally:
            if is_root:
                os.seteuid(0)
            closed.chmod(0o700)
