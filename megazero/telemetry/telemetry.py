"""Telemetry: the one thing the engine talks to about metrics."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megazero.errors import MegazeroError
from megazero.models.config import ModelConfig
from megazero.models.parameters import flops_per_token
from megazero.telemetry.commit import running_commit
from megazero.telemetry.console import Console
from megazero.telemetry.events import EventLog
from megazero.telemetry.peaks import device_peak_flops
from megazero.telemetry.sinks import JsonLines, Metrics, Sink, TensorBoard, WeightsAndBiases, check_sinks
from megazero.telemetry.throughput import Throughput

if TYPE_CHECKING:
    from megazero.config import Config, Layout


class Telemetry:
    """Metrics of one run, from the engine to the sinks that ``config.log`` names. Rank 0 writes, others do nothing.

    ``run_id``: the id kept in the checkpoint that the run continues; unset: a new one. ``step``: the step
    resumed from. Nothing here touches the device, so it costs a training step no synchronisation: callers
    hand over Python numbers, at logging steps only. A sink that fails later on is dropped with a message,
    and training goes on.

    Raises ConfigError, on every rank, for what ``check_sinks`` finds; on rank 0, where a file cannot be written
    all the same.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        layout: Layout,
        device: torch.device,
        rank: int,
        run_id: str | None = None,
        step: int = 0,
    ) -> None:
        check_sinks(config.log)
        self.run_id = run_id or secrets.token_hex(4)
        self._steps = config.train.steps
        self._device = device
        self._throughput = Throughput(
            flops_per_token(model_config, config.data.seq_length),
            layout.world_size,
            device_peak_flops(device, "bf16" if config.train.precision == "auto" else config.train.precision),
        )
        self._console: Console | None = None
        self._events = EventLog(Path(config.log.events)) if config.log.events and rank == 0 else None
        self._sinks: list[Sink] = []
        self._start: Callable[[Sink, int], None]
        if self._events is not None:
            self._events.start()
        if rank == 0:
            self._start_sinks(config, model_config, layout, step)

    def _start_sinks(self, config: Config, model_config: ModelConfig, layout: Layout, step: int) -> None:
        self._console = Console(self._steps, gpu=self._device.type == "cuda")
        sinks: list[Sink] = []
        if config.log.jsonl:
            sinks.append(JsonLines(config.log.jsonl))
        if config.log.tensorboard:
            sinks.append(TensorBoard(config.log.tensorboard))
        if config.log.wandb:
            sinks.append(WeightsAndBiases(config.log.wandb, self.message))
        described: dict[str, Any] = config.model_dump(mode="json")
        described["model"] = model_config.model_dump(mode="json")
        axes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "zero_stage": config.zero.stage}
        commit = running_commit()
        self._start = lambda sink, after: sink.start(described, axes, commit, self.run_id, after)
        self._sinks = [sink for sink in sinks if self._attempt(sink, partial(self._start, sink, step))]
        # The bar last: what the others have to say comes before it.
        self._start(self._console, step)

    def go_back(self, step: int) -> None:
        """The run goes on after an earlier step: every series does, as if it were resumed."""
        self._throughput.restart()
        for sink in self._sinks:
            self._attempt(sink, sink.close)
        self._sinks = [sink for sink in self._sinks if self._attempt(sink, partial(self._start, sink, step))]

    def log_step(
        self,
        step: int,
        loss: float,
        grad_norm: float,
        lr: float,
        consumed_samples: int,
        tokens: int,
        extra: Mapping[str, float | int | None] | None,
        tokens_left: int,
    ) -> None:
        """A logging step. ``tokens``: of all global batches since the last call; ``extra``: more numbers by name;
        ``tokens_left``: of those that are still to come."""
        rates = self._throughput.window(tokens)
        metrics: dict[str, float | int | None] = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            "tokens_per_second": rates.tokens_per_second,
            "model_tflops_per_gpu": rates.tflops_per_gpu,
            "mfu": rates.mfu,
            "memory_allocated_peak": self._memory_peak(),
            "consumed_samples": consumed_samples,
            "elapsed_s": rates.elapsed_s,
            **(extra or {}),
        }
        self._log(step, metrics)
        if self._console is not None:
            self._console.log(step, {**metrics, "time_left_s": tokens_left / rates.tokens_per_second})

    def log_eval(self, step: int, valid_loss: float) -> None:
        """An evaluation after ``step``; ``valid_loss`` is the mean over tokens, in nats."""
        metrics = {"valid_loss": valid_loss}
        self._log(step, metrics)
        if self._console is not None:
            self._console.log(step, metrics)

    def message(self, text: str) -> None:
        """A line for whoever watches, which leaves the progress bar whole."""
        if self._console is not None:
            self._console.message(text)

    def event(self, kind: str, step: int, text: str, **fields: object) -> None:
        """A line for whoever watches, and one in ``log.events``, where ``fields`` are too."""
        self.message(text)
        if self._events is not None:
            try:
                self._events.write(kind, step, {"text": text, **fields})
            except OSError as error:
                self._events = None
                self.message(f"log.events: {error}; no further events go there")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside (an evaluation, a save) is no training time. Enter it right after a logging step."""
        with self._throughput.paused():
            yield

    def close(self) -> None:
        """End the run's series. Safe to call twice."""
        for sink in self._sinks:
            self._attempt(sink, sink.close)
        self._sinks = []
        if self._console is not None:
            self._console.close()

    def _memory_peak(self) -> int | None:
        """Bytes; of this rank, over the whole run. A CPU has no such count."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None

    def _log(self, step: int, metrics: Metrics) -> None:
        self._sinks = [sink for sink in self._sinks if self._attempt(sink, partial(sink.log, step, metrics))]

    def _attempt(self, sink: Sink, action: Callable[[], None]) -> bool:
        """Run ``action`` of ``sink``; False where it failed. Metrics that cannot go out must not end a run of weeks."""
        try:
            action()
        except MegazeroError:
            raise
        except Exception as error:  # a sink's library may raise anything: a full disk, a lost network, its own errors
            self.message(f"{type(sink).__name__}: {error}; no further metrics go there")
            return False
        return True
