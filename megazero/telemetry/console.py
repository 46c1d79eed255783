"""What a person watching sees: a live bar on a terminal, else one plain line per logging step."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from megazero.telemetry.sinks import Metrics


def duration(seconds: float) -> str:
    """1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def describe(metrics: Metrics) -> str:
    """The numbers of one logging step, most wanted first (a narrow terminal cuts the end); None is left out."""
    shown = (
        ("loss", "loss {:.4f}"),
        ("lr", "lr {:.2e}"),
        ("tokens_per_second", "{:,.0f} tokens/s"),
        ("time_left", "{} left"),
        ("grad_norm", "grad norm {:.3f}"),
        ("model_tflops_per_gpu", "{:.1f} TFLOP/s per GPU"),
        ("mfu", "MFU {:.1%}"),
        ("loss_scale", "loss scale {:.0f}"),
        ("valid_loss", "validation loss {:.4f}"),
    )
    values: list[tuple[str, Any]] = [(form, metrics.get(key)) for key, form in shown]
    return "  ".join(form.format(value) for form, value in values if value is not None)


class Console:
    """A sink for people. ``steps``: of the whole run. FLOP/s are shown for GPUs only (``gpu``)."""

    def __init__(self, steps: int, gpu: bool, stream: TextIO | None = None, live: bool | None = None) -> None:
        self._steps, self._gpu = steps, gpu
        self._stream = stream or sys.stdout
        terminal = self._stream.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"
        self._live = terminal if live is None else live
        self._progress: Any = None
        self._task: Any = None

    def start(self, config: dict[str, Any], layout: dict[str, int], commit: str | None, run_id: str, step: int) -> None:
        if not self._live:
            return
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        self._progress = Progress(
            BarColumn(bar_width=10, table_column=Column(width=10)),
            TextColumn("step {task.completed}/{task.total}  {task.description}"),
            console=Terminal(file=self._stream, force_terminal=True),
            # The bar moves at logging steps only, so a second refresh thread's redraws would show nothing new.
            auto_refresh=False,
        )
        self._task = self._progress.add_task("starting", total=self._steps, completed=step)
        self._progress.start()
        self._progress.refresh()

    def log(self, step: int, metrics: Metrics) -> None:
        hidden = () if self._gpu else ("model_tflops_per_gpu", "mfu")
        seen: dict[str, Any] = {key: value for key, value in metrics.items() if key not in hidden}
        if "time_left_s" in seen:
            seen["time_left"] = duration(seen["time_left_s"])
        text = describe(seen)
        if "valid_loss" in metrics or self._progress is None:
            self.message(f"step {step}/{self._steps}  {text}")
        else:
            self._progress.update(self._task, completed=step, description=text, refresh=True)

    def message(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._progress is None:
            print(text, file=self._stream, flush=True)
        else:
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)
            self._progress.refresh()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
