"""checkpoint.async_save: what a run saves is what it would have saved without. Cases 40 and 41."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megazero import host_memory
from megazero.checkpoint import files, newest
from megazero.engine import Engine
from megazero.errors import CheckpointError, ConfigError
from megazero.models.parameters import parameter_count
from tests.distributed.harness import RankFailure
from tests.engine.test_resume import call, places
from tests.engine.tiny import open_run, rank_files, run_script, series, steps_in, tiny

ASYNC = {"checkpoint.async_save": True, "checkpoint.save_interval": 2}


def every_rank_file(directory: Path) -> dict[str, bytes]:
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in directory.glob("step_*/rank_*")}


def hold_back_writes(engine_step: int) -> None:
    """Saves write nothing before the run has come to that step, which it only can while they are under way."""
    real, train_batch, go = files.write_safetensors, Engine.train_batch, threading.Event()

    def held(path: Path, entries: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert go.wait(60)
        return real(path, entries)

    def step(engine: Engine, source: Any) -> Any:
        if engine.step >= engine_step:
            go.set()
        return train_batch(engine, source)

    files.write_safetensors, Engine.train_batch = held, step


def run_held_back(settings: dict[str, Any], engine_step: int) -> None:
    real = files.write_safetensors, Engine.train_batch
    hold_back_writes(engine_step)
    try:
        run_script(settings)
    finally:
        files.write_safetensors, Engine.train_batch = real


@pytest.mark.parametrize("world_size, changes", [(1, {}), (2, {"zero.stage": 3})], ids=["one process", "dp2 zero3"])
def test_each_save_has_the_values_of_its_step(
    corpus: Path, tmp_path: Path, ranks: Callable, world_size: int, changes: dict, capfd: pytest.CaptureFixture
) -> None:
    """Case 41; the last save is whole when the run ends."""
    changes = changes | {"checkpoint.save_interval": 2, "checkpoint.keep": 2, "train.steps": 6}
    plain, ours = tmp_path / "plain", tmp_path / "async"
    call(ranks, world_size, run_script, tiny(corpus, changes | places(plain)))
    call(ranks, world_size, run_held_back, tiny(corpus, changes | ASYNC | places(ours)), 3)
    assert steps_in(ours) == steps_in(plain) == [4, 6]
    assert every_rank_file(ours) == every_rank_file(plain)
    assert series(ours.with_suffix(".jsonl"), "loss") == series(plain.with_suffix(".jsonl"), "loss")
    said = capfd.readouterr().out
    assert all(said.count(f"saved step {step} in {ours}, for which training has waited") == 1 for step in (2, 4, 6))


def test_room_for_the_copies_is_looked_for_at_the_start(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 bytes of a parameter, exactly; a machine with less is an error before the first step."""
    settings = tiny(corpus, ASYNC | {"checkpoint.dir": tmp_path})
    engine, *_ = open_run(settings)
    with engine:
        count = parameter_count(engine.model_config)
    monkeypatch.setattr(host_memory, "available_host_memory", lambda: 12 * count)
    engine, *_ = open_run(settings)
    with engine:
        pass
    monkeypatch.setattr(host_memory, "available_host_memory", lambda: 12 * count - 1)
    with pytest.raises(ConfigError, match=r"checkpoint.async_save: .* GB of host memory are needed on this machine"):
        open_run(settings)


def test_a_signal_waits_for_the_last_save(corpus: Path, tmp_path: Path) -> None:
    """SIGTERM while a save is under way: it and that of the step stopped at are whole."""
    before = signal.getsignal(signal.SIGTERM)
    engine, train, _ = open_run(tiny(corpus, ASYNC | {"checkpoint.dir": tmp_path, "train.steps": 50}))
    with engine:
        while engine.running():
            engine.train_batch(train)
            if engine.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            if engine.due(2):
                engine.save(train)
        engine.save(train)
    assert signal.getsignal(signal.SIGTERM) is before
    assert newest(tmp_path).name == f"step_{engine.step:08d}" and 3 < engine.step < 10
    assert not list(tmp_path.glob(".step*"))


def fails_on_the_last_rank(settings: dict[str, Any]) -> tuple[str, list[int]]:
    """The error that a rank ends with, and the steps it has taken."""
    engine, train, _ = open_run(settings)
    steps, real = [], files.write_safetensors

    def full(path: Path, entries: Any) -> Any:
        raise OSError(28, "No space left on device", str(path))

    try:
        with engine:
            while engine.running():
                engine.train_batch(train)
                steps.append(engine.step)
                if engine.step == 2:
                    files.write_safetensors = full if engine.topology.rank == 1 else real
                    engine.save(train)
            engine.save(train)
    except CheckpointError as error:
        return str(error), steps
    finally:
        files.write_safetensors = real
    return "", steps


def test_a_save_that_fails_stops_the_run_on_all_ranks_at_once(corpus: Path, tmp_path: Path, ranks: Callable) -> None:
    settings = tiny(corpus, ASYNC | {"checkpoint.dir": tmp_path / "run", "train.steps": 100_000, "zero.stage": 2})
    outcomes = ranks(2, fails_on_the_last_rank, settings)
    assert outcomes[0] == outcomes[1]
    told, steps = outcomes[0]
    assert f"{tmp_path / 'run' / 'step_00000002'}: the save in the background failed" in told
    assert "no space left on the disk" in told and "(rank 1 of 2)" in told
    assert 2 <= len(steps) < 100_000 and steps_in(tmp_path / "run") == []


def run_until_killed_in_a_write(settings: dict[str, Any], step: int) -> None:
    real = files.write_safetensors

    def half(path: Path, entries: Any) -> Any:
        if f"step_{step:08d}" not in str(path):
            return real(path, entries)
        real(path, entries[: len(entries) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    files.write_safetensors = half
    run_script(settings)


def test_killed_in_the_middle_of_a_write(corpus: Path, tmp_path: Path, ranks: Callable) -> None:
    """Case 40: the checkpoint before is found, and the run goes on from it as if nothing had been."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ranks(2, run_script, tiny(corpus, {"zero.stage": 2, "checkpoint.save_interval": 2} | places(whole)))
    settings = tiny(corpus, {"zero.stage": 2} | ASYNC | places(broken))
    with pytest.raises(RankFailure, match="SIGKILL"):
        ranks(2, run_until_killed_in_a_write, settings, 4)
    assert steps_in(broken) == [2]
    ranks(2, run_script, settings)
    assert steps_in(broken) == [2, 4, 6, 8] and not list(broken.glob(".step*"))
    assert rank_files(broken) == rank_files(whole)
