"""A run in one HTML page: losses, norms, speed, memory, timeline, settings. It opens with no server and no network.

tools/report.py RUN [--output FILE]

RUN is the path of the metrics (log.jsonl), or the directory that they are in.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.command_line import run_script
from megazero.config import Config
from megazero.errors import CommandLine, DataError
from megazero.pipeline.schedules import Action, Kind, build_schedule
from megazero.pipeline.simulate import Timeline, simulate
from megazero.planner.memory import MemoryPlan, amount, plan
from megazero.telemetry.sinks import description_of
from megazero.telemetry.svg import line_chart, stacked_bars
from megazero.telemetry.timeline import (
    FILE,
    Bar,
    bubble_fraction,
    measured_bars,
    memory_over_time,
    planned_bars,
    timeline_svg,
)

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: 0.2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.facts { color: #8a8f98; margin-top: 0; } pre { overflow-x: auto; font-size: 12px; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; }
table { border-collapse: collapse; } td { padding: 0.1rem 1rem 0.1rem 0; } td:first-child { color: #8a8f98; }
"""


_UNMEASURED = {Kind.FORWARD: 1e-3, Kind.BACKWARD: 2e-3, Kind.BACKWARD_INPUT: 1e-3, Kind.BACKWARD_WEIGHT: 1e-3}
"""Seconds that an action is drawn with where none was measured."""


class Run:
    """What a run has left: ``lines`` of training steps, ``evaluations``, and the description beside them."""

    def __init__(self, path: Path) -> None:
        self.path = _metrics_in(path) if path.is_dir() else path
        lines = _read_lines(self.path)
        self.lines = [line for line in lines if "loss" in line]
        self.evaluations = [line for line in lines if "valid_loss" in line]
        described = description_of(self.path)
        try:
            self.facts: dict[str, Any] = json.loads(described.read_text())
            self.layout: dict[str, int] = self.facts["layout"]
            self.config = Config.from_dict(self.facts["config"])
            self.run_id = str(self.facts["run_id"])
            self.world_size = math.prod(int(self.layout[axis]) for axis in ("tp", "pp", "dp"))
        except FileNotFoundError:
            raise _undescribed(str(described)) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{described}: does not describe a run ({error})") from error

    @property
    def on_gpu(self) -> bool:
        return any(line.get("memory_allocated_peak") for line in self.lines)

    def series(self, key: str, scale: float = 1.0) -> list[tuple[int, float]]:
        """(step, value) where the value is known."""
        lines = self.evaluations if key == "valid_loss" else self.lines
        return [(line["step"], line[key] / scale) for line in lines if line.get(key) is not None]


def _undescribed(missing: str) -> DataError:
    return DataError(f"{missing}: missing; a run writes it beside its metrics, and it is to be copied along with them")


