"""Holds plans against this machine's GPUs: settings drawn from a grid, each planned, then run for a few steps.

    python tools/check_planner.py --gpu h200 --draw 12 --seed 0

The grid is that of SHAPES, LAYOUTS, STAGES, RECOMPUTE and MICRO_BATCHES below, four micro-batches a step; the layouts
of more GPUs than there are here are left out. CALIBRATION runs first, and the chip's efficiencies are fitted to that
one run; the table shows the step's time planned before and after, and what the host takes to issue it. A run that fails
is a row of the table. Other settings are those of pretrain/gpt.py. Exit code 1 where a plan is further off than
--memory or --time allows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.command_line import run_script
from megazero.config import Config, load_config
from megazero.errors import CommandLine, ConfigError, LaunchError
from megazero.planner.chips import CHIPS, Chip, load_chip
from megazero.planner.fit import Measured, fitted
from megazero.planner.memory import plan
from megazero.planner.step_time import step_time
from tools.layout_runs import benchmark, check_counts, check_outputs, gpus_or_all, parse_run

SHAPES = {"gpt2-124m": 1024, "gpt2-355m": 1024, "gpt3-1.3b": 2048, "llama3.2-1b": 4096, "llama3.2-3b": 4096}
"""Preset and sequence length."""

LAYOUTS = ("dp=1", "tp=2", "pp=2", "dp=2")
STAGES = (0, 1, 2, 3)
RECOMPUTE = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8)
ACCUMULATED = 4
HEADINGS = ("setting", "ms a step", "of the host", "planned", "", "calibrated", "", "peak GB", "planned", "")


class Setting(NamedTuple):
    """A point of the grid; what it says is spelled as tools/layout_runs.py reads it."""

    preset: str
    layout: str
    stage: int
    recompute: str
    micro_batch: int

    @property
    def run(self) -> str:
        return f"{self.layout},zero={self.stage},mbs={self.micro_batch},train.recompute={self.recompute}"

    @property
    def processes(self) -> int:
        return parse_run(self.layout)[0]

    def flags(self, common: Sequence[str]) -> list[str]:
        """What the run shares with no other, less what `run` says."""
        batch = ACCUMULATED * self.micro_batch * (self.processes if self.layout.startswith("dp") else 1)
        lengths = ["--data.seq_length", str(SHAPES[self.preset]), "--train.global_batch_size", str(batch)]
        return ["--model.preset", self.preset, *lengths, "--train.precision", "bf16", *common]

    def config(self, common: Sequence[str]) -> Config:
        flags = [*self.flags(common), *parse_run(self.run)[1]]
        return load_config(flags, world_size=self.processes, needs_data=False)


CALIBRATION = Setting("gpt3-1.3b", "dp=1", 0, "none", 4)


class Result(NamedTuple):
    """``report``: tools/benchmark.py's, None where the run failed."""

    setting: Setting
    config: Config
    report: dict[str, Any] | None
    failure: str = ""

    @property
    def seconds(self) -> float | None:
        return self.report and self.report["seconds_per_step"]

    @property
    def peak(self) -> int | None:
        return self.report and self.report["memory_allocated_peak"]


def grid(gpus: int) -> list[Setting]:
    points = itertools.starmap(Setting, itertools.product(SHAPES, LAYOUTS, STAGES, RECOMPUTE, MICRO_BATCHES))
    # One GPU has nothing to shard: its stages would be one setting, drawn four times as often.
    return [point for point in points if point.processes <= gpus and (point.processes > 1 or not point.stage)]


def measure(setting: Setting, common: Sequence[str], steps: Sequence[str]) -> Result:
    config = setting.config(common)
    try:
        return Result(setting, config, benchmark(setting.run, [*setting.flags(common), *steps]))
    except LaunchError as error:
        return Result(setting, config, None, str(error))


def error_of(planned: float, measured: float | None) -> float | None:
    """Relative; None where nothing was measured."""
    return planned / measured - 1 if measured else None


