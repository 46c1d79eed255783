"""Metrics of a real run, stopped and resumed: through pretrain/gpt.py, into an offline W&B run and a JSONL file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megazero.telemetry.commit import running_commit
from tests.forked_scripts import run_forked
from tests.telemetry.wandb_file import read_run

ROOT = Path(__file__).resolve().parents[2]


def train(folder: Path, steps: int) -> None:
    tokens = ROOT / "tests" / "fixtures" / "oracle" / "gpt2-tied" / "tokens"
    settings = {
        "model.num_layers": 2,
        "model.hidden_size": 32,
        "model.num_attention_heads": 2,
        "model.vocab_size": 1024,
        "data.train": tokens,
        "data.valid": tokens,
        "data.seq_length": 16,
        "train.steps": steps,
        "train.global_batch_size": 4,
        "train.eval_interval": 2,
        "train.eval_steps": 1,
        "optimizer.schedule": "constant",
        "checkpoint.dir": "checkpoints",
        "checkpoint.save_interval": 2,
        "log.interval": 1,
        "log.jsonl": "metrics.jsonl",
        "log.wandb": "project",
    }
    flags = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    done = run_forked(ROOT / "pretrain" / "gpt.py", *flags, directory=folder, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr


def test_offline_wandb_run_equals_the_jsonl_series_and_resumes_under_its_id(tmp_path: Path):
    pytest.importorskip("wandb")
    train(tmp_path, 3)
    # As after a kill between step 3 and its save: the next process takes up step 2, and computes step 3 again.
    (newest,) = (tmp_path / "checkpoints").glob("step_*3")
    newest.rename(tmp_path / "elsewhere")
    train(tmp_path, 4)

    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "valid_loss" in line] == [2, 4]
    series: dict[int, dict] = {}
    for line in lines:
        series.setdefault(line.pop("step"), {}).update(line)

    runs = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert len(runs) == 2
    (first_id, first_config, before), (second_id, second_config, after) = map(read_run, runs)
    assert first_id == second_id
    assert (sorted(before), sorted(after)) == ([1, 2, 3], [3, 4])
    assert {step: row for step, row in before.items() if step < 3} | after == series
    for kept, steps in ((first_config, 3), (second_config, 4)):
        assert kept["layout"] == {"tp": 1, "pp": 1, "dp": 1, "zero_stage": 0}
        assert kept["commit"] == running_commit()
        assert kept["train"]["steps"] == steps and kept["model"]["hidden_size"] == 32
