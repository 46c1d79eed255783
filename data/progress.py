"""A progress bar on stderr over the bytes of the input files; silent where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

from data.corpus_reader import Document, Fields, read_documents

_SHOW_EVERY = 1 << 20
"""Bytes between two updates of the bar; one per document would cost more than reading it."""


def byte_bar() -> Bar:
    """Over bytes, on stderr; silent where that is no terminal."""
    columns = [TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()]
    return Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), disable=not sys.stderr.isatty())


class Progress:
    """Reads documents of ``paths`` and shows how far it is."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._sizes = [path.stat().st_size for path in paths]
        self._bar = byte_bar()

    def documents(self, description: str, fields: Fields) -> Iterator[Document]:
        """All documents of all files, in order."""
        task = self._bar.add_task(description, total=sum(self._sizes))
        before = shown = 0

        def reached(position: int) -> None:
            nonlocal shown
            if before + position - shown >= _SHOW_EVERY:
                shown = before + position
                self._bar.update(task, completed=shown)

        for path, size in zip(self._paths, self._sizes, strict=True):
            yield from read_documents(path, fields, reached)
            before += size
            self._bar.update(task, completed=before)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
