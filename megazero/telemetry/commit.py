"""Which commit of megazero is running."""

from __future__ import annotations

import subprocess
from pathlib import Path

PACKAGE_PARENT = Path(__file__).resolve().parents[2]


def running_commit(root: Path = PACKAGE_PARENT) -> str | None:
    """The full id of the commit checked out at ``root``; None where there is no checkout or no commit yet.

    Reads .git itself, also of a worktree: a process that holds NCCL or CUDA state should not fork. Only a
    repository whose references are in a form unknown here costs a call of git.
    """
    git = root / ".git"
    try:
        if git.is_file():
            git = root / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref:"):
            return head
        name = head.removeprefix("ref:").strip()
        common = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
    except OSError:
        return None
    if (common / "reftable").is_dir():
        return _ask_git(root)
    for place in (git, common):
        if (place / name).is_file():
            return (place / name).read_text().strip()
    return _packed(common / "packed-refs", name)


def _packed(path: Path, name: str) -> str | None:
    if not path.is_file():
        return None
    for line in path.read_text().splitlines():
        commit, _, reference = line.partition(" ")
        if reference == name:
            return commit
    return None


def _ask_git(root: Path) -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