class Errors(NamedTuple):
    """Of time before and after calibration, and of memory."""

    time: float | None
    calibrated: float | None
    memory: float | None


def errors(result: Result, chip: Chip, better: Chip) -> Errors:
    count, peak = result.setting.processes, plan(result.config, result.setting.processes).fullest.peak
    times = (error_of(step_time(result.config, count, kind).seconds, result.seconds) for kind in (chip, better))
    return Errors(*times, error_of(peak, result.peak))


def row(result: Result, chip: Chip, better: Chip) -> str:
    """A line of the table."""
    count, found = result.setting.processes, errors(result, chip, better)
    shown = ["" if error is None else f"{error:+.1%}" for error in found]
    times = [f"{1e3 * step_time(result.config, count, kind).seconds:.1f}" for kind in (chip, better)]
    peak = plan(result.config, count).fullest.peak
    cells = (
        f"{result.setting.preset} {result.setting.run}",
        "failed" if result.report is None else f"{1e3 * result.seconds:.1f}",
        "" if result.report is None else f"{1e3 * result.report['host_seconds_per_step']:.1f}",
        *(times[0], shown[0], times[1], shown[1]),
        "" if result.peak is None else f"{result.peak / 1e9:.2f}",
        *(f"{peak / 1e9:.2f}", shown[2]),
    )
    return f"| {' | '.join(cells)} |"


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--gpu", required=True, help=f"{', '.join(CHIPS)}, or a YAML or JSON file")
    parser.add_argument("--gpus", type=int, metavar="N", help="the most to use (default: all of this machine)")
    parser.add_argument("--draw", type=int, default=12, metavar="K", help="settings to run (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock starts (default: 3)")
    parser.add_argument("--measure", type=int, default=6, help="steps that are timed (default: 6)")
    parser.add_argument("--memory", type=float, default=0.05, help="largest relative error of the peak (default: 0.05)")
    parser.add_argument("--time", type=float, default=0.1, help="and of the calibrated time (default: 0.1)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append a JSON line for each run")
    arguments, settings = parser.parse_beside_settings(argv)
    check_counts(arguments, "gpus", "draw", "warmup", "measure")
    arguments.gpus = gpus_or_all(arguments.gpus)
    check_outputs(arguments, "record")
    return arguments, settings


def main() -> None:
    arguments, common = parse_arguments(sys.argv[1:])
    chip, steps = load_chip(arguments.gpu), ["--warmup", str(arguments.warmup), "--measure", str(arguments.measure)]
    points = grid(arguments.gpus)
    if arguments.draw > len(points):
        raise ConfigError.single("--draw", f"{arguments.draw} is more than the grid's {len(points)}")
    drawn = random.Random(arguments.seed).sample(points, arguments.draw)
    calibration = measure(CALIBRATION, common, steps)
    if calibration.report is None:
        raise LaunchError(f"the calibration run failed: {calibration.failure}")
    better = fitted(chip, [Measured(calibration.config, 1, calibration.seconds)])
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}\n{row(calibration, chip, better)}", flush=True)
    results = []
    for setting in drawn:
        results.append(measure(setting, common, steps))
        print(row(results[-1], chip, better), flush=True)
        if arguments.record:
            with arguments.record.open("a") as file:
                found = errors(results[-1], chip, better)._asdict()
                file.write(json.dumps({**setting._asdict(), **found, "measured": results[-1].report}) + "\n")
    found = [errors(result, chip, better) for result in results]
    time = max((abs(error.calibrated) for error in found if error.calibrated is not None), default=0.0)
    memory = max((abs(error.memory) for error in found if error.memory is not None), default=0.0)
    print(f"{len(results)} settings: time at most {time:.1%} off after calibration, memory {memory:.1%}")
    if time > arguments.time or memory > arguments.memory or any(result.report is None for result in results):
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
