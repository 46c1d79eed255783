"""Prints one table row for each run directory given: what its metrics.jsonl says, or why it has none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

HEADINGS = ("layout", "tokens/s", "TFLOP/s per GPU", "MFU", "peak memory GiB", "loss")


def row(run: Path) -> tuple[str, ...]:
    """Speed is the median over logging steps, the first left out: it holds start-up and compilation."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = [line for line in lines if "loss" in line]
    if not steps:
        log = (run / "log.txt").read_text().split("\n") if (run / "log.txt").exists() else []
        reason = next((line for line in reversed(log) if line.strip()), "it wrote no metrics")
        return (run.name, reason.strip())
    timed = steps[1:] or steps
    mfu, memory = timed[-1]["mfu"], timed[-1]["memory_allocated_peak"]
    return (
        run.name,
        f"{median(line['tokens_per_second'] for line in timed):,.0f}",
        f"{median(line['model_tflops_per_gpu'] for line in timed):.2f}",
        "" if mfu is None else f"{median(line['mfu'] for line in timed):.1%}",
        "" if memory is None else f"{memory / 2**30:.1f}",
        f"{steps[-1]['loss']:.4f}",
    )


def main() -> None:
    rows = [row(Path(name)) for name in sys.argv[1:]]
    full = [cells for cells in (HEADINGS, *rows) if len(cells) == len(HEADINGS)]
    widths = [max(len(cells[column]) for cells in full) for column in range(len(HEADINGS))]
    widths[0] = max(len(cells[0]) for cells in (HEADINGS, *rows))
    for cells in (HEADINGS, tuple("-" * width for width in widths), *rows):
        first, *others = (cell.ljust(width) for cell, width in zip(cells, widths))
        print("| " + " | ".join((first, *others) if len(cells) > 2 else (first, cells[1])) + " |")


if __name__ == "__main__":
    main()
