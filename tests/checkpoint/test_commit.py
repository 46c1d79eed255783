"""P7: whole or absent. Saves cut off at every operation on the disk, runs that share a directory, retention."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from megazero.checkpoint import CheckpointWriter, files, newest, newest_or_none, open_checkpoint, save
from megazero.errors import CheckpointError
from megazero.sharding import Rectangle
from tests.checkpoint import states
from tests.checkpoint.thread_group import run_ranks

OPERATIONS = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")


def chunk(value: float) -> list[tuple]:
    return [("weight", "w", Rectangle((0,), (6,)), (6,), torch.full((6,), value))]


def value_of(path: Path) -> float:
    with open_checkpoint(path) as checkpoint:
        checkpoint.verify()
        return float(checkpoint.read("weight", "w")[0])


def save_and_die(root: Path, step: int, value: float, keep: int, start: int, fatal: int) -> bool:
    """Saves in a child process that dies in its ``fatal``-th operation on the disk; False where it lived to the end.

    Writes are cut in half. The child is forked and ends by os._exit, as a killed process does: nothing is
    cleaned up.
    """
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    try:
        count = 0

        def wrap(name):
            real = getattr(os, name)

            def operation(*args, **kwargs):
                nonlocal count
                count += 1
                if count == fatal:
                    if name == "write":
                        real(args[0], args[1][: len(args[1]) // 2])
                    os._exit(9)
                return real(*args, **kwargs)

            return operation

        for name in OPERATIONS:
            setattr(os, name, wrap(name))
        CheckpointWriter(root, keep=keep, start_step=start).save(
            step, chunk(value), {"r": torch.ones(3)}, {"value": value}
        )
    except BaseException:
        os._exit(1)
    os._exit(0)


def die_everywhere(prepare, step: int, keep: int, start: int, before: float) -> int:
    """Kills the save at each operation in turn: what is found is the checkpoint before it, or the new one, whole."""
    for fatal in range(1, 1000):
        root = prepare()
        died = save_and_die(root, step, 2.0, keep, start, fatal)
        assert value_of(root) in ((before, 2.0) if died else (2.0,)), fatal
        # The next run cleans up and saves.
        CheckpointWriter(root, keep=keep, start_step=step).save(step + 1, chunk(3.0))
        assert value_of(root) == 3.0
        hidden = [path.name for path in root.iterdir() if not path.name.startswith("step_") or "." in path.name]
        assert hidden == [".lock"], fatal
        if not died:
            return fatal
    raise AssertionError("the save never ends")


def test_kill_at_every_operation_of_a_new_step(tmp_path):
    def prepare() -> Path:
        root = tmp_path / "root"
        shutil.rmtree(root, ignore_errors=True)
        for step in (1, 2):
            save(root, step, chunk(1.0))
        return root

    assert die_everywhere(prepare, step=3, keep=1, start=2, before=1.0) > 20


def test_kill_at_every_operation_of_a_replacement(tmp_path):
    """The same step once more; at no instant is there none."""

    def prepare() -> Path:
        root = tmp_path / "root"
        shutil.rmtree(root, ignore_errors=True)
        return save(root, 7, chunk(1.0)).parent

    assert die_everywhere(prepare, step=7, keep=0, start=7, before=1.0) > 20


def test_kill_at_every_operation_of_the_first_save(tmp_path):
    root = tmp_path / "a" / "root"
    for fatal in range(1, 1000):
        died = save_and_die(root, 1, 2.0, 0, 0, fatal)
        found = newest_or_none(root)
        if found is None:
            assert died
            if root.exists():
                with pytest.raises(CheckpointError, match="holds no megazero checkpoint"):
                    newest(root)
        else:
            assert value_of(found) == 2.0
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        if not died:
            break
    assert fatal > 15


def test_fewer_ranks_into_the_same_place(tmp_path):
    """Case 40: no stale shard of the larger save is read, whether its step is replaced or followed."""
    first, second, third = (states.make_state(seed) for seed in (1, 2, 3))

    def saver(step, state, layout):
        def work(group):
            writer = CheckpointWriter(tmp_path, group, start_step=step)
            return writer.save(step, states.chunks_of(state, group.rank, *layout), meta=states.META)

        return work

    run_ranks(8, saver(4, first, (2, 2, 2)))
    for step, state, layout in ((4, second, (2, 1, 1)), (5, third, (1, 1, 1))):
        run_ranks(layout[0], saver(step, state, layout))
        with open_checkpoint(tmp_path) as checkpoint:
            assert checkpoint.step == step and checkpoint.world_size == layout[0]
            assert len(list(checkpoint.path.iterdir())) == layout[0] + 1
            checkpoint.verify()
            assert all(torch.equal(checkpoint.read(*key), tensor) for key, tensor in state.items())


def test_retention(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in (10, 20, 30, 40):
        writer.save(step, chunk(float(step)))
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000030", "step_00000040"]


def test_retention_counts_whole_checkpoints_only(tmp_path):
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in (10, 20):
        writer.save(step, chunk(float(step)))
    (tmp_path / "step_00000020" / "manifest.json").write_text("")
    writer.save(30, chunk(30.0))
    assert value_of(tmp_path / "step_00000010") == 10.0


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "no space left on the disk: free some"), (errno.EFBIG, "raise it .ulimit -f., or choose another")],
)
def test_the_checkpoint_resumed_from_stays_until_the_next_is_whole(tmp_path, monkeypatch, number, message):
    save(tmp_path, 10, chunk(1.0))
    writer = CheckpointWriter(tmp_path, keep=1, start_step=10)

    def full(descriptor, data):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(CheckpointError, match=message):
            writer.save(20, chunk(2.0))
    assert value_of(tmp_path) == 1.0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step_00000010"]
    writer.save(20, chunk(2.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step_00000020"]


def test_a_full_disk_on_one_rank_is_an_error_on_all(tmp_path, monkeypatch):
    state = states.make_state(1)
    run_ranks(4, lambda group: save(tmp_path, 1, states.chunks_of(state, group.rank, 2, 1, 2), group=group))
    real = files.write_safetensors

    def fail_on_rank_2(path, entries):
        if path.name == "rank_00002.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, entries)

    monkeypatch.setattr(files, "write_safetensors", fail_on_rank_2)

    def work(group):
        return CheckpointWriter(tmp_path, group, start_step=1).save(2, states.chunks_of(state, group.rank, 2, 1, 2))

    errors = run_ranks(4, work)
    assert all(isinstance(error, CheckpointError) for error in errors) and len(set(map(str, errors))) == 1
    assert "no space left" in str(errors[0]) and "(rank 2 of 4)" in str(errors[0])
    assert newest(tmp_path).name == "step_00000001" and not list(tmp_path.glob(".step*"))


def test_two_runs_in_one_directory(tmp_path):
    """The second to save is told, and the first goes on."""
    first, second = CheckpointWriter(tmp_path), CheckpointWriter(tmp_path)
    first.save(10, chunk(1.0))
    with pytest.raises(CheckpointError, match=r"another run is saving here as well.*step 10 has appeared"):
        second.save(10, chunk(2.0))
    first.save(20, chunk(1.0))
    assert value_of(tmp_path) == 1.0


def test_a_save_under_way_elsewhere_is_left_alone(tmp_path):
    """Another process holds the lock and has its directory open."""
    (tmp_path / ".step_00000005.saving").mkdir()
    (tmp_path / ".step_00000005.saving" / "rank_00000.safetensors").write_bytes(b"half")
    read_end, write_end = os.pipe()
    finish_read, finish_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with files.exclusive(tmp_path / ".lock") as locked:
                os.write(write_end, b"1" if locked else b"0")
                os.read(finish_read, 1)
        finally:
            os._exit(0)
    try:
        assert os.read(read_end, 1) == b"1"
        with pytest.raises(CheckpointError, match="another run is saving here as well"):
            save(tmp_path, 6, chunk(1.0))
        assert (tmp_path / ".step_00000005.saving" / "rank_00000.safetensors").read_bytes() == b"half"
    finally:
        os.write(finish_write, b"1")
        os.waitpid(pid, 0)
    save(tmp_path, 6, chunk(1.0))
    assert not (tmp_path / ".step_00000005.saving").exists()


def test_a_run_does_not_start_below_the_checkpoints_of_another(tmp_path):
    save(tmp_path, 100, chunk(1.0))
    for start in (0, 50):
        with pytest.raises(CheckpointError, match=f"holds step 100 of another run; this one starts from step {start}"):
            CheckpointWriter(tmp_path, start_step=start)
    CheckpointWriter(tmp_path, start_step=100)
    # One that is not whole is no obstacle: resuming has passed it over.
    (tmp_path / "step_00000100" / "rank_00000.safetensors").unlink()
    writer = CheckpointWriter(tmp_path, start_step=50)
    writer.save(100, chunk(2.0))
    assert value_of(tmp_path) == 2.0


def test_what_is_not_json_is_refused_before_anything_appears(tmp_path):
    with pytest.raises(CheckpointError, match="not JSON serializable"):
        save(tmp_path, 1, chunk(1.0), meta={"bad": object()})
    assert newest_or_none(tmp_path) is None


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        CheckpointWriter(tmp_path / "file")


def test_a_root_that_cannot_be_written_is_found_at_the_start(tmp_path):
    with pytest.raises(CheckpointError, match="/proc: the checkpoint could not be saved"):
        CheckpointWriter("/proc/checkpoints/of/a/run")
    CheckpointWriter(tmp_path / "new" / "root")
    assert list(tmp_path.iterdir()) == []
