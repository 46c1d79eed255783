"""Where a configuration's paths lead: whether the system will say, and what they are on."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megazero.config import Config

_MOUNTS = Path("/proc/self/mounts")


def unreachable(config: Config) -> Iterator[tuple[str, str]]:
    """(field, what is wrong and would help) of paths of which the system will not even say whether there is something:
    any use of one would be an OSError."""
    data, log, zero = config.data, config.log, config.zero
    paths = [("checkpoint.dir", config.checkpoint.dir), ("model.init_from", config.model.init_from)]
    if config.checkpoint.resume not in ("auto", "never"):
        paths.append(("checkpoint.resume", config.checkpoint.resume))
    paths += [(f"log.{name}", getattr(log, name)) for name in ("jsonl", "events", "tensorboard", "timeline")]
    paths += [
        (f"data.{name}", f"{prefix}.idx") for name in ("train", "valid") for _, prefix in getattr(data, name) or ()
    ]
    with_home = {
        "data.tokenizer": (data.tokenizer or "").partition(":")[2],
        "zero.offload_optimizer.nvme_path": zero.offload_optimizer.nvme_path or "",
        "zero.offload_param.nvme_path": zero.offload_param.nvme_path or "",
    }
    for field, path in with_home.items():
        paths.append((field, os.path.expanduser(path)))
        if paths[-1][1].startswith("~"):
            yield field, f"{path}: there is no user {Path(path).parts[0][1:]!r}; give the whole path"
    for field, path in paths:
        if path and (problem := _why_unreachable(Path(path))):
            yield field, f"{path} cannot be reached: {problem}"


def _why_unreachable(path: Path) -> str:
    """And what would help; "" where it is there, or plainly is not."""
    try:
        os.stat(path)
    except PermissionError:
        closed = next(place for place in path.absolute().parents if os.path.isdir(place))
        return f"this user may not enter {closed}; have that allowed, or choose another place"
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return f"{error.strerror}; choose another place"
    except ValueError:  # nothing can have such a name
        pass
    return ""


def file_system(path: Path) -> tuple[str, str]:
    """(type, where it is mounted) of what a path is on, as Linux has it."""
    found = ("unknown", "/")
    with suppress(OSError):
        for line in _MOUNTS.read_text().splitlines():
            _, mount, kind, *_ = line.split(" ")
            mount = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount)  # a space is \040 there
            if path.is_relative_to(mount) and len(mount) >= len(found[1]):
                found = (kind, mount)
    return found
