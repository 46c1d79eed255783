"""Runs the layouts that a plan ranks first for a few steps each on this machine's GPUs, planned beside measured.

    python tools/tune_layout.py --model llama3-8b --gpu h200 --seq-length 4096 --record runs/tune.jsonl --script best.sh

Each run is a process group of its own: one that runs out of memory or crashes is a line of the table. The
chip's efficiencies are fitted to what was measured, and --chip-file keeps them for tools/plan_layout.py --gpu FILE.
Other settings are those of pretrain/gpt.py, e.g. --train.grad_dtype bf16.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.command_line import run_script
from megazero.config import Config
from megazero.errors import CommandLine, ConfigError, LaunchError
from megazero.planner.chips import CHIPS, Chip, load_chip
from megazero.planner.fit import SHARES, Measured, fitted
from megazero.planner.search import Plan, search
from megazero.planner.step_time import step_time
from tools.layout_runs import benchmark, check_counts, check_outputs, gpus_or_all
from tools.plan_layout import base_config, given_settings, launch_script, setting_flags, write

HEADINGS = ("layout", "tokens/s per GPU", "planned", "error", "peak GB", "planned", "error")
SAMPLES_PER_GPU = 8  # where no batch is given


class Run(NamedTuple):
    """``report``: tools/benchmark.py's of a plan's layout, None where it failed; ``failure``: why."""

    plan: Plan
    report: dict[str, Any] | None
    failure: str = ""


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="a preset, a file of settings, or a Hugging Face directory")
    parser.add_argument("--gpu", required=True, help=f"{', '.join(CHIPS)}, or a YAML or JSON file")
    parser.add_argument("--gpus", type=int, metavar="N", help="(default: all of this machine)")
    parser.add_argument("--seq-length", type=int, metavar="TOKENS", help="as for tools/plan_layout.py")
    parser.add_argument(
        "--global-batch-size", type=int, metavar="SAMPLES", help=f"per step (default: {SAMPLES_PER_GPU} for each GPU)"
    )
    parser.add_argument("--top", type=int, default=4, metavar="K", help="layouts to run (default: 4)")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the clock starts (default: 4)")
    parser.add_argument("--measure", type=int, default=8, help="steps that are timed (default: 8)")
    parser.add_argument("--record", type=Path, metavar="FILE", help="append a JSON line for each run")
    parser.add_argument("--chip-file", type=Path, metavar="FILE.json", help="write the chip with fitted efficiencies")
    parser.add_argument("--script", type=Path, metavar="FILE", help="write a script that launches the fastest layout")
    arguments, settings = parser.parse_beside_settings(argv)
    check_counts(arguments, "gpus", "top", "warmup", "measure", "seq_length", "global_batch_size")
    arguments.gpus = gpus_or_all(arguments.gpus)
    if arguments.chip_file and arguments.chip_file.suffix != ".json":
        raise ConfigError.single("--chip-file", f"{arguments.chip_file} must end in .json")
    check_outputs(arguments, "record", "chip_file", "script")
    return arguments, settings


def spelled(plan: Plan) -> str:
    """A layout as tools/layout_runs.py reads it."""
    choice = plan.choice
    text = f"tp={choice.tp},pp={choice.pp},dp={choice.dp},zero={choice.zero},mbs={choice.micro_batch}"
    text += f",train.recompute={choice.recompute}"
    return text + (f",parallel.virtual_pp={choice.virtual}" if choice.virtual > 1 else "")


def measure(plan: Plan, common: Sequence[str]) -> Run:
    """One run; a failure is a result."""
    try:
        return Run(plan, benchmark(spelled(plan), common))
    except LaunchError as error:
        return Run(plan, None, str(error))


def row(run: Run) -> tuple[str, ...]:
    """Cells of the table."""
    planned = (f"{run.plan.tokens_per_second:,.0f}", f"{run.plan.memory.peak / 1e9:.1f}")
    if run.report is None:
        return (str(run.plan.choice), "failed", planned[0], "", "", planned[1], "")
    tokens, peak = run.report["tokens_per_second_per_gpu"], run.report["memory_allocated_peak"]
    return (
        str(run.plan.choice),
        f"{tokens:,.0f}",
        planned[0],
        f"{run.plan.tokens_per_second / tokens - 1:+.1%}",
        "" if peak is None else f"{peak / 1e9:.1f}",
        planned[1],
        "" if peak is None else f"{run.plan.memory.peak / peak - 1:+.1%}",
    )


def record(run: Run, chip: Chip, path: Path) -> None:
    """Append what was planned and what came of it."""
    planned = {"seconds": run.plan.time.seconds, "peak": run.plan.memory.peak}
    line = {"layout": run.plan.choice._asdict(), "chip": chip.model_dump(), "planned": planned}
    with path.open("a") as file:
        file.write(json.dumps({**line, "failure": run.failure or None, "measured": run.report}) + "\n")


def fit_lines(chip: Chip, better: Chip, runs: Sequence[Measured]) -> Iterator[str]:
    """What was fitted, and what is left of the errors."""
    for name in SHARES:
        before, after = getattr(chip.efficiency, name), getattr(better.efficiency, name)
        if abs(after / before - 1) > 0.001:
            yield f"efficiency.{name}: {before:.3f} -> {after:.3f}"
    errors = [step_time(run.config, run.gpus, better).seconds / run.seconds - 1 for run in runs]
    yield f"with these, steps are planned to {max(map(abs, errors)):.1%} of what was measured"


def shortened(tree: dict[str, Any], steps: int) -> dict[str, Any]:
    """The settings for a run of so many steps: what only a whole run has room for is no part of a step's time."""
    tree = {section: dict(fields) for section, fields in tree.items() if section not in ("checkpoint", "log")}
    optimizer = tree.setdefault("optimizer", {})
    for name in ("schedule", "decay_steps"):
        optimizer.pop(name, None)
    if (warmup := optimizer.get("warmup_steps")) is not None:
        optimizer["warmup_steps"] = min(int(warmup), steps)
    tree.setdefault("train", {}).pop("rampup_batch_size", None)
    return tree


