"""tools/check_planner.py with the runs replaced by a chip slower than the table's."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megazero.config import load_config
from megazero.errors import LaunchError, MegazeroError
from megazero.planner.chips import CHIPS
from megazero.planner.memory import plan
from megazero.planner.step_time import step_time
from tools import check_planner, layout_runs
from tools.layout_runs import parse_run

SLOWER = CHIPS["h200"].model_copy(
    update={"efficiency": CHIPS["h200"].efficiency.model_copy(update={"matmul": 0.5, "attention": 0.4})}
)


class Runs:
    """Stands for tools/layout_runs.launch. ``failing``: number of the run that fails; ``memory``: share of the plan's
    that is measured."""

    def __init__(self, failing: int | None = None, memory: float = 1.0) -> None:
        self.failing, self.memory, self.seen = failing, memory, []

    def launch(self, text: str, script: Path, arguments: Sequence[str]) -> str:
        processes, flags = parse_run(text)
        self.seen.append((arguments[1], text))
        if len(self.seen) - 1 == self.failing:
            raise LaunchError("exit code 1")
        settings = [*arguments[: arguments.index("--warmup")], *flags]
        config = load_config(settings, world_size=processes, needs_data=False)
        seconds, peak = step_time(config, processes, SLOWER).seconds, plan(config, processes).fullest.peak
        found = {"seconds_per_step": seconds, "host_seconds_per_step": 0.01}
        return json.dumps({**found, "memory_allocated_peak": int(self.memory * peak)}) + "\n| a row |\n"


def check(monkeypatch: pytest.MonkeyPatch, runs: Runs, *arguments: str) -> None:
    monkeypatch.setattr(layout_runs, "launch", runs.launch)
    monkeypatch.setattr(sys, "argv", ["check_planner.py", "--gpu", "h200", "--gpus", "2", *arguments])
    check_planner.main()


def test_a_calibrated_chip_is_held_against_what_was_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    runs = Runs()
    check(monkeypatch, runs, "--draw", "5", f"--record={tmp_path / 'record.jsonl'}")
    lines = capsys.readouterr().out.splitlines()
    assert runs.seen[0] == ("gpt3-1.3b", check_planner.CALIBRATION.run) and len(set(runs.seen[1:])) == 5
    records = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert all(abs(record["memory"]) < 1e-9 for record in records)
    assert min(record["time"] for record in records) < -0.2
    assert all(abs(record["calibrated"]) < 0.02 for record in records)
    assert lines[-1].startswith("5 settings: time at most ") and len(lines) == 2 + 1 + 5 + 1
    again = Runs()
    check(monkeypatch, again, "--draw", "5")
    assert again.seen == runs.seen


@pytest.mark.parametrize("runs", [Runs(failing=2), Runs(memory=0.9)], ids=["a run fails", "memory is off"])
def test_what_is_off_ends_with_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, runs: Runs
) -> None:
    with pytest.raises(SystemExit) as stopped:
        check(monkeypatch, runs, "--draw", "3")
    assert stopped.value.code == 1
    assert (" failed " in capsys.readouterr().out) == (runs.failing is not None)


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MegazeroError, match="the calibration run failed"):
        check(monkeypatch, Runs(failing=0))
    with pytest.raises(MegazeroError, match="--draw: 100000 is more than the grid's"):
        check(monkeypatch, Runs(), "--draw", "100000")
    with pytest.raises(MegazeroError, match="--measure: 0 must be at least 1"):
        check(monkeypatch, Runs(), "--measure", "0")
