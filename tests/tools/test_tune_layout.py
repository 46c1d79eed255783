"""tools/tune_layout.py with the runs replaced: some give figures, some fail."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megazero.config import load_config
from megazero.errors import LaunchError, MegazeroError
from megazero.planner.chips import CHIPS, load_chip
from megazero.planner.step_time import step_time
from tools import benchmark, layout_runs, tune_layout
from tools.layout_runs import parse_run

TRUE = CHIPS["h200"].model_copy(
    update={"efficiency": CHIPS["h200"].efficiency.model_copy(update={"matmul": 0.5, "attention": 0.4})}
)
SETTINGS = (
    "--model",
    "llama3-8b",
    "--gpu",
    "h200",
    "--gpus",
    "8",
    "--seq-length",
    "4096",
    "--train.grad_dtype",
    "bf16",
)


class Runs:
    """Stands for tools/layout_runs.launch: a chip slower than the table's, on which the ``failing``-th run fails."""

    def __init__(self, *failing: int) -> None:
        self.failing, self.seen = failing, []

    def launch(self, text: str, script: Path, arguments: Sequence[str]) -> str:
        processes, flags = parse_run(text)
        self.seen.append(text)
        if len(self.seen) - 1 in self.failing:
            raise LaunchError(f"the run {text!r} failed with exit code 1; what it said is above")
        settings = [*arguments[: arguments.index("--warmup")], *flags]
        config = load_config(settings, world_size=processes, needs_data=False)
        assert config.train.grad_dtype == "bf16" and config.data.seq_length == 4096
        seconds = step_time(config, processes, TRUE).seconds
        tokens = config.train.global_batch_size * 4096 / seconds / processes
        report = {"tokens_per_second_per_gpu": tokens, "seconds_per_step": seconds, "memory_allocated_peak": 10**11}
        return f"{json.dumps(report)}\n| a row |\n"


def tune(monkeypatch: pytest.MonkeyPatch, runs: Runs, *arguments: str) -> None:
    monkeypatch.setattr(layout_runs, "launch", runs.launch)
    monkeypatch.setattr(sys, "argv", ["tune_layout.py", *SETTINGS, *arguments])
    tune_layout.main()


def test_planned_beside_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    files = {name: tmp_path / name for name in ("record.jsonl", "chip.json", "best.sh")}
    arguments = [f"{flag}={path}" for flag, path in zip(("--record", "--chip-file", "--script"), files.values())]
    runs = Runs(1)
    tune(monkeypatch, runs, "--top", "3", *arguments)
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| tp=")]
    assert len(rows) == 3 and [" failed " in row for row in rows] == [False, True, False]
    assert "efficiency.matmul: 0.680 -> 0.5" in "\n".join(lines) and " +" in rows[0] and "100.0" in rows[0]
    records = [json.loads(line) for line in files["record.jsonl"].read_text().splitlines()]
    assert [record["failure"] is None for record in records] == [True, False, True]
    assert (
        records[0]["layout"]["tp"] >= 1
        and records[0]["measured"]["seconds_per_step"] > records[0]["planned"]["seconds"]
    )
    fitted = load_chip(str(files["chip.json"]))
    assert fitted.efficiency.matmul == pytest.approx(0.5, rel=0.1)
    fastest = next(line for line in lines if line.startswith("fastest: "))
    assert fastest.removeprefix("fastest: ") in files["best.sh"].read_text()


def test_settings_of_a_whole_run_do_not_keep_short_ones_from_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "whole.yaml"
    file.write_text(
        "model: {preset: llama3-8b}\n"
        "train: {steps: 5000, rampup_batch_size: [8, 8, 1000]}\n"
        "optimizer: {lr: 1e-3, schedule: wsd, warmup_steps: 50, decay_steps: 1000}\n"
    )

    def launch(text: str, script: Path, arguments: Sequence[str]) -> str:
        own, settings = benchmark.parse_arguments([*arguments, *parse_run(text)[1]])
        config = benchmark.load_settings(settings, own.warmup + own.measure, 8)
        assert config.optimizer.lr == 1e-3 and config.optimizer.warmup_steps == own.warmup + own.measure
        return Runs().launch(text, script, arguments)

    monkeypatch.setattr(layout_runs, "launch", launch)
    monkeypatch.setattr(sys, "argv", ["tune_layout.py", *SETTINGS, "--model", str(file), "--top", "1"])
    tune_layout.main()


def test_a_run_without_a_report_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    for output in ("", "no JSON\n", '{"tokens_per_second_per_gpu": 1'):
        monkeypatch.setattr(layout_runs, "launch", lambda *_, output=output: output)
        with pytest.raises(LaunchError, match="the run 'dp=1' ended without a report"):
            layout_runs.benchmark("dp=1", [])


def test_all_runs_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MegazeroError, match="all 2 layouts failed"):
        tune(monkeypatch, Runs(0, 1), "--top", "2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--top", "0"), "--top: 0 must be at least 1"),
        (("--chip-file", "chip.txt"), "chip.txt must end in .json"),
        (("--record", "/proc/nowhere/runs.jsonl"), "--record: /proc/nowhere cannot be made"),
        (("--zero.stage", "1"), "is what the search chooses"),
        (("--model", "llama3-70b", "--gpus", "1"), "no layout fits"),
    ],
)
def test_mistakes(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(MegazeroError, match=message):
        tune(monkeypatch, Runs(), *arguments)


def test_without_a_gpu_the_number_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(LaunchError, match="there is no GPU here"):
        tune_layout.parse_arguments(["--model", "gpt2-124m", "--gpu", "h200"])
