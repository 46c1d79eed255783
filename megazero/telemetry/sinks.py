"""Where metrics go: a JSONL file, TensorBoard, Weights & Biases. The console has a file of its own."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from megazero.config_tree import LogSection
from megazero.errors import ConfigError

Metrics = Mapping[str, float | int | None]


class Sink(Protocol):
    """A place that metrics are written to, by one process of the job."""

    def start(self, config: dict[str, Any], layout: dict[str, int], commit: str | None, run_id: str, step: int) -> None:
        """Open it for the run ``run_id``, which continues after ``step`` (0: from the beginning)."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Metrics of one step; a training and an evaluation line of the same step may follow each other."""

    def close(self) -> None:
        """Write out what is left. Nothing follows."""


def check_sinks(log: LogSection) -> None:
    """Raises ConfigError for each sink that cannot work: its package is missing, or its path cannot be written.

    Writes and imports nothing, so it is for before a run's work; missing folders are no error, they will be made.
    """
    packages = (("log.tensorboard", log.tensorboard, "tensorboard"), ("log.wandb", log.wandb, "wandb"))
    found = [
        (field, f"needs the package {package}: pip install {package}, or leave {field} unset")
        for field, value, package in packages
        if value and importlib.util.find_spec(package) is None
    ]
    paths = (
        ("log.jsonl", log.jsonl, False),
        ("log.events", log.events, False),
        ("log.tensorboard", log.tensorboard, True),
        ("log.timeline", log.timeline, True),
    )
    for field, path, directory in paths:
        if path and (problem := _unwritable(Path(path), directory)):
            found.append((field, f"cannot write {path}: {problem}"))
    if found:
        raise ConfigError(found)


def _unwritable(path: Path, directory: bool) -> str | None:
    if path.exists() and path.is_dir() != directory:
        return (
            "it is a file, give the path of a directory" if directory else "it is a directory, give the path of a file"
        )
    nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    if nearest != path and not nearest.is_dir():
        return f"{nearest} is a file"
    return None if os.access(nearest, os.W_OK) else f"no permission to write to {nearest}"


class JsonLines:
    """One JSON object a line, flushed each time. Numbers keep every digit; NaN and infinity become null. A file beside
    it describes the run: see ``description_of``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None

    def start(self, config: dict[str, Any], layout: dict[str, int], commit: str | None, run_id: str, step: int) -> None:
        """A resumed run drops lines past ``step``: they are computed again. A new run moves an older file aside.

        Raises ConfigError where the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and self.path.stat().st_size:
                if step:
                    keep_until(self.path, step)
                else:
                    self.path.replace(self.path.with_name(self.path.name + ".previous"))
            described = {"run_id": run_id, "commit": commit, "layout": layout, "config": config}
            description_of(self.path).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError.single("log.jsonl", f"cannot write {self.path}: {error.strerror}") from error

    def log(self, step: int, metrics: Metrics) -> None:
        assert self._file is not None
        line = {"step": step, **{key: _finite(value) for key, value in metrics.items()}}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def description_of(path: Path) -> Path:
    """Where the run of a JSONL series is described: its id, commit, layout and settings."""
    return path.with_suffix(".run.json")


def _finite(value: float | int | None) -> float | int | None:
    return value if value is None or math.isfinite(value) else None


def keep_until(path: Path, step: int) -> None:
    """Rewrite ``path`` with the whole lines of steps up to ``step``; a line that a kill cut short goes too."""
    kept = []
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(line if line.endswith("\n") else line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(path)


class TensorBoard:
    """Scalars in ``directory``, for ``tensorboard --logdir``."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = str(directory)
        self._writer: Any = None

    def start(self, config: dict[str, Any], layout: dict[str, int], commit: str | None, run_id: str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides, in TensorBoard, what an earlier process logged for steps computed again.
        self._writer = SummaryWriter(self.directory, purge_step=step + 1 if step else None)
        described = {"layout": layout, "commit": commit, "run_id": run_id, **config}
        self._writer.add_text("config", f"```json\n{json.dumps(described, indent=2)}\n```", step)

    def log(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A W&B run in ``project``. Where the service cannot be reached, the run is kept offline and ``say`` tells how
    to send it later; WANDB_MODE and W&B's other variables mean what they always do.
    """

    def __init__(self, project: str, say: Callable[[str], None]) -> None:
        self.project, self._say = project, say
        self._run: Any = None

    def start(self, config: dict[str, Any], layout: dict[str, int], commit: str | None, run_id: str, step: int) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE")
        if not mode and not wandb.api.api_key:
            # Without a key wandb would ask for one, and every other rank would wait for the answer.
            mode = "offline"
            self._say("W&B: no API key found (`wandb login` stores one): the run is kept offline")
        arguments = {
            "project": self.project,
            "id": run_id,
            "resume": "allow",
            "config": {**config, "layout": layout, "commit": commit},
        }
        try:
            self._run = wandb.init(**arguments, mode=mode, settings=self._settings())
        except wandb.errors.Error as error:
            reason = str(error).partition("\n")[0]
            self._say(f"W&B: cannot start a run online ({reason}): the run is kept offline")
            wandb.teardown()  # its service still holds the run that failed, and would refuse a second of the same id
            self._run = wandb.init(**arguments, mode="offline", settings=self._settings())
        if self._run.settings.mode == "offline":
            command = shlex.join(["wandb", "sync", str(self._run.settings.sync_dir)])
            self._say(f"W&B: `{command}` sends the run {run_id} to the service")

    @staticmethod
    def _settings() -> Any:
        import wandb

        # Console capture would take the terminal from the progress bar.
        return wandb.Settings(console="off", silent=True, init_timeout=30, login_timeout=15)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
