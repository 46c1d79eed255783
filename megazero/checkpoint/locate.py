"""Where checkpoints are: directory names under a root, and the newest whole one.

root/step_00000100             a whole checkpoint, committed by a rename
root/step_00000100/verified    every byte of it was once read back from the disk, and was right
root/step_00000100.replaced    the former checkpoint of that step, for the instant its successor takes its name
root/step_00000100.damaged     one whose bytes were found damaged by a run that went on from an older one
root/.step_00000200.saving     a save under way, or the rest of one cut off
root/.step_00000050.removing   a checkpoint being deleted
root/global_step100            a checkpoint under a tag, a name that the user of an engine may choose
root/latest                    the tag to load where none is given
"""

from __future__ import annotations

import os
import re
import stat
import warnings
from pathlib import Path

from megazero.checkpoint import manifest
from megazero.errors import CheckpointError
from megazero.small_files import is_name, read_small

REPLACED, SAVING, REMOVING, DAMAGED = ".replaced", ".saving", ".removing", ".damaged"
VERIFIED = "verified"
_STEP = re.compile(r"step_(\d{8,})(\.replaced)?")
_LEFTOVER = re.compile(r"\..+\.(saving|removing)")
LATEST = "latest"


def step_directory(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


def step_directories(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every committed checkpoint under a root, oldest first, whole or not."""
    found = []
    for name in _directories(root):
        match = _STEP.fullmatch(name)
        if match:
            found.append((int(match[1]), match[2] is None, root / name))
    return [(step, path) for step, _, path in sorted(found)]


def leftovers(root: Path) -> list[Path]:
    """What saves and deletions that were cut off have left behind."""
    return [root / name for name in _directories(root) if _LEFTOVER.fullmatch(name)]


def replaced(root: Path) -> list[Path]:
    """Former checkpoints whose successors may not have taken their names."""
    return [path for path in _checkpoints(root) if path.name.endswith(REPLACED)]


def _former(path: Path) -> Path:
    """Where a checkpoint is while its successor takes its name. ``.`` and ``/`` are paths too, without a name."""
    return path.parent / f"{path.name}{REPLACED}"


def _checkpoints(root: Path) -> list[Path]:
    """Directories with a manifest, whole or not, those being written or deleted apart."""
    names = [name for name in _directories(root) if not name.startswith(".")]
    return [root / name for name in names if (root / name / manifest.NAME).exists()]


def _directories(root: Path) -> list[str]:
    """Names of those in ``root``, in order; CheckpointError where it cannot be listed."""
    try:
        # Not the entries' own is_dir, which fails on a link to itself.
        return sorted(name for name in os.listdir(root) if os.path.isdir(root / name))
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be read: {error.strerror}") from error


def tagged(root: str | os.PathLike[str], tag: str) -> Path:
    """The whole checkpoint of that tag; CheckpointError where there is none, with the tags that there are."""
    path = Path(root) / tag
    former = _former(path)
    if not path.exists() and former.exists():
        path = former
    if not path.exists():
        there = [found.name for found in _checkpoints(Path(root))] if Path(root).is_dir() else []
        raise CheckpointError(
            f"{path}: no such checkpoint; {f'there are {_some(there)}' if there else 'there is none'}"
        )
    read_whole(path)
    return path


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"


def latest_tagged(root: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that the file ``latest`` names; where that is missing, empty or names none that is whole, the one
    saved last that is, with a warning. None where nothing was ever saved; CheckpointError where no checkpoint is whole.
    """
    root, problems = Path(root), []
    if not root.is_dir():
        return None
    try:
        tag = read_small(root / LATEST).decode().strip()
        if not is_name(tag):
            raise CheckpointError(f"{root / LATEST}: names no checkpoint")
        return tagged(root, tag)
    except (CheckpointError, OSError, UnicodeDecodeError) as error:
        problems.append(f"{root / LATEST}: missing" if isinstance(error, FileNotFoundError) else str(error))
    found = []
    for path in _checkpoints(root):
        try:
            contents = read_whole(path)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            found.append((contents.meta.get("saved_at", 0.0), contents.step, path.name))
    if found:
        path = root / max(found)[2]
        warnings.warn(f"{'; '.join(dict.fromkeys(problems))}; using {path}", stacklevel=2)
        return path
    if len(problems) > 1 or (root / LATEST).exists():
        raise CheckpointError(f"{root}: no whole checkpoint. {'; '.join(dict.fromkeys(problems))}")
    return None


def read_whole(directory: Path) -> manifest.Manifest:
    """The manifest of a checkpoint all of whose files are there in full size; else CheckpointError.

    The bytes inside are not read: that is ``Checkpoint.verify``.
    """
    contents = manifest.read(directory)
    for file in contents.files:
        path = directory / file.name
        try:
            status = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path}: missing ({error.strerror}), so the checkpoint cannot be loaded") from error
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):  # of a pipe, reading would never end
            raise CheckpointError(f"{path}: is no file, so the checkpoint cannot be loaded")
        if size != file.size:
            raise CheckpointError(f"{path}: {size} bytes, {file.size} were written: the file is damaged or cut short")
    return contents


def newest_or_none(root: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint under a root, None where no save was ever finished there.

    One that is not whole is passed over with a warning that names the damage; if none is whole, CheckpointError.
    """
    root = Path(root)
    if not root.is_dir():
        return None
    problems = []
    for _, directory in reversed(step_directories(root)):
        try:
            read_whole(directory)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warnings.warn(f"passing over a checkpoint that is not whole: {problem}; using {directory}", stacklevel=2)
        return directory
    if problems:
        raise CheckpointError(f"{root}: no whole checkpoint. " + "; ".join(problems))
    return None


def set_aside(path: Path) -> bool:
    """Rename a damaged checkpoint, so that it is in nobody's way. Where there is no other whole one, or it cannot be
    renamed, it stays as it is: a run that is started again is to stop there, and not to begin anew."""
    try:
        if not any(other != path and is_whole(other) for _, other in step_directories(path.parent)):
            return False
        path.rename(path.with_name(path.name + DAMAGED))
    except FileNotFoundError:  # another thread has, which found the same
        return True
    except (CheckpointError, OSError):
        return False
    return True


def is_gone(path: Path) -> bool:
    """Whether there is nothing of this name; where the disk does not say, there is."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def is_whole(directory: Path) -> bool:
    """Whether ``read_whole`` finds nothing wrong."""
    try:
        read_whole(directory)
    except CheckpointError:
        return False
    return True


def newest(path: str | os.PathLike[str]) -> Path:
    """The checkpoint that a path means: itself, or the newest whole one under it. CheckpointError if there is none."""
    path = Path(path)
    former = _former(path)
    if (path / manifest.NAME).exists() or _STEP.fullmatch(path.name) or (not path.exists() and former.exists()):
        if not path.exists() and former.exists():
            path = former
        if path.is_dir():
            read_whole(path)
            return path
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint directory")
    if not path.is_dir():
        raise CheckpointError(f"{path}: a file; a checkpoint is a directory with a {manifest.NAME}")
    found = newest_or_none(path) or latest_tagged(path)
    if found is None:
        hint = "a checkpoint is a directory step_XXXXXXXX, or a directory that holds some"
        if (path / "config.json").exists():
            hint = "it is a Hugging Face directory: give it as model.init_from"
        raise CheckpointError(f"{path}: holds no megazero checkpoint; {hint}")
    return found
