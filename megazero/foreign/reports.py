"""What an engine says of its run: printed lines, times of a step's parts, and metrics for TensorBoard, W&B and CSV."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megazero.ds_config import DsConfig
from megazero.errors import ConfigError
from megazero.foreign.comms_log import CommsLog
from megazero.telemetry.commit import running_commit
from megazero.telemetry.sinks import Metrics, Sink, TensorBoard, WeightsAndBiases
from megazero.topology import Topology

INTERVAL = 10
"""Steps between looks at the device, where ``steps_per_print`` does not say."""


@dataclass(frozen=True)
class StepNumbers:
    """Of one step; the first two are scalars on the device, and read at a report only. ``samples``: with this step's
    ``batch_size``, those of all steps."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    lr: float
    loss_scale: float
    samples: int
    batch_size: int


class Reports:
    """The first rank prints and writes; the others keep time with it. Nothing is read from the device but every
    ``interval`` steps."""

    def __init__(self, ds: DsConfig, topology: Topology) -> None:
        self._ds, self._device, self._speaks = ds, topology.device, topology.rank == 0
        self.interval = ds.steps_per_print or INTERVAL
        self.comms = CommsLog(ds.comms_logger, topology.device, self.say) if ds.comms_logger.enabled else None
        self._sinks = self._make_sinks()
        self._steps: list[StepNumbers] = []
        self._parts: dict[str, list[Any]] = {}
        self._timed = 0  # steps whose parts these are
        self._since = time.perf_counter()

    def start(self) -> None:
        """Open the sinks, and say what is to be said first."""
        described = json.loads(json.dumps(asdict(self._ds), default=str))
        if self._ds.dump_state:
            self.say("settings, as they were read: " + json.dumps(described, indent=2))
        axes = {"zero_stage": self._ds.zero.stage}
        for sink in self._sinks:
            sink.start(described, axes, running_commit(), secrets.token_hex(4), 0)
        self._since = time.perf_counter()

    def say(self, text: str) -> None:
        if self._speaks:
            print(f"megazero: {text}", flush=True)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Time a part of the step, where wall_clock_breakdown asks for it; on a GPU by its own clock."""
        if not self._ds.wall_clock_breakdown:
            yield
            return
        start = self._now()
        yield
        self._parts.setdefault(part, []).append((start, self._now()))

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step(self, number: int, step: StepNumbers) -> bool:
        """A step has ended; whether it is one at which the device is looked at."""
        self._timed += 1
        if self._sinks or self._ds.steps_per_print:
            self._steps.append(step)
        if number % self.interval:
            return False
        self._print(number)
        self._flush()
        return True

    def _print(self, number: int) -> None:
        if self._ds.steps_per_print:
            first, last = self._steps[0], self._steps[-1]
            samples = last.samples - first.samples + first.batch_size
            rate = samples / max(time.perf_counter() - self._since, 1e-9)
            scale = f", loss scale {last.loss_scale:g}" if self._ds.precision.dtype == torch.float16 else ""
            self.say(
                f"step {number}: loss {float(last.loss):.6g}, gradient norm {float(last.grad_norm):.6g}, lr "
                f"{last.lr:.6g}{scale}, {rate:.4g} samples/s"
            )
        if self._parts:
            self.say("time per step: " + ", ".join(f"{part} {s:.2f} ms" for part, s in self._times().items()))
        if self.comms is not None:
            self.comms.report()
        self._since = time.perf_counter()

    def _times(self) -> dict[str, float]:
        """Milliseconds of each part in a step, on average over those since the last report."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

        def length(start: Any, end: Any) -> float:
            return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)

        times = {part: sum(length(*span) for span in spans) / self._timed for part, spans in self._parts.items()}
        self._parts.clear()
        self._timed = 0
        return times

    def _flush(self) -> None:
        half = self._ds.precision.dtype == torch.float16
        for step in self._steps if self._sinks else ():
            metrics = {
                "Train/Samples/train_loss": float(step.loss),
                "Train/Samples/lr": step.lr,
                "Train/Samples/grad_norm": float(step.grad_norm),
            }
            if half:
                metrics["Train/Samples/loss_scale"] = step.loss_scale
            self._attempt(lambda sink, step=step, metrics=metrics: sink.log(step.samples, metrics))
        self._steps.clear()

    def _attempt(self, action: Callable[[Sink], None]) -> None:
        """Metrics that cannot go out must not end a run of weeks."""
        for sink in list(self._sinks):
            try:
                action(sink)
            except Exception as error:  # a sink's library may raise anything: a full disk, a lost network
                self.say(f"{type(sink).__name__}: {error}; no further metrics go there")
                self._sinks.remove(sink)

    def close(self) -> None:
        """Write out what is left. Safe to call twice."""
        self._flush()
        self._attempt(lambda sink: sink.close())
        self._sinks = []

    def _make_sinks(self) -> list[Sink]:
        ds = self._ds
        for name, monitor, package in (("tensorboard", ds.tensorboard, "tensorboard"), ("wandb", ds.wandb, "wandb")):
            if monitor.enabled and importlib.util.find_spec(package) is None:
                fix = f"needs the package {package}: pip install {package}, or set it to false"
                raise ConfigError.single(f"{name}.enabled", fix)
        if not self._speaks:
            return []
        sinks: list[Sink] = []
        if ds.tensorboard.enabled:
            sinks.append(TensorBoard(Path(ds.tensorboard.output_path or "runs") / ds.tensorboard.job_name))
        if ds.csv_monitor.enabled:
            sinks.append(CsvFiles(Path(ds.csv_monitor.output_path or "runs") / ds.csv_monitor.job_name))
        if ds.wandb.enabled:
            for variable, value in (("WANDB_RUN_GROUP", ds.wandb.group), ("WANDB_ENTITY", ds.wandb.team)):
                if value:
                    os.environ[variable] = value
            sinks.append(WeightsAndBiases(ds.wandb.project, self.say))
        return sinks


class CsvFiles:
    """One file per metric in ``directory``, lines of samples and value. An earlier run's are moved aside."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}

    def start(self, config: dict[str, Any], layout: dict[str, int], commit: str | None, run_id: str, step: int) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            told = f"cannot make {self.directory}: {error.strerror}"
            raise ConfigError.single("csv_monitor.output_path", told) from None

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if name not in self._files:
                path = self.directory / f"{name.replace('/', '_')}.csv"
                if path.exists():
                    path.replace(path.with_name(path.name + ".previous"))
                self._files[name] = path.open("w", newline="", encoding="utf-8")
                csv.writer(self._files[name]).writerow(["step", name])
            csv.writer(self._files[name]).writerow([step, value])
            self._files[name].flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
