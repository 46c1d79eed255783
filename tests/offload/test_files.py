"""State in files: of any size, beside other jobs, and with everything that can go wrong with a disk."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import megazero
from megazero.checkpoint import newest, open_checkpoint
from megazero.errors import CheckpointError, OffloadError
from megazero.host_memory import HostMemory
from megazero.models.config import ModelConfig
from megazero.zero.offload.files import PAGE, StateFile
from megazero.zero.offload.media import Disk, OnDisk
from megazero.zero.offload.values import SLOTS
from tests.distributed.runs import TokenSource, make_engine, random_weights, settings
from tests.distributed.test_cases import GPT2
from tests.offload.choices import CPU, FILES, in_files, nvme


class Sizes(nn.Module):
    """Case 36: one tensor of 14,412,000 elements, one of one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.linspace(-1, 1, 14_412_000))
        self.one = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.large * x).sin() * self.one).mean()


def test_36_tensors_of_any_size(tmp_path: Path) -> None:
    weights = []
    for offload in ({}, {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}):
        config = {"train_batch_size": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2, **offload}}
        engine, *_ = megazero.initialize(model=Sizes(), config=config)
        for micro_step in range(2):
            engine.backward(engine(torch.tensor(1.0 + micro_step)))
            engine.step()
        weights.append([megazero.zero.safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()])
        engine.destroy()
    assert all(map(torch.equal, *weights))
    assert not torch.equal(weights[0][0], Sizes().large)


def test_any_part_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    fields, numel, rng = {"weight": torch.float32, "exp_avg": torch.bfloat16}, 5000, random.Random(3)
    disk = Disk(str(tmp_path), HostMemory(torch.device("cpu")), 2, 1 << 14, 1 << 16, ahead=True, behind=True)
    stored = OnDisk(disk, fields, numel, piece=2048)
    wanted = {name: torch.zeros(numel, dtype=dtype) for name, dtype in fields.items()}
    for name in fields:
        stored.write(name, 0, wanted[name])
    for size in (1, 2, 1023, 1024, 1025, 2048, 4096, numel, *(rng.randrange(1, numel) for _ in range(40))):
        name, start = rng.choice(list(fields)), rng.randrange(numel - size + 1)
        values = torch.randn(size).to(fields[name])
        stored.write(name, start, values)
        wanted[name][start : start + size] = values
        assert all(torch.equal(stored.read(name, 0, numel), wanted[name]) for name in fields), (name, start, size)
    stored.write("weight", -3, torch.empty(0))  # of a tensor that ends before what a rank owns
    assert not stored.read("weight", numel + 3, numel + 3).numel()
    assert all(torch.equal(stored.read(name, 0, numel), wanted[name]) for name in fields)
    disk.close()


def test_two_jobs_in_one_directory_and_one_that_was_killed(tmp_path: Path) -> None:
    """A job leaves alone what a living one keeps there, and removes what a killed one has left."""
    script = "import sys, time\nfrom megazero.zero.offload.files import StateFile\n"
    script += "file = StateFile(sys.argv[1], 4096)\nprint(file.directory, flush=True)\ntime.sleep(600)"
    killed = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    left = Path(killed.stdout.readline().strip())
    first = StateFile(str(tmp_path), PAGE)
    assert left.exists()
    killed.kill()
    killed.wait()
    killed.stdout.close()
    second = StateFile(str(tmp_path), PAGE)
    assert not left.exists() and first.directory.exists() and first.directory != second.directory
    first.claim(PAGE)
    pages = torch.arange(PAGE, dtype=torch.int64).to(torch.uint8)
    second.claim(PAGE)
    for file in (first, second):
        file.close()
    assert not [*tmp_path.glob("megazero-*")]
    assert pages.numel() == PAGE


