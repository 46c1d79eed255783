"""Series as the sinks keep them: read back by other means than those that wrote them."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megazero.config import Config
from megazero.errors import ConfigError
from megazero.telemetry import Telemetry, sinks
from megazero.telemetry.commit import running_commit
from megazero.telemetry.console import Console, duration
from megazero.telemetry.sinks import JsonLines, WeightsAndBiases
from tests.telemetry.wandb_file import read_run

CPU = torch.device("cpu")


def config(**log: str) -> Config:
    return Config.from_dict(
        {
            "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 64},
            "parallel": {"tp": 2},
            "data": {"seq_length": 8},
            "train": {"steps": 6, "global_batch_size": 4},
            "log": log,
        }
    )


def run(settings: Config, steps: range, run_id: str | None = None, rank: int = 0, first: int = 0) -> Telemetry:
    telemetry = Telemetry(
        settings, settings.model.architecture, settings.layout(4), CPU, rank=rank, run_id=run_id, step=first
    )
    for step in steps:
        telemetry.log_step(
            step,
            loss=1 / step,
            grad_norm=step / 3,
            lr=1e-3 * step,
            consumed_samples=4 * step,
            tokens=32,
            extra=None,
            tokens_left=32,
        )
        if step % 2 == 0:
            telemetry.log_eval(step, valid_loss=2 / 3 + step)
    telemetry.close()
    return telemetry


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_step(path: Path) -> dict[int, dict]:
    series: dict[int, dict] = {}
    for line in lines(path):
        series.setdefault(line.pop("step"), {}).update(line)
    return series


def test_jsonl_has_every_key_and_every_digit(tmp_path: Path):
    path = tmp_path / "new folder" / "metrics.jsonl"
    run(config(jsonl=str(path)), range(1, 4))
    first, second, evaluation, third = lines(path)
    assert first["loss"] == 1.0 and third["loss"] == 1 / 3 and third["grad_norm"] == 1.0 and second["lr"] == 2e-3
    assert evaluation == {"step": 2, "valid_loss": 2 / 3 + 2}
    assert set(first) == {
        *("step", "loss", "grad_norm", "lr", "tokens_per_second", "model_tflops_per_gpu", "mfu"),
        *("memory_allocated_peak", "consumed_samples", "elapsed_s"),
    }
    assert first["mfu"] is None and first["memory_allocated_peak"] is None and third["consumed_samples"] == 12
    # 2 layers of 12 · 32² and a head of 64 · 32, at 6 FLOPs; attention 6 · 2 · 32 · 8; 4 processes.
    flops = 6 * (2 * 12 * 32**2 + 64 * 32) + 6 * 2 * 32 * 8
    assert first["model_tflops_per_gpu"] == pytest.approx(first["tokens_per_second"] * flops / 4 / 1e12)


def test_resumed_series_has_each_step_once_also_after_a_kill(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    settings = config(jsonl=str(path))
    run(settings, range(1, 6))
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    run(settings, range(3, 7), run_id="x", first=2)
    assert [line["step"] for line in lines(path) if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines(path) if "valid_loss" in line] == [2, 4, 6]


def test_a_new_run_moves_an_older_series_aside(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    run(config(jsonl=str(path)), range(1, 4))
    run(config(jsonl=str(path)), range(1, 2))
    assert [line["step"] for line in lines(path)] == [1]
    assert len(lines(tmp_path / "metrics.jsonl.previous")) == 4


def test_nan_and_infinity_are_null_in_strict_json(tmp_path: Path):
    sink = JsonLines(tmp_path / "m.jsonl")
    sink.start({}, {}, None, "id", 0)
    sink.log(1, {"loss": float("nan"), "grad_norm": float("inf"), "lr": 0.1 + 0.2})
    sink.close()
    assert (
        tmp_path / "m.jsonl"
    ).read_text() == '{"step": 1, "loss": null, "grad_norm": null, "lr": 0.30000000000000004}\n'


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture):
    telemetry = run(config(jsonl=str(tmp_path / "m.jsonl"), tensorboard=str(tmp_path / "tb")), range(1, 3), rank=1)
    telemetry.message("nothing")
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


@pytest.mark.parametrize("field", ["jsonl", "events"])
def test_unwritable_file_names_the_field(tmp_path: Path, field: str):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"log\.{field}: cannot write .*file/m\.jsonl"):
        run(config(**{field: str(tmp_path / "file" / "m.jsonl")}), range(1))


def test_missing_package_is_reported_on_every_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sinks.importlib.util, "find_spec", lambda name: None)
    for rank in (0, 3):
        with pytest.raises(ConfigError, match=r"log\.wandb: needs the package wandb"):
            run(config(wandb="p"), range(1), rank=rank)


def test_a_sink_that_fails_ends_neither_the_run_nor_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def broken(self: sinks.TensorBoard, step: int, metrics: dict) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(sinks.TensorBoard, "log", broken)
    run(config(jsonl=str(tmp_path / "m.jsonl"), tensorboard=str(tmp_path / "tb")), range(1, 5))
    assert len(lines(tmp_path / "m.jsonl")) == 6
    assert capsys.readouterr().out.count("TensorBoard: No space left on device; no further metrics go there") == 1


def test_heavy_sinks_are_imported_only_when_used():
    code = (
        "import sys, megazero.telemetry\n"
        "print([m for m in ('wandb', 'tensorboard', 'torch.utils.tensorboard', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_tensorboard_reads_the_series_back(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = config(jsonl=str(tmp_path / "m.jsonl"), tensorboard=str(tmp_path / "tb"))
    first = run(settings, range(1, 5))
    run(settings, range(3, 6), run_id=first.run_id, first=2)
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(step, pytest.approx(1 / step)) for step in (1, 2, 3, 4, 5)]
    assert [event.step for event in events.Scalars("valid_loss")] == [2, 4]


def test_offline_wandb_run_read_back_and_resumed_under_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    settings = config(jsonl=str(tmp_path / "m.jsonl"), wandb="project")
    first = run(settings, range(1, 4))
    second = run(settings, range(4, 7), run_id=first.run_id, first=3)
    # Its service process may write the end of a file after finish() has returned; it does not outlive ours.
    wandb.teardown()
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert len(files) == 2 and second.run_id == first.run_id

    series: dict[int, dict] = {}
    for file in files:
        run_id, kept, part = read_run(file)
        assert run_id == first.run_id
        assert kept["layout"] == {"tp": 2, "pp": 1, "dp": 2, "zero_stage": 0}
        assert kept["commit"] == running_commit()
        assert kept["train"]["global_batch_size"] == 4 and kept["model"]["hidden_size"] == 32
        series.update(part)
    assert series == by_step(tmp_path / "m.jsonl")


def test_wandb_without_network_or_key_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "a folder").mkdir()
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "a folder"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    run(config(wandb="project"), range(1, 3))
    said = " ".join(capsys.readouterr().out.split())
    assert "no API key found" in said and "`wandb sync " in said
    command = shlex.split(re.search("`(wandb sync [^`]*)`", said)[1])
    assert len(command) == 3 and Path(command[2]).is_dir(), "the command works as it is printed"

    start, modes = wandb.init, []

    def unreachable(**arguments: object) -> object:
        modes.append(arguments["mode"])
        if arguments["mode"] != "offline":
            raise wandb.errors.CommError("Run initialization has timed out\nmore")
        return start(**arguments)

    monkeypatch.setattr(wandb, "init", unreachable)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    run(config(wandb="project"), range(1, 3))
    assert modes == [None, "offline"]
    assert "cannot start a run online (Run initialization has timed out)" in capsys.readouterr().out


def test_wandb_whose_service_does_not_answer_keeps_the_metrics_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    wandb = pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name, value in {
        "WANDB_BASE_URL": "http://127.0.0.1:9",  # nothing listens there
        "WANDB_API_KEY": "0" * 40,
        "WANDB_DIR": str(tmp_path),
        "WANDB_CONFIG_DIR": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    quick = wandb.Settings(console="off", silent=True, init_timeout=1, login_timeout=15)
    monkeypatch.setattr(WeightsAndBiases, "_settings", staticmethod(lambda: quick))
    wandb.teardown()
    run(config(wandb="project"), range(1, 3))
    wandb.teardown()
    said = capsys.readouterr().out
    assert "cannot start a run online" in said and "`wandb sync " in said and "no further metrics" not in said
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert sorted(read_run(file)[2]) == [1, 2]


def test_plain_console_has_one_line_per_logging_step(capsys: pytest.CaptureFixture):
    run(config(), range(1, 3))
    first, second, evaluation = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"step 1/6  loss 1\.0000  lr 1\.00e-03  [\d,]+ tokens/s  \d+:\d\d left  grad norm 0\.333", first
    )
    assert second.startswith("step 2/6  loss 0.5000  lr 2.00e-03")
    assert evaluation == "step 2/6  validation loss 2.6667"


def test_live_console_keeps_messages_apart_from_the_bar():
    stream = io.StringIO()
    console = Console(10, gpu=False, stream=stream, live=True)
    console.start({}, {}, None, "id", 0)
    console.log(5, {"loss": 1.5, "lr": 1e-3, "grad_norm": 2.0, "tokens_per_second": 1234.5, "time_left_s": 61.0})
    console.message("saved [1]")
    console.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "5/10" in shown and "loss 1.5000" in shown and "1,234 tokens/s" in shown and "1:01 left" in shown
    assert "saved [1]\n" in shown


@pytest.mark.parametrize("seconds, text", [(0, "0:00"), (59.6, "1:00"), (3661, "1:01:01"), (90000, "25:00:00")])
def test_duration(seconds: float, text: str):
    assert duration(seconds) == text
