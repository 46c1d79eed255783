"""Trains the same steps under several layouts and says whether their losses agree as closely as rounding allows.

    python tools/compare_layouts.py --config FILE --runs mbs=8 mbs=16 dp=2,mbs=8 tp=2,mbs=8 [--section.field VALUE ...]

Settings are those of pretrain/gpt.py. Every run's loss at every step is compared with the first
run's. The second run is the measure: where it differs from the first in the micro-batch size alone, its differences
are those of rounding, and any other run may differ at most twice as much in the median and at the largest, and by 0.001
in the signed mean. Prints a table row per run; exit code 1 where one differs by more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.command_line import run_script
from megazero.config import load_config
from megazero.errors import CommandLine, ConfigError, LaunchError
from tools.layout_runs import HELP, ROOT, launch, parse_run

LARGEST_MEAN = 1e-3


class Difference(NamedTuple):
    """Of the losses of two runs, over all steps. ``mean`` keeps its sign."""

    median: float
    largest: float
    mean: float

    def within(self, measure: Difference) -> bool:
        medians, largest = self.median <= 2 * measure.median, self.largest <= 2 * measure.largest
        return medians and largest and abs(self.mean) <= LARGEST_MEAN


def difference(losses: list[float], reference: list[float]) -> Difference:
    signed = [a - b for a, b in zip(losses, reference, strict=True)]
    absolute = [abs(d) for d in signed]
    return Difference(median(absolute), max(absolute), fmean(signed))


def losses_of(text: str, common: list[str], metrics: Path) -> list[float]:
    """Train; the loss of every step."""
    always = ["--log.interval", "1", "--log.jsonl", str(metrics), "--train.eval_interval", "0"]
    launch(text, ROOT / "pretrain" / "gpt.py", [*common, *always])
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def main() -> None:
    parser = CommandLine(
        description=f"{__doc__}\n{HELP}", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--runs", nargs="+", required=True, metavar="RUN", help="the reference, the measure, the others"
    )
    arguments, common = parser.parse_beside_settings()
    runs: list[str] = arguments.runs
    if len(runs) < 2:
        raise LaunchError("--runs: give at least two, the reference and the measure")
    for run in runs:
        processes, flags = parse_run(run)
        if load_config([*common, *flags], world_size=processes).checkpoint.dir is not None:
            raise ConfigError.single("checkpoint.dir", "the runs would continue each other from there; leave it out")
    found: list[Difference] = []
    print("| run | median difference | largest | signed mean | |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory(prefix="megazero-compare-") as directory:
        reference = losses_of(runs[0], common, Path(directory) / "0.jsonl")
        for number, run in enumerate(runs[1:], start=1):
            found.append(difference(losses_of(run, common, Path(directory) / f"{number}.jsonl"), reference))
            verdict = "the measure" if number == 1 else "within" if found[-1].within(found[0]) else "TOO FAR"
            numbers = " | ".join(f"{value:.2g}" for value in found[-1])
            print(f"| {run} | {numbers} | {verdict} |", flush=True)
    print(f"{len(reference)} steps, against {runs[0]}, whose loss went from {reference[0]:.4f} to {reference[-1]:.4f}")
    if not all(other.within(found[0]) for other in found[1:]):
        sys.exit(1)


if __name__ == "__main__":
    run_script(main)
