"""Saves by a thread: case 41, errors that are not lost, and ranks that talk through the store."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megazero.checkpoint import (
    CheckpointWriter,
    OneProcess,
    TorchGroup,
    open_checkpoint,
    store_group,
    writer,
)
from megazero.checkpoint.background import BackgroundSaver
from megazero.checkpoint.store_group import StoreGroup
from megazero.checkpoint.tagged import TaggedWriter
from megazero.errors import CheckpointError
from megazero.sharding import Rectangle

CPU = torch.device("cpu")


def chunk(name: str, tensor: torch.Tensor) -> tuple:
    box = Rectangle((0,) * tensor.dim(), tuple(tensor.shape))
    return "weight", name, box, box.shape, tensor


def test_the_values_are_those_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 41: the state changes at once, the writing is held back; the next save has its own values, in the same
    memory. Among the chunks are one cut into runs of rows, one made late and one without elements."""
    monkeypatch.setattr(writer, "MAX_CHUNK_BYTES", 64)
    state = {"a": torch.arange(60.0).view(20, 3), "b": torch.arange(30.0).view(1, 30), "c": torch.tensor(5.0)}
    own = torch.tensor([1, 2])
    saver, checkpoints, go = BackgroundSaver(CPU), CheckpointWriter(tmp_path), threading.Event()

    def save(step: int) -> None:
        def write(chunks: Any, rank_state: Any) -> Path:
            assert go.wait(60) and threading.current_thread() is not threading.main_thread()
            return checkpoints.save(step, chunks, rank_state)

        chunks = [chunk(name, tensor) for name, tensor in state.items()]
        late = ("weight", "late", Rectangle((0,), (3,)), (3,), lambda: state["a"][0] + 1)
        chunks += [late, chunk("none", torch.empty(0, 4))]
        saver.save(write, chunks, {"own": own}, tmp_path / str(step))

    wanted = {}
    for step in (1, 2, 3):
        wanted[step] = {name: tensor.clone() for name, tensor in state.items()} | {"late": state["a"][0] + 1}
        if step == 1:
            save(step)
            assert saver.pending and saver.finished() is None
            memory = saver._staging._room.data_ptr()
        else:
            go.set()
            save(step)
        for tensor in state.values():
            tensor.mul_(-2).sub_(step)
        own += 10
    del tensor
    gone = weakref.ref(state.pop("b"))
    assert gone() is None, "what is not the state any more is held"
    saver.wait()
    assert not saver.pending and saver.finished() == tmp_path / "step_00000003" and saver.finished() is None
    assert saver._staging._room.data_ptr() == memory
    for step, tensors in wanted.items():
        with open_checkpoint(tmp_path / f"step_{step:08d}") as checkpoint:
            checkpoint.verify()
            assert all(torch.equal(checkpoint.read("weight", name), tensor) for name, tensor in tensors.items())
            assert checkpoint.rank_state(0)["own"].tolist() == [10 * step - 9, 10 * step - 8]
            assert checkpoint.parameters["none"] == (0, 4)


