"""compare_layouts.py: runs that differ by rounding alone are within, one that differs by more is not."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megazero.errors import LaunchError
from tests.engine import tiny
from tools import compare_layouts
from tools.compare_layouts import Difference, difference
from tools.layout_runs import parse_run


def test_the_measure_of_two_runs():
    found = difference([1.0, 2.0, 3.0, 3.0], [1.5, 2.0, 2.75, 2.75])
    assert found == Difference(0.25, 0.5, 0.0)
    assert found.within(Difference(0.125, 0.25, 0.1)), "twice as far, in both, is allowed"
    assert not found.within(Difference(0.12, 0.25, 0.0))
    assert not found.within(Difference(0.125, 0.24, 0.0))
    assert not Difference(0.1, 0.1, -2e-3).within(Difference(1.0, 1.0, 0.0))


def test_what_a_run_says():
    processes, flags = parse_run("tp=2, dp=3,zero=1,train.recompute=full")
    assert processes == 6
    assert flags == ["--parallel.tp", "2", "--zero.stage", "1", "--train.recompute", "full"]
    for wrong in ("tp", "dp=0", "cp=2", "tp=two"):
        with pytest.raises(LaunchError, match="--runs"):
            parse_run(wrong)


def test_rounding_is_within_and_another_learning_rate_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, ranks: Callable
) -> None:
    """On ranks that are there already; that `launch` starts its own is `test_benchmark_layouts`' to show."""

    def launch(run: str, script: Path, arguments: Sequence[str]) -> None:
        assert script == tiny.SCRIPT
        processes, flags = parse_run(run)
        words = [*arguments, *flags]
        ranks(
            processes, tiny.run_script, {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2])}
        )

    monkeypatch.setattr(compare_layouts, "launch", launch)
    settings = tiny.tiny(tiny.write_corpus(tmp_path), {"train.steps": 4})
    del settings["train.micro_batch_size"], settings["log.interval"]
    runs = ["--runs", "mbs=2", "mbs=4", "tp=2,mbs=4", "mbs=2,optimizer.min_lr=0.009"]
    monkeypatch.setattr(sys, "argv", ["compare_layouts.py", *runs, *tiny.flags(settings)])
    with pytest.raises(SystemExit) as ending:
        compare_layouts.main()
    out = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines() if line.startswith("|")][2:]
    assert [row[0] for row in rows] == runs[2:], out
    assert [row[4] for row in rows] == ["the measure", "within", "TOO FAR"], out
    assert max(float(row[2]) for row in rows[:2]) < 2e-6 * 6 < float(rows[2][2])
    assert ending.value.code == 1
    assert "4 steps, against mbs=2" in out
