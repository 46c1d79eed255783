"""Checkpoints read back in the background: what is good stays, what is damaged is named and set aside."""

from __future__ import annotations

import json
import os
from pathlib import Path
from threading import Thread, current_thread

import pytest
import torch

from megazero.checkpoint import CheckpointWriter, newest_or_none, verifier
from megazero.checkpoint.locate import VERIFIED, set_aside
from megazero.checkpoint.verifier import Verifier
from megazero.sharding import Rectangle
from tests.checkpoint.thread_group import ThreadGroup, run_ranks
from tests.engine.tiny import open_run, run_script, steps_in, tiny, write_corpus

CHUNK = ("weight", "w", Rectangle((0,), (2000,)), (2000,), torch.ones(2000))


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "_PAUSE", 0.01)


def flip(checkpoint: Path, rank: int = 0) -> None:
    path = checkpoint / f"rank_{rank:05}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(data)


def read_back(writer: CheckpointWriter, *paths: Path) -> list[tuple[str, str]]:
    """(name, problem) of what came of it."""
    reader = Verifier(writer)
    for path in paths:
        reader.add(path)
    reader.close(gives_up=lambda: False)
    return [(path.name, problem) for path, problem in reader.outcomes()]


def test_the_last_good_one_stays_until_a_newer_one_is_known_to_be_good(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=1, verifies=True)
    first = writer.save(1, [CHUNK])
    assert read_back(writer, first) == [("step_00000001", "")] and (first / VERIFIED).exists()
    second = writer.save(2, [CHUNK])
    assert steps_in(tmp_path) == [1, 2]
    flip(second)
    (found,) = read_back(writer, second)
    assert found[0] == "step_00000002" and "rank_00000.safetensors: damaged: the checksum of weight of w" in found[1]
    assert f"It is set aside as {second}.damaged" in found[1] and newest_or_none(tmp_path) == first
    third, fourth = writer.save(3, [CHUNK]), writer.save(4, [CHUNK])
    assert newest_or_none(tmp_path) == fourth and first.exists()
    read_back(writer, fourth)
    assert not first.exists() and not third.exists() and newest_or_none(tmp_path) == fourth


def test_what_another_thread_has_set_aside_is_aside(tmp_path: Path) -> None:
    """A roll-back and the verifier may find the same damage: whoever comes second goes on, too."""
    writer = CheckpointWriter(tmp_path, verifies=True)
    first = writer.save(1, [CHUNK])
    second = writer.save(2, [CHUNK])
    assert set_aside(second) and set_aside(second)
    assert newest_or_none(tmp_path) == first


def test_those_newer_than_the_last_good_one_do_not_count(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=2, verifies=True)
    paths = [writer.save(step, [CHUNK]) for step in range(1, 7)]
    read_back(writer, paths[1])
    assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]
    read_back(writer, paths[4])
    assert steps_in(tmp_path) == [4, 5, 6]


def test_the_only_one_stays_where_it_is_so_that_nobody_begins_anew(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, verifies=True)
    path = writer.save(1, [CHUNK])
    flip(path)
    ((_, problem),) = read_back(writer, path)
    assert problem.endswith("There is no other, so it stays where it is") and path.is_dir()


def test_what_comes_from_a_disk_is_read_twice_before_it_is_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And past the page cache."""
    writer = CheckpointWriter(tmp_path, verifies=True)
    path, real, calls = writer.save(1, [CHUNK]), os.preadv, []
    forgotten, advise = [], os.posix_fadvise

    def preadv(*arguments) -> int:
        calls.append(arguments)
        if len(calls) == 1:
            raise OSError(5, "Input/output error")
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: forgotten.append(a[1:]) or advise(*a))
    assert read_back(writer, path) == [("step_00000001", "")] and len(calls) == 2
    assert forgotten == [(0, 0, os.POSIX_FADV_DONTNEED)] * 3  # before each of the readings, and after the one


@pytest.mark.parametrize("cores", [1, 3, 16])
def test_threads_share_the_files_of_many_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Each byte is read once, by as many threads as there are cores and files; a fault in any file is found."""
    monkeypatch.setattr(verifier, "own_cores", lambda: cores)
    writers: list[CheckpointWriter] = []

    def saves(group: ThreadGroup) -> Path:
        writer = CheckpointWriter(tmp_path, group, verifies=True)
        writers.extend([writer] if group.rank == 0 else [])
        box = Rectangle((2000 * group.rank,), (2000,))
        return [writer.save(step, [("weight", "w", box, (10_000,), torch.ones(2000))]) for step in (1, 2)][1]

    path, real, read = run_ranks(5, saves)[0], os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda *given: read.append(current_thread().name) or real(*given))
    assert read_back(writers[0], path) == [("step_00000002", "")]
    assert len(read) == 5 and len({*read}) == min(cores, 5)
    flip(path, rank=3)
    ((_, problem),) = read_back(writers[0], path)
    assert "rank_00003.safetensors: damaged: the checksum of weight of w" in problem


