"""Measures training speed under several layouts, one after the other, and prints one Markdown table.

    python tools/benchmark_layouts.py --runs dp=4,zero=1,mbs=2 tp=2,dp=2,zero=1,mbs=2 pp=4,mbs=1 \\
        --model.preset llama3-8b --data.seq_length 4096 --train.global_batch_size 8 [--section.field VALUE ...]

Settings are those of tools/benchmark.py, which each run is. Losses are compared with the first run's: they are of the
same tokens where the runs have one train.global_batch_size. With --gpu the plan for such a chip stands beside what was
measured. A run that fails has its reason in the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.command_line import run_script
from megazero.errors import CommandLine, ConfigError, LaunchError
from tools.layout_runs import HELP, benchmark, check_outputs, parse_run

HEADINGS = ("run", "tokens/s per GPU", "TFLOP/s", "MFU", "peak GiB", "exposed communication", "largest loss difference")
PLANNED = ("planned tokens/s", "planned GiB")


def planned(run: str, common: Sequence[str], gpu: str) -> tuple[str, str]:
    """Cells for what megazero/planner expects on such chips; empty where the run will say why it does not work."""
    from megazero.planner.chips import load_chip
    from megazero.planner.memory import plan
    from megazero.planner.step_time import step_time
    from tools.benchmark import load_settings, parse_arguments

    processes, flags = parse_run(run)
    own, settings = parse_arguments([*common, *flags])
    try:
        config = load_settings(settings, own.warmup + own.measure, processes)
    except ConfigError:
        return "", ""
    seconds = step_time(config, processes, load_chip(gpu)).seconds
    tokens = config.train.global_batch_size * config.data.seq_length / processes
    return f"{tokens / seconds:,.0f}", f"{plan(config, processes).fullest.peak / 2**30:.1f}"


def row(run: str, found: dict[str, Any], reference: list[float]) -> tuple[str, ...]:
    """Cells of the table; those that a CPU does not know are empty."""
    mfu, peak, times = found["mfu"], found["memory_allocated_peak"], found["device_time"]
    exposed = max((time["exposed"] / time["span"] for time in times), default=None)
    difference = max(abs(a - b) for a, b in zip(found["losses"], reference))
    return (
        run,
        f"{found['tokens_per_second_per_gpu']:,.0f}",
        f"{found['model_tflops_per_gpu']:.1f}",
        "" if mfu is None else f"{mfu:.1%}",
        "" if peak is None else f"{peak / 2**30:.1f}",
        "" if exposed is None else f"{exposed:.1%} of the step",
        f"{difference:.1e}",
    )


def main() -> None:
    parser = CommandLine(
        description=f"{__doc__}\n{HELP}", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--runs", nargs="+", required=True, metavar="RUN", help="the layouts; losses against the first")
    parser.add_argument("--gpu", help="also plan for this chip: a name that tools/plan_layout.py knows, or a file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also append every run's report to this file")
    arguments, common = parser.parse_beside_settings()
    check_outputs(arguments, "json")
    for run in arguments.runs:
        parse_run(run)
    plans = [planned(run, common, arguments.gpu) if arguments.gpu else () for run in arguments.runs]
    headings = (*HEADINGS, *(PLANNED if arguments.gpu else ()))
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}", flush=True)
    reference: list[float] = []
    failed = False
    for run, plan in zip(arguments.runs, plans, strict=True):
        try:
            found = benchmark(run, common)
        except LaunchError as error:
            print(f"| {run} | {error} |", flush=True)
            failed = True
            continue
        reference = reference or found["losses"]
        print(f"| {' | '.join((*row(run, found, reference), *plan))} |", flush=True)
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps({"run": run, **found}) + "\n")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
