"""compare_layouts.py: runs that differ by rounding alone are within, one that differs by more is not."""

import subprocess
import sys

import pytest

from megazero.errors import LaunchError
from tests.engine import tiny
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


@pytest.mark.whole
def test_rounding_is_within_and_another_learning_rate_is_not(tmp_path):
    corpus = tiny.write_corpus(tmp_path)
    settings = tiny.tiny(corpus, {"train.steps": 4})
    del settings["train.micro_batch_size"], settings["log.interval"]
    script = [sys.executable, str(tiny.ROOT / "tools" / "compare_layouts.py")]
    runs = ["--runs", "mbs=2", "mbs=4", "tp=2,mbs=4", "mbs=2,optimizer.min_lr=0.009"]
    done = subprocess.run([*script, *runs, *tiny.flags(settings)], capture_output=True, text=True, cwd=tmp_path)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line][2:]
    assert [row[0] for row in rows] == runs[2:], done.stdout + done.stderr
    assert [row[4] for row in rows] == ["the measure", "within", "TOO FAR"], done.stdout
    assert max(float(row[2]) for row in rows[:2]) < 2e-6 * 6 < float(rows[2][2])
    assert done.returncode == 1
    assert "4 steps, against mbs=2" in done.stdout