def test_one_that_has_been_removed_or_was_not_finished_is_not_spoken_of(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, verifies=True)
    assert read_back(writer, tmp_path / "step_00000007") == []
    reader = Verifier(writer)
    reader.close(gives_up=lambda: True)
    reader.add(writer.save(1, [CHUNK]))
    reader.close(gives_up=lambda: True)
    assert reader.outcomes() == []


def ended(reader: Verifier) -> list[tuple[Path, str]]:
    """What came of it, where its thread ends by itself."""
    asked = iter(range(30))
    reader.close(gives_up=lambda: next(asked, None) is None)
    assert next(asked, None) is not None, "nothing but giving up has ended it"
    return [tuple(outcome) for outcome in reader.outcomes()]


@pytest.mark.parametrize("other", [False, True])
def test_what_the_disk_does_not_answer_for_is_said_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    """A directory of a server that has gone away is not one that was removed."""
    writer = CheckpointWriter(tmp_path, verifies=True)
    if other:
        writer.save(1, [CHUNK])
    path, real, listed = writer.save(2, [CHUNK]), Path.stat, os.listdir

    def stat(self: Path, **options: bool) -> os.stat_result:
        if path in (self, *self.parents):
            raise OSError(116, "Stale file handle")
        return real(self, **options)

    def listdir(root: Path) -> list[str]:
        if not other:
            raise PermissionError(13, "Permission denied")
        return listed(root)

    reader = Verifier(writer)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", stat)
        patched.setattr(os, "listdir", listdir)
        reader.add(path)
        ((said, problem),) = ended(reader)
    assert said == path and "manifest.json: cannot be read: Stale file handle" in problem
    assert path.exists() is not other


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_be_started_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = CheckpointWriter(tmp_path, verifies=True)
    path, start = writer.save(1, [CHUNK]), Thread.start

    def start_first(thread: Thread) -> None:
        if thread.name != "verifier":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Thread, "start", start_first)
    reader = Verifier(writer)
    reader.add(path)
    assert ended(reader) == [] and not (path / VERIFIED).exists()


def test_a_run_names_what_is_damaged_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of step 4 is damaged between its save and its reading; that of step 8 when the run has ended."""
    add = Verifier.add

    def damaging(self: Verifier, path: Path) -> None:
        if path.name == "step_00000004":
            flip(path)
        add(self, path)
        with self._changed:  # so that none is passed over for a newer one
            self._changed.wait_for(lambda: not self._busy and self._waiting is None)

    monkeypatch.setattr(Verifier, "add", damaging)
    place = {"checkpoint.dir": tmp_path / "run", "checkpoint.save_interval": 2, "checkpoint.keep": 1}
    settings = tiny(write_corpus(tmp_path), {"log.events": tmp_path / "events.jsonl", **place})
    run_script(settings)
    assert sorted(path.name for path in (tmp_path / "run").glob("step*")) == ["step_00000004.damaged", "step_00000008"]
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    told = [(line["event"], line["step"]) for line in lines if line["event"] in ("verified", "damaged")]
    assert told == [("verified", 2), ("damaged", 4), ("verified", 6), ("verified", 8)]
    assert "rank_00000.safetensors: damaged" in next(line["text"] for line in lines if line["event"] == "damaged")
    (tmp_path / "run" / "step_00000008" / VERIFIED).unlink()
    engine, _, _ = open_run(settings)  # a run that was killed before it had read that one back
    with engine:
        pass
    assert (tmp_path / "run" / "step_00000008" / VERIFIED).exists()