@pytest.mark.parametrize("part", ["writing", "copying"])
def test_an_error_is_raised_once_where_the_save_is_waited_for(tmp_path: Path, part: str) -> None:
    saver, checkpoints = BackgroundSaver(CPU), CheckpointWriter(tmp_path / "run")

    def fail(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    def write(chunks: Any, rank_state: Any) -> Path:
        return fail() if part == "writing" else checkpoints.save(1, chunks, rank_state)

    late = fail if part == "copying" else lambda: torch.zeros(2)
    saver.save(write, [("weight", "w", Rectangle((0,), (2,)), (2,), late)], {}, tmp_path / "run" / "step_1")
    with pytest.raises(CheckpointError, match=r"run/step_1: the save in the background failed: .*[Nn]o space left"):
        saver.wait()
    assert not saver.failed
    saver.wait()
    saver.save(lambda chunks, state: checkpoints.save(2, chunks, state), [chunk("w", torch.ones(2))], {}, tmp_path)
    saver.wait()
    assert open_checkpoint(tmp_path / "run").step == 2


def test_an_interrupted_wait_is_none(tmp_path: Path) -> None:
    """Control-C while a save is waited for: it is under way still, and the next call waits for it."""
    saver, waiting, go = BackgroundSaver(CPU), threading.Event(), threading.Event()

    def write(*_: Any) -> Path:
        assert waiting.wait(60)
        time.sleep(0.1)  # by then the main thread waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert go.wait(60)
        time.sleep(0.1)
        return tmp_path

    saver.save(write, [], {}, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        waiting.set()
        saver.wait()
    assert saver.pending
    go.set()
    saver.wait()
    assert saver.finished() == tmp_path and not saver.pending


def test_two_engines_of_a_process_save_into_one_directory(tmp_path: Path) -> None:
    """The second begins while the first is under way, and leaves alone what that has written."""
    writing, go = threading.Event(), threading.Event()

    def entered() -> torch.Tensor:
        writing.set()
        assert go.wait(60)
        return torch.ones(2)

    def write(tag: str, late: Any) -> Callable:
        chunks = [("weight", "w", Rectangle((0,), (2,)), (2,), late)]
        return lambda *_: TaggedWriter(tmp_path).save_as(tag, True, 1, chunks, {}, {})

    first, second = BackgroundSaver(CPU), BackgroundSaver(CPU)
    first.save(write("first", entered), [], {}, tmp_path)
    assert writing.wait(60)
    second.save(write("second", lambda: torch.zeros(2)), [], {}, tmp_path)
    second._thread.join(0.2)
    go.set()
    first.wait()
    second.wait()
    assert [float(open_checkpoint(tmp_path / tag).read("weight", "w")[0]) for tag in ("first", "second")] == [1, 0]


SCRIPT = """
import pathlib, sys, time, torch
from megazero.checkpoint.background import BackgroundSaver
from megazero.checkpoint import CheckpointWriter
from megazero.sharding import Rectangle
root = pathlib.Path(sys.argv[1])
saver, checkpoints = BackgroundSaver(torch.device("cpu")), CheckpointWriter(root / "run")
def write(chunks, state):
    time.sleep(0.2)  # the main thread is at its end by then
    if sys.argv[2] == "bad":
        raise OSError(28, "No space left on device")
    return checkpoints.save(1, chunks, state)
saver.save(write, [("weight", "w", Rectangle((0,), (3,)), (3,), torch.ones(3))], {}, root / "run" / "step_00000001")
print("the end")
"""


@pytest.mark.parametrize("how, code", [("good", 0), ("bad", 2)])
def test_a_process_that_ends_waits_and_says_what_failed(tmp_path: Path, how: str, code: int) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), how]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=300)
    assert (done.returncode, done.stdout) == (code, "the end\n"), done.stderr
    if how == "good":
        assert open_checkpoint(tmp_path / "run").step == 1 and done.stderr == ""
    else:
        assert done.stderr.startswith(f"error: {tmp_path}/run/step_00000001: the save in the background failed")


def talk() -> list[Any]:
    """In a thread, while the main one issues collectives; values larger than a piece, several groups after another."""
    store_group._PIECE = 10
    rank, results = dist.get_rank(), []
    group = StoreGroup.beside(TorchGroup(), 60)

    def thread() -> None:
        for turn in range(3):
            results.append(group.all_gather(f"{rank} of turn {turn}"))
            results.append(group.gather([rank] * 5 * rank))

    running = threading.Thread(target=thread)
    running.start()
    for _ in range(20):
        dist.all_reduce(torch.ones(3))
    running.join()
    results.append(StoreGroup.beside(TorchGroup(), 60).all_gather(None))
    left = [key for key in range(8) if group._store.check([f"{key}/all"])]
    assert not left, left
    return results


def test_ranks_talk_without_collectives(ranks: Callable) -> None:
    found = ranks(3, talk)
    for rank, results in enumerate(found):
        for turn in range(3):
            assert results[2 * turn] == [f"{other} of turn {turn}" for other in range(3)]
            assert results[2 * turn + 1] == (None if rank else [[0] * 0, [1] * 5, [2] * 10])
        assert results[6] == [None] * 3


def wait_for_nobody() -> str:
    group = StoreGroup("alone", timeout=0.2)
    if group.rank == 1:
        return ""
    try:
        group.all_gather(0)
    except CheckpointError as error:
        return str(error)
    return "no error"


def test_a_rank_that_does_not_come_is_named(ranks: Callable) -> None:
    told = ranks(2, wait_for_nobody)
    assert told[0].startswith(f"rank 1 took no part in the save for {timedelta(seconds=0.2)}") and told[1] == ""


def test_one_process_needs_no_store() -> None:
    group = OneProcess()
    assert StoreGroup.beside(group, 1.0) is group
