"""benchmark_layouts.py: a row a run, losses of one run beside another's, and a run that fails."""

import json
import subprocess
import sys

import pytest

from megazero.config import load_config
from megazero.planner.chips import CHIPS
from megazero.planner.memory import plan
from megazero.planner.step_time import step_time
from tests.engine import tiny
from tools.layout_runs import parse_run


@pytest.mark.whole
def test_a_table_of_layouts(tmp_path):
    settings = {
        name: value for name, value in tiny.tiny(tmp_path, {}).items() if name.startswith(("model", "parallel"))
    }
    settings |= {"data.seq_length": 16, "train.global_batch_size": 4}
    runs = ["mbs=1", "tp=2,zero=1,mbs=2", "mbs=3"]
    script = [sys.executable, str(tiny.ROOT / "tools" / "benchmark_layouts.py"), "--warmup", "1", "--measure", "2"]
    script += ["--gpu", "h200"]
    command = [*script, "--json", str(tmp_path / "found.jsonl"), "--runs", *runs, *tiny.flags(settings)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()][2:]
    assert [row[0] for row in rows] == runs, done.stdout + done.stderr
    assert rows[0][6] == "0.0e+00" and float(rows[1][6]) < 1e-5
    for run, row in zip(runs[:2], rows, strict=False):
        processes, flags = parse_run(run)
        config = load_config([*tiny.flags(settings), *flags], world_size=processes, needs_data=False)
        seconds, peak = step_time(config, processes, CHIPS["h200"]).seconds, plan(config, processes).fullest.peak
        assert row[7:] == [f"{4 * 16 / processes / seconds:,.0f}", f"{peak / 2**30:.1f}"]
    assert float(rows[0][1].replace(",", "")) > 0 and "failed with exit code" in rows[2][1]
    assert "4 is not a multiple of train.micro_batch_size x dp = 3 x 1" in done.stderr
    assert done.returncode == 1
    first, second = map(json.loads, (tmp_path / "found.jsonl").read_text().splitlines())
    assert len(first["losses"]) == len(second["losses"]) == 3
    assert second["layout"] == {"tp": 2, "pp": 1, "dp": 1, "zero_stage": 1}