def common_flags(config: Config, tree: dict[str, Any], arguments: argparse.Namespace) -> list[str]:
    """What all runs share."""
    tree = shortened(tree, arguments.warmup + arguments.measure)
    return [
        *setting_flags(tree),
        *(("--model.preset", tree["model"]["preset"]) if "preset" in tree["model"] else ()),
        *("--data.seq_length", str(config.data.seq_length)),
        *("--train.global_batch_size", str(config.train.global_batch_size)),
        *("--warmup", str(arguments.warmup), "--measure", str(arguments.measure)),
    ]


def main() -> None:
    arguments, settings = parse_arguments(sys.argv[1:])
    chip = load_chip(arguments.gpu)
    if arguments.global_batch_size is None:
        arguments.global_batch_size = SAMPLES_PER_GPU * arguments.gpus
    tree = given_settings(arguments, settings)
    config = base_config(tree, arguments.gpus)
    found = search(config, arguments.gpus, chip, arguments.top)
    if not found.plans:
        raise LaunchError("no layout fits; tools/plan_layout.py says why")
    common = common_flags(config, tree, arguments)
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}", flush=True)
    runs = []
    for plan in found.plans:
        runs.append(measure(plan, common))
        print(f"| {' | '.join(row(runs[-1]))} |", flush=True)
        if arguments.record:
            record(runs[-1], chip, arguments.record)
    done = [(run.report["seconds_per_step"], run) for run in runs if run.report is not None]
    if not done:
        raise LaunchError(f"all {len(runs)} layouts failed; what they said is above")
    measured = [Measured(run.plan.config, arguments.gpus, seconds) for seconds, run in done]
    better = fitted(chip, measured)
    print("\n".join(fit_lines(chip, better, measured)))
    if arguments.chip_file:
        write(arguments.chip_file, better.model_dump_json(indent=2) + "\n")
    _, best = min(done, key=lambda item: item[0])
    print(f"fastest: {best.plan.choice}")
    if arguments.script:
        write(arguments.script, launch_script(best.plan, arguments, tree, chip))


if __name__ == "__main__":
    run_script(main)
