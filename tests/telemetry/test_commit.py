"""The commit that .git names, against git itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from megazero.telemetry import commit
from megazero.telemetry.commit import running_commit


def git(root: Path, *arguments: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main", "-c", "gc.auto=0")
    done = subprocess.run(["git", "-C", str(root), *settings, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "a checkout"
    root.mkdir()
    git(root, "init")
    git(root, "commit", "--allow-empty", "-m", "one")
    # None of the states below may need a process.
    monkeypatch.setattr(commit, "_ask_git", lambda root: pytest.fail("spawned git"))
    return root


def test_branch_packed_and_detached(checkout: Path):
    head = git(checkout, "rev-parse", "HEAD")
    assert running_commit(checkout) == head
    git(checkout, "pack-refs", "--all")
    assert running_commit(checkout) == head
    git(checkout, "checkout", "--detach")
    assert running_commit(checkout) == head


def test_worktree(checkout: Path, tmp_path: Path):
    git(checkout, "worktree", "add", "-b", "other", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "--allow-empty", "-m", "two")
    assert running_commit(tmp_path / "tree") == git(tmp_path / "tree", "rev-parse", "HEAD")
    assert running_commit(tmp_path / "tree") != running_commit(checkout)


def test_no_checkout_and_no_commit(tmp_path: Path):
    assert running_commit(tmp_path) is None
    git(tmp_path, "init")
    assert running_commit(tmp_path) is None
