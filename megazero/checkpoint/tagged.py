"""Checkpoints under names of the user's choice, and the file that says which of them is the latest."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import files, locate
from megazero.checkpoint.group import Group
from megazero.checkpoint.writer import AnyChunk, CheckpointWriter
from megazero.errors import CheckpointError


def check_tag(tag: str) -> None:
    """CheckpointError where a tag cannot be a directory's name beside the others."""
    problem = None
    if not tag or len(tag.encode()) > 200:
        problem = "must have 1 to 200 bytes"
    elif Path(tag).name != tag or "\0" in tag:
        problem = "must be a plain name, without a path"
    elif tag.startswith(".") or tag == locate.LATEST or tag.endswith(locate.REPLACED):
        problem = "is a name that checkpoints use themselves"
    if problem:
        raise CheckpointError(f"tag {tag!r} {problem}; choose another, such as global_step100")


class TaggedWriter(CheckpointWriter):
    """Saves under ``root``/tag, and may save the same tag again: the former one is there until the new one is whole.

    What else lies under the root, of this run or others, stays as it is.
    """

    setting = "save_dir"

    def __init__(self, root: str | os.PathLike[str], group: Group | None = None) -> None:
        super().__init__(root, group)

    def _look_around(self, start_step: int) -> None: ...

    def _of_others(self) -> None: ...

    def save_as(
        self,
        tag: str,
        latest: bool,
        step: int,
        chunks: Iterable[AnyChunk],
        rank_state: Mapping[str, torch.Tensor],
        meta: Mapping[str, Any],
    ) -> Path:
        """As ``save``; ``latest``: whether ``root``/latest is to name it, once it is whole."""
        check_tag(tag)
        self._latest = tag if latest else None
        return self._save(self.root / tag, step, chunks, rank_state, {**meta, "saved_at": time.time()})

    def _committed(self, target: Path, step: int) -> None:
        if self._latest is not None:
            files.replace_file(self.root / locate.LATEST, self._latest.encode())
