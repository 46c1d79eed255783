"""What happens to a run beside its steps, one JSON object a line: starts, saves, skipped updates, roll-backs, slow
ranks."""

from __future__ import annotations

import json
import time
from pathlib import Path

from megazero.errors import ConfigError


class EventLog:
    """Appends to ``path``; lines of earlier starts of the run stay, as they are its history."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self) -> None:
        """Raises ConfigError where the file cannot be written."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.open("a", encoding="utf-8").close()
        except OSError as error:
            raise ConfigError.single("log.events", f"cannot write {self._path}: {error.strerror}") from error

    def write(self, kind: str, step: int, fields: dict[str, object]) -> None:
        """``time``: seconds since 1970. Raises OSError."""
        line = json.dumps({"time": time.time(), "event": kind, "step": step, **fields})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