def test_a_path_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "below", Path("/proc/megazero")):
        with pytest.raises(OffloadError, match=r"offload_optimizer.nvme_path: .* cannot be used"):
            StateFile(str(path), PAGE)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_files_that_are_host_memory_are_told_apart(
    tmp_path: Path, kind: str, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, at the start, for each of the settings; what is asked about is where the files are, links followed."""
    (tmp_path / "files").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "files")
    asked = []
    monkeypatch.setattr("megazero.zero.offload.tier.file_system", lambda path: asked.append(path) or (kind, "/mnt"))
    with make_engine(settings(GPT2, zero={"stage": 3, **in_files({**nvme(tmp_path / "link"), **FILES}, tmp_path)})):
        pass
    said = capfd.readouterr().out
    for section in ("offload_optimizer", "offload_param"):
        told = f"warning: {section}.nvme_path is on tmpfs (/mnt), which is host memory: give a directory on a disk, or "
        assert said.count(f"{told}{section}.device cpu\n") == (kind == "tmpfs")
    assert [path.parent for path in asked] == [tmp_path / "files", tmp_path]


def test_a_full_disk(tmp_path: Path) -> None:
    """Found before anything is written where that can be known; named, and cleaned up, where it comes later."""
    with (
        mock.patch("os.statvfs", return_value=SimpleNamespace(f_bavail=10, f_frsize=PAGE)),
        pytest.raises(OffloadError, match=r"are needed in .* are free; make room"),
    ):
        StateFile(str(tmp_path), 11 * PAGE)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("os.posix_fallocate", side_effect=full), pytest.raises(OffloadError, match="make room on the disk"):
        make_engine(settings(GPT2, zero={"stage": 1, **nvme(tmp_path)}))
    assert not [*tmp_path.glob("megazero-*")]


def test_two_files_on_a_disk_that_has_room_for_one(tmp_path: Path) -> None:
    first = StateFile(str(tmp_path), 8 * PAGE)
    first.claim(2 * PAGE)
    room = mock.patch("os.statvfs", return_value=SimpleNamespace(f_bavail=10, f_frsize=PAGE))
    with room, pytest.raises(OffloadError, match="offload_param.nvme_path: .* are needed"):
        StateFile(str(tmp_path), 5 * PAGE, "offload_param.nvme_path", beside=first)
    with room:
        StateFile(str(tmp_path), 4 * PAGE, "offload_param.nvme_path", beside=first).close()
    first.close()


@pytest.mark.parametrize("fault", ["cut short", "full", "parameters cut short"])
def test_a_fault_in_the_middle_leaves_the_checkpoint(fault: str, tmp_path: Path) -> None:
    """The error names the file; the run goes on from the checkpoint as if it had never been."""
    parameters = in_files(FILES, tmp_path / "files") if fault.startswith("parameters") else {}
    zero = {"stage": 3 if parameters else 2, **nvme(tmp_path / "files"), **parameters}
    tree = settings(GPT2, zero=zero, train={"steps": 4})
    tree["checkpoint"] = {"dir": str(tmp_path / "saved")}
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**GPT2))
    with make_engine(tree, weights) as engine:
        engine.train_batch(source)
        engine.train_batch(source)
        engine.save(source)
        tier = engine.stage.sharded.tier
        file = (tier.parameter_file if parameters else tier.disk).file
        write = mock.patch.object(file, "write", side_effect=file._error("written", OSError(errno.ENOSPC, "No space")))
        with pytest.raises(OffloadError, match=r"state: (is shorter than it was written|could not be written)"):
            if fault != "full":
                os.truncate(file.path, PAGE)
            else:
                write.start()
            for _ in range(2):
                engine.train_batch(source)
            engine.stage.sharded.blocks[0].owned_state("exp_avg")
        mock.patch.stopall()
    with open_checkpoint(newest(tmp_path / "saved")) as checkpoint:
        checkpoint.verify()
    losses = []
    for zero in (tree["zero"], {**tree["zero"], "offload_optimizer": {}, "offload_param": {}}):
        with make_engine({**tree, "zero": zero, "checkpoint": {**tree["checkpoint"], "resume": "auto"}}) as engine:
            assert engine.step == 2
            losses.append([float(engine.train_batch(source).loss) for _ in range(2)])
    assert losses[0] == losses[1]
    assert not [*(tmp_path / "files").glob("megazero-*")]


@pytest.mark.parametrize("state", [{}, {"offload_optimizer": CPU}], ids=["state on the device", "state on the host"])
def test_a_step_that_parameters_in_files_have_half_of(state: dict, tmp_path: Path) -> None:
    """Its error stays: training on, or a checkpoint, would mix two steps. A signal in its midst does not: the values
    follow their masters when they are next used."""
    zero = {"stage": 3, **in_files(FILES, tmp_path), **state}
    tree = settings(GPT2, zero=zero, train={"steps": 4, "precision": "bf16"})
    tree["checkpoint"] = {"dir": str(tmp_path / "saved")}
    source = TokenSource(37, 12)
    with make_engine(tree, random_weights(ModelConfig(**GPT2))) as engine:
        blocks = [block for block in engine.stage.sharded.blocks if block.values_leave]
        if not state:
            with mock.patch.object(blocks[1], "set_values", side_effect=KeyboardInterrupt):
                with pytest.raises(KeyboardInterrupt):
                    engine.train_batch(source)
            for block in blocks:
                block.settle()
                assert torch.equal(block.held_values(), block.master.bfloat16())
        file = engine.stage.sharded.tier.parameter_file.file
        failed = file._error("written", OSError(errno.ENOSPC, "No space"))
        with mock.patch.object(file, "write", side_effect=[failed, *[None] * 99]):
            with contextlib.suppress(OffloadError):
                engine.train_batch(source)  # of state on the host, the next step says it
            for use in (engine.train_batch, engine.train_batch, engine.save):
                with pytest.raises((OffloadError, CheckpointError), match="could not be written: No space"):
                    use(source)


def test_a_file_of_parameters_that_cannot_be_read(tmp_path: Path) -> None:
    """Every use says so, however many there are; the engine's end does as well, and leaves nothing behind."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **in_files(FILES, tmp_path)}
    engine, *_ = megazero.initialize(
        model=nn.Linear(8, 8), config={"train_batch_size": 1, "zero_optimization": zero, "optimizer": {"type": "SGD"}}
    )
    parameters = engine.sharded.tier.parameter_file
    os.truncate(parameters.file.path, 0)
    for _ in range(SLOTS + 1):
        with pytest.raises(OffloadError, match="is shorter than it was written"):
            parameters.bring(torch.empty(8), 0).wait()
    with pytest.raises(OffloadError, match="is shorter than it was written"):
        engine.destroy()
    assert not [*tmp_path.iterdir()]
