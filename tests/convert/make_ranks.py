"""What make_megatron.py and make_deepspeed.py share: ranks that cost no import, and one file of all that was made."""

from __future__ import annotations

import os
import sys
import tarfile
import traceback
from pathlib import Path
from typing import Any


def fork(ranks: int, function: Any, *arguments: Any, **keywords: Any) -> None:
    """Calls ``function(rank, …)`` in as many children of this process, which has imported everything already."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                function(rank, *arguments, **keywords)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise SystemExit(f"{function.__name__} {keywords}: exit codes {codes}")


def pack(folder: Path) -> None:
    """FOLDER.tar.xz, with the folder's contents at its root and nothing in it that differs from run to run but them."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    with tarfile.open(folder.with_suffix(".tar.xz"), "w:xz", preset=9) as archive:
        archive.add(folder, arcname=".", filter=plain)