def _metrics_in(directory: Path) -> Path:
    series = sorted(directory.glob("*.jsonl"))
    found = [path for path in series if description_of(path).exists()]
    if series and not found:
        raise _undescribed(" or ".join(str(description_of(path)) for path in series))
    if len(found) != 1:
        what = f"holds {len(found)} runs: {', '.join(path.name for path in found)}" if found else "holds no run"
        raise DataError(f"{directory}: {what}; give the path of the metrics, as log.jsonl has it")
    return found[0]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines; a run that is still going may be in the midst of its last."""
    try:
        texts = path.read_text().splitlines()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
            line["step"] += 0
            lines.append(line)
        except (ValueError, TypeError, KeyError) as error:
            if number < len(texts):
                raise DataError(f"{path}: line {number} is not a line of metrics") from error
    if not lines:
        raise DataError(f"{path}: holds no metrics yet")
    return lines


def charts(run: Run) -> list[str]:
    """What changes from step to step; what the run does not know (memory on a CPU, say) is left out."""
    losses = {"training": run.series("loss")}
    if run.evaluations:
        losses["validation"] = run.series("valid_loss")
    found = [line_chart("loss, nats per token", "step", losses)]
    for key, title, scale, log in (
        ("grad_norm", "gradient norm before clipping", 1.0, False),
        ("lr", "learning rate", 1.0, False),
        ("tokens_per_second", "tokens per second", 1.0, False),
        ("mfu", "model FLOP/s utilisation, %", 0.01, False),
        ("memory_allocated_peak", "highest memory of rank 0 so far, GB", 1e9, False),
        ("loss_scale", "loss scale", 1.0, True),
    ):
        found.append(line_chart(title, "step", {key: run.series(key, scale=scale)}, log=log))
    return [chart for chart in found if chart]


def simulated(run: Run, measured: list[Bar]) -> Timeline:
    """The run's schedule on paper: with the mean of each measured action of a rank and chunk, in seconds, and transfers
    that take no time; where nothing was measured, a forward takes 1 ms and a backward 2."""
    times: dict[tuple[int, Kind, int], list[float]] = {}
    for bar in measured:
        if bar.is_compute:
            times.setdefault((bar.rank, bar.kind, bar.chunk), []).append(bar.end - bar.start)
    means = {key: statistics.fmean(values) for key, values in times.items()}

    def cost(rank: int, action: Action) -> float:
        default = _UNMEASURED.get(action.kind, 0.0)
        return means.get((rank, action.kind, action.chunk), 0.0) if means else default

    parallel, count = run.config.parallel, run.config.micro_batches(run.layout["dp"])
    return simulate(build_schedule(run.config.schedule, parallel.pp, count, parallel.virtual_pp), cost)


def timelines(run: Run, memory: MemoryPlan) -> list[str]:
    """Planned beside measured, and the activations of the planned one over time."""
    directory = run.config.log.timeline
    there = directory is not None and Path(directory, FILE.format(0)).exists()
    steps = measured_bars(Path(directory), run.layout["pp"]) if there else {}
    step, measured = max(steps.items(), default=(0, []))
    planned = planned_bars(simulated(run, measured))
    shown = []
    if directory is not None and not measured:
        where = html.escape(f"{directory}, seen from {Path.cwd()}")
        shown.append(f"<p>No whole step is recorded in {where}.</p>")
    if measured:
        shown.append(timeline_svg(f"measured in step {step}: bubble {bubble_fraction(measured):.1%}", measured))
    costs = f"with step {step}'s mean times, transfers free" if measured else "forward 1 ms, backward 2 ms"
    shown.append(timeline_svg(f"planned, {costs}: bubble {bubble_fraction(planned):.1%}", planned))
    activations = [stage.micro_batch for stage in memory.stages]
    held = memory_over_time(planned, activations)
    lines = {f"rank {rank}": [(1e3 * at, size / 1e9) for at, size in points] for rank, points in held.items()}
    shown.append(line_chart("activations held over the planned step, GB", "milliseconds", lines, width=1040))
    return shown


def memory_bars(memory: MemoryPlan) -> str:
    """Per pipeline rank, by kind, in GB."""
    bars = {}
    for place, stage in enumerate(memory.stages):
        state = stage.state
        parts = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
        parts |= {"activations": stage.activations, "buffers": stage.buffers}
        bars[f"rank {place}"] = {name: size / 1e9 for name, size in parts.items()}
    return stacked_bars("planned memory, the most of each kind", "GB", bars, width=1040)


def facts(run: Run, memory: MemoryPlan) -> list[tuple[str, str]]:
    last, rates = run.lines[-1] if run.lines else {}, [rate for _, rate in run.series("tokens_per_second")]
    rows = [("steps", f"{last.get('step', 0):,} of {run.config.train.steps:,}")]
    if last:
        rows.append(("training loss", f"{last['loss']:.4f}" if last["loss"] is not None else "not finite"))
    if evaluations := run.series("valid_loss"):
        step, best = min(evaluations, key=lambda point: point[1])
        rows.append(("validation loss", f"{evaluations[-1][1]:.4f}; lowest {best:.4f} after step {step:,}"))
    if rates:
        rows.append(("tokens per second", f"{statistics.median(rates):,.0f} (median)"))
    if peak := last.get("memory_allocated_peak"):
        rows.append(("memory of rank 0", f"{amount(peak)}, {amount(memory.stages[0].peak)} planned"))
    return rows


def page(run: Run) -> str:
    """The whole HTML."""
    memory = plan(run.config, run.world_size, gpu=run.on_gpu)
    layout = ", ".join(f"{axis} {size}" for axis, size in run.layout.items())
    name, commit = html.escape(str(run.path)), html.escape(str(run.facts.get("commit") or "unknown"))
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in facts(run, memory))
    settings = html.escape(json.dumps(run.facts["config"], indent=1))
    return "\n".join(
        [
            f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{name}</title>",
            f"<style>{_STYLE}</style></head><body><h1>{name}</h1>",
            f"<p class='facts'>{html.escape(layout)}; run {html.escape(run.run_id)}, commit {commit}</p>",
            f"<table>{rows}</table>",
            "<h2>Steps</h2><div class='charts'>",
            *charts(run),
            "</div><h2>Memory</h2>",
            memory_bars(memory),
            "<h2>Timeline of a step</h2>",
            *timelines(run, memory),
            f"<h2>Settings</h2><details><summary>all of them</summary><pre>{settings}</pre></details>",
            "</body></html>",
        ]
    )


def main() -> None:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="the metrics, or the directory that they are in")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html beside the metrics")
    arguments = parser.parse_args()
    run = Run(arguments.run)
    output = arguments.output or run.path.with_name("report.html")
    output.write_text(page(run))
    print(output)


if __name__ == "__main__":
    run_script(main)
