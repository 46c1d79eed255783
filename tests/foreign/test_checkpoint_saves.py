"""Saves of the engine that are cut off, fail, or are written while training goes on. Cases 40 and 41."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megazero.checkpoint import files, open_checkpoint
from megazero.errors import CheckpointError
from tests.distributed.harness import RankFailure
from tests.foreign.models import Odd, config, whole_weights
from tests.foreign.test_checkpoint import (
    ADAMW,
    Plain,
    assert_same,
    saved,
    start,
    train,
    world,
)


def killed_while_saving(root: Path, asynchronous: bool) -> None:
    sections = {"checkpoint": {"async_save": True}} if asynchronous else {}
    engine = start(Plain, config(2, 1, 0.0, optimizer=ADAMW, **sections))
    train(engine, 1)
    engine.save_checkpoint(root)
    engine.wait_for_checkpoint()
    train(engine, 2)
    real = files.write_safetensors

    def half(path: Path, entries: Any) -> Any:
        real(path, entries[: len(entries) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    files.write_safetensors = half
    engine.save_checkpoint(root)
    train(engine, 100_000)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_while_saving(tmp_path: Path, ranks: Callable, asynchronous: bool) -> None:
    with pytest.raises(RankFailure, match="SIGKILL"):
        ranks(2, killed_while_saving, tmp_path, asynchronous)
    engine = start(Plain, config(0, 1, 0.0, optimizer=ADAMW))
    assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "global_step1")
    saved(tmp_path)
    engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.glob(".global*"))


def asynchronous(root: Path, stage: int) -> tuple:
    """Three saves while training goes on, the first held back until two more steps are done."""
    engine = start(Odd, config(stage, 1, 0.0, optimizer=ADAMW, checkpoint={"async_save": True}))
    real, go = files.write_safetensors, threading.Event()

    def held(path: Path, entries: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        assert go.wait(60)
        return real(path, entries)

    files.write_safetensors = held
    states = {}
    try:
        train(engine, 1)
        engine.save_checkpoint(root, client_state={"at": 1})
        states[1] = whole_weights(engine)
        train(engine, 3)
        assert not (root / "latest").exists()
        go.set()
        for step in (3, 4):
            train(engine, step)
            engine.save_checkpoint(root, client_state={"at": step})
            states[step] = whole_weights(engine)
        engine.wait_for_checkpoint()
        assert (root / "latest").read_text() == "global_step4"
    finally:
        files.write_safetensors = real
    return states


@pytest.mark.parametrize("stage", [0, 3])
def test_saves_while_training_goes_on(tmp_path: Path, ranks: Callable, stage: int) -> None:
    """Case 41: each has the values of its own step, and is what a plain save writes."""
    states = ranks(2, asynchronous, tmp_path, stage)[0]
    for step, weights in states.items():
        with open_checkpoint(tmp_path / f"global_step{step}") as checkpoint:
            checkpoint.verify()
            assert checkpoint.meta["counters"]["global_steps"] == checkpoint.meta["client_state"]["at"] == step
            assert checkpoint.meta["optimizer"]["common"]["step"]["value"] == step
            assert_same({name: checkpoint.read("weight", name) for name in weights}, weights)
    ranks(2, plain_saves, tmp_path / "plain", stage)
    for step in states:
        assert_same(saved(tmp_path / f"global_step{step}"), saved(tmp_path / "plain" / f"global_step{step}"))


def plain_saves(root: Path, stage: int) -> None:
    engine = start(Odd, config(stage, 1, 0.0, optimizer=ADAMW))
    for step in (1, 3, 4):
        train(engine, step)
        engine.save_checkpoint(root)


def failing(root: Path, next_call: str) -> tuple[int, str]:
    """Rank 1 cannot write; every rank hears of it after the same step, or at the same call."""
    rank, _ = world()
    engine = start(Plain, config(1, 1, 0.0, optimizer=ADAMW, checkpoint={"async_save": True}))
    real = files.write_safetensors

    def full(path: Path, entries: Any) -> Any:
        raise OSError(28, "No space left on device", str(path))

    files.write_safetensors = full if rank == 1 else real
    try:
        train(engine, 1)
        engine.save_checkpoint(root)
        if next_call == "step":
            train(engine, 100_000)
        else:
            getattr(engine, next_call)(*([root] if next_call == "save_checkpoint" else []))
    except CheckpointError as error:
        return engine.global_steps, str(error)
    finally:
        files.write_safetensors = real
    return -1, ""


@pytest.mark.parametrize("next_call", ["step", "save_checkpoint", "wait_for_checkpoint", "destroy"])
def test_a_save_in_the_background_that_fails(tmp_path: Path, ranks: Callable, next_call: str) -> None:
    outcomes = ranks(2, failing, tmp_path / "run", next_call)
    assert outcomes[0] == outcomes[1]
    step, told = outcomes[0]
    assert step >= 1 and "global_step1: the save in the background failed" in told and "no space left" in told
    assert not list((tmp_path / "run").glob("global*"))
