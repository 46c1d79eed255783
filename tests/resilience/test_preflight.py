"""What is not alike on all ranks is named before any weight is made; so is an interface that is not there."""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from megazero import places
from megazero.config import Config
from megazero.errors import LaunchError
from megazero.models.parameters import parameter_count
from megazero.places import file_system
from megazero.resilience import paths, preflight
from megazero.resilience.preflight import disabled_infiniband, missing_interface, slow_links
from tests.engine.tiny import open_run, tiny, write_corpus


def start_unlike(settings: dict, rank: int, name: str) -> str:
    """The error of a start in which one rank has other code, another seed, an interface that is not there, or other
    files, in ``other`` of the working directory of all."""
    here, paths._PATIENCE = os.getcwd(), 0.1
    os.chdir(Path(str(settings["data.train"])).parent)
    settings = {**settings, "data.train": "train"}
    if int(os.environ["RANK"]) == rank:
        if name == "directory":
            os.chdir("other")
        elif name == "data":
            settings = {**settings, "checkpoint.dir": "../run"}
            os.chdir("other")
        elif name == "room":
            os.statvfs = lambda path: SimpleNamespace(f_bavail=7, f_frsize=4096)
        elif name == "read-only":
            tempfile.TemporaryFile = Mock(side_effect=OSError(30, "Read-only file system"))
        elif name == "code":
            preflight.code_hash = lambda: "other"
        elif name == "seed":
            settings = {**settings, "train.seed": 7}
        else:
            os.environ["NCCL_SOCKET_IFNAME"] = "ib9"
    try:
        with pytest.raises(LaunchError) as caught:
            open_run(settings)
    finally:
        os.environ.pop("NCCL_SOCKET_IFNAME", None)
        preflight.code_hash, os.statvfs, tempfile.TemporaryFile = CODE_HASH, STATVFS, TEMPORARY_FILE
        os.chdir(here)
    return str(caught.value)


CODE_HASH, STATVFS, TEMPORARY_FILE = preflight.code_hash, os.statvfs, tempfile.TemporaryFile


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("code", "megazero's code: not the same on all machines: other on rank 2 ("),
        ("seed", "the settings: not the same on all machines: "),
        ("interface", ": NCCL_SOCKET_IFNAME=ib9: this machine has no such interface; it has "),
        ("directory", r": checkpoint.dir = run: what rank 0 on "),
        ("data", "data.train: train.bin: not the same on all machines: "),
        ("room", f"rank 2 on {socket.gethostname()}: checkpoint.dir = run: 1,"),
        ("read-only", "checkpoint.dir = run: cannot write in "),
    ],
)
def test_what_is_not_alike_is_named_on_every_rank(
    ranks: Callable, corpus: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    settings = tiny(corpus, {"train.global_batch_size": 12, "checkpoint.dir": "run", "checkpoint.save_interval": 2})
    errors = ranks(3, start_unlike, {**settings, "checkpoint.keep": 2}, 2, name)
    assert len(set(errors)) == 1 and words in errors[0] and "rank 2" in errors[0]
    assert not list(corpus.glob("**/.megazero*")) and not (corpus / "run").exists()
    if name == "room":
        # 46,… parameters, three checkpoints of 12 bytes each at once; 7 blocks are free.
        assert re.search(
            r"1,\d{3},\d{3} bytes will be written \(3 more of 5\d\d,\d{3} at once\), and 28,672 are", errors[0]
        )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside it in ``other`` a copy that differs in a token."""
    directory = write_corpus(tmp_path_factory.mktemp("corpus"))
    shutil.copytree(directory, directory / "other")
    content = bytearray((directory / "train.bin").read_bytes())
    content[2] ^= 1
    (directory / "other" / "train.bin").write_bytes(content)
    return directory


def test_room_for_what_is_still_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 12 bytes times its parameters; six saves of steps 2 to 12, or as many as stay and one more."""
    size = 12 * parameter_count(Config().model.architecture)
    free = [0]
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=free[0], f_frsize=1))

    def told(bytes_free: int, keep: int, step: int = 0) -> tuple[str, str]:
        free[0] = bytes_free
        settings = {"dir": str(tmp_path / "a" / "run"), "save_interval": 2, "keep": keep}
        return paths.room(Config.from_dict({"train": {"steps": 12}, "checkpoint": settings}), step)

    assert told(size * 6, 0) == ("", "") and told(0, 2, step=12) == ("", "")
    problem, warning = told(size * 6 - 1, 0)
    assert not problem and warning.startswith(f"warning: 6 checkpoints of {size:,} bytes are to come, and {free[0]:,}")
    assert told(size - 1, 0)[0] and told(size - 1, 0, step=11)[0] and told(size, 0, step=11) == ("", "")
    assert told(size * 3, 2) == ("", "") and told(size * 3 - 1, 2)[0].startswith("checkpoint.dir = ")
    assert told(size * 1, 2, step=10) == ("", "")
    for step in (2, 4):
        (tmp_path / "a" / "run" / f"step_{step:08d}").mkdir(parents=True)
    assert told(size, 2) == ("", "") and told(size - 1, 2)[0]


def test_the_file_system_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file_system(Path("/proc/self")) == ("proc", "/proc")
    mounts = tmp_path / "mounts"
    mounts.write_text(r"/dev/a / ext4 rw 0 0" + "\n" + r"/dev/b /my\040disk\134 xfs rw 0 0" + "\n")
    monkeypatch.setattr(places, "_MOUNTS", mounts)
    assert file_system(Path("/my disk\\/run")) == ("xfs", "/my disk\\")
    assert paths.nearest("/proc/none/at/all") == Path("/proc")


def test_interfaces(tmp_path: Path) -> None:
    for name in ("lo", "eth0", "ib0"):
        (tmp_path / name).mkdir()
    for fine in ("eth", "eth0", "=ib0", "^docker", "x,ib", ""):
        assert missing_interface({"NCCL_SOCKET_IFNAME": fine}, tmp_path) is None, fine
    for wrong in ("eno1", "=eth", "x,y"):
        assert "it has eth0, ib0, lo" in (missing_interface({"NCCL_SOCKET_IFNAME": wrong}, tmp_path) or ""), wrong
    assert missing_interface({"GLOO_SOCKET_IFNAME": "eth"}, tmp_path) and not missing_interface({}, tmp_path / "none")


def test_infiniband_that_is_switched_off(tmp_path: Path) -> None:
    off = {"NCCL_IB_DISABLE": "1"}
    assert disabled_infiniband(off, tmp_path) is None and disabled_infiniband(off, tmp_path / "none") is None
    (tmp_path / "mlx5_0").mkdir()
    assert "mlx5_0" in (disabled_infiniband(off, tmp_path) or "") and disabled_infiniband({}, tmp_path) is None


def test_slow_links_are_named_against_those_of_their_kind() -> None:
    """Eight ranks, two to a machine: rank r receives from the one before it."""
    times, hosts = [1.0, 0.1] * 4, [float(rank // 2) for rank in range(8)]
    assert slow_links(times, hosts, 10**9) == [
        "links within a machine: 10 GB/s (median of 4, all at once)",
        "links between machines: 1 GB/s (median of 4, all at once)",
    ]
    times[0], times[5] = 4.0, 0.5
    found = slow_links(times, hosts, 10**9)
    assert found[1] == "slow link: rank 4 to rank 5, 2 GB/s" and found[3] == "slow link: rank 7 to rank 0, 0.25 GB/s"
    assert slow_links([0.1, 0.1], [1.0, 1.0], 10**9) == ["links within a machine: 10 GB/s (median of 2, all at once)"]
