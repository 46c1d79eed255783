"""What each pipeline rank does when in a step: a schedule on paper, or a step that a run has recorded.

tools/draw_timeline.py --schedule interleaved --stages 4 --chunks 2 --micro-batches 8 --svg FILE.svg
tools/draw_timeline.py --recorded DIR [--step N] --svg FILE.svg --trace FILE.json

DIR is a run's log.timeline. A trace opens in ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.command_line import run_script
from megazero.errors import CommandLine, ConfigError
from megazero.pipeline.schedules import COMMUNICATION, Action, Kind, ScheduleName, activation_bound, build_schedule
from megazero.pipeline.simulate import simulate
from megazero.telemetry.timeline import (
    Bar,
    bubble_fraction,
    chrome_trace,
    measured_bars,
    planned_bars,
    timeline_svg,
)


def parse_arguments() -> argparse.Namespace:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--schedule", choices=get_args(ScheduleName), default="1f1b", help="(default: 1f1b)")
    add("--stages", type=int, default=4, metavar="N", help="pipeline ranks (default: 4)")
    add("--chunks", type=int, default=1, metavar="N", help="model chunks of a rank (default: 1)")
    add("--micro-batches", type=int, default=8, metavar="N", help="in a step (default: 8)")
    add("--forward", type=float, default=1.0, metavar="MS", help="of one micro-batch through a rank (default: 1)")
    add("--backward", type=float, default=2.0, metavar="MS", help="(default: 2)")
    add("--transfer", type=float, default=0.0, metavar="MS", help="of one micro-batch between ranks (default: 0)")
    add("--recorded", type=Path, metavar="DIR", help="draw a recorded step instead")
    add("--step", type=int, metavar="N", help="which one (default: the last)")
    add("--svg", type=Path, metavar="FILE", help="a picture")
    add("--trace", type=Path, metavar="FILE", help="a trace as JSON")
    arguments = parser.parse_args()
    for name in ("stages", "chunks", "micro_batches"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    for name in ("forward", "backward", "transfer"):
        if not 0 <= getattr(arguments, name) < float("inf"):
            parser.error(f"--{name} must be a number of milliseconds, at least 0")
    return arguments


def planned(arguments: argparse.Namespace) -> tuple[str, list[Bar]]:
    name, stages, chunks = arguments.schedule, arguments.stages, arguments.chunks
    if chunks > 1 and name != "interleaved":
        raise ConfigError.single("--chunks", f"{name} has 1; --schedule interleaved has several")
    for flag, given in (("--chunks", chunks), ("--stages", stages)):
        if name == "interleaved" and given < 2:
            raise ConfigError.single(flag, f"{given} is too few for --schedule interleaved; give 2 or more")
    forward, backward = arguments.forward / chunks, arguments.backward / chunks
    times = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    times |= dict.fromkeys((Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT), backward / 2)

    def cost(rank: int, action: Action) -> float:
        return (arguments.transfer if action.kind in COMMUNICATION else times.get(action.kind, 0.0)) / 1e3

    bars = planned_bars(simulate(build_schedule(name, stages, arguments.micro_batches, chunks), cost))
    held = activation_bound(name, stages, arguments.micro_batches, 0, chunks) / chunks
    parts = f"{stages} ranks{f' of {chunks} chunks' if chunks > 1 else ''}, {arguments.micro_batches} micro-batches"
    return f"{name}: {parts}; at most {held:g} held at once", bars


def recorded(arguments: argparse.Namespace) -> tuple[str, list[Bar]]:
    steps = measured_bars(arguments.recorded)
    step = max(steps, default=None) if arguments.step is None else arguments.step
    if step not in steps:
        there = ", ".join(map(str, sorted(steps))) or "none"
        raise ConfigError.single("--step", f"{step} is not recorded by every rank; these are: {there}")
    return f"step {step}, recorded in {arguments.recorded}", steps[step]


def main() -> None:
    arguments = parse_arguments()
    title, bars = recorded(arguments) if arguments.recorded else planned(arguments)
    title += f"; bubble {bubble_fraction(bars):.1%}"
    print(title)
    if arguments.svg:
        arguments.svg.write_text(timeline_svg(title, bars))
        print(arguments.svg)
    if arguments.trace:
        arguments.trace.write_text(json.dumps(chrome_trace(bars)))
        print(arguments.trace)


if __name__ == "__main__":
    run_script(main)
