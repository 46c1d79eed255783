"""Processes' GPUs, and DeepSpeed's launcher flags: what they ask for, what contradicts itself or is not there."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from megazero.errors import LaunchError
from megazero.launch.devices import chosen_devices, gpu_of


def flags(**given: Any) -> Namespace:
    names = ("num_gpus", "num_nodes", "include", "exclude", "hostfile")
    return Namespace(**dict.fromkeys(names) | given)


@pytest.mark.parametrize(
    ("given", "gpus", "wanted"),
    [
        ({}, 4, (None, None)),
        ({"num_gpus": 3}, 4, (3, None)),
        ({"num_gpus": 3, "num_nodes": 1}, 0, (3, None)),
        ({"include": "localhost:2,0"}, 4, (2, [0, 2])),
        ({"include": "localhost"}, 4, (4, [0, 1, 2, 3])),
        ({"include": "127.0.0.1:0,1"}, 0, (2, None)),
        ({"exclude": "localhost:1"}, 4, (3, [0, 2, 3])),
    ],
)
def test_what_they_ask_for(given: dict[str, Any], gpus: int, wanted: tuple) -> None:
    assert chosen_devices(flags(**given), gpus) == wanted


@pytest.mark.parametrize(
    ("given", "gpus", "message"),
    [
        ({"num_gpus": 5}, 4, "--num_gpus 5: there are 4 GPUs"),
        ({"num_gpus": 0}, 4, "--num_gpus 0: at least 1"),
        ({"num_nodes": 2}, 4, "--num_nodes 2: this is one machine; name the others in a --hostfile"),
        ({"num_gpus": 1, "include": "localhost:1"}, 4, "--num_gpus and --include are both given"),
        ({"include": "localhost", "exclude": "localhost"}, 4, "--include and --exclude are both given"),
        ({"include": "localhost:4"}, 4, "there is no GPU 4; there are 0 to 3"),
        ({"include": "localhost:a"}, 4, "expected HOST:NUMBER"),
        ({"include": "worker-7:0"}, 4, "worker-7 is not this machine"),
        ({"include": "localhost:0@worker-7:0"}, 4, "several machines"),
        ({"exclude": "localhost:0,1"}, 2, "leaves no GPU"),
    ],
)
def test_mistakes(given: dict[str, Any], gpus: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        chosen_devices(flags(**given), gpus)


def test_hostfiles(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"

    def chosen(text: str, **given: Any) -> tuple:
        path.write_text(text)
        return chosen_devices(flags(hostfile=str(path), **given), 0)

    assert chosen("# mine\nlocalhost slots=3  # all\n\n") == (3, None)
    assert chosen("localhost slots=3", include="localhost:0,2") == (2, None)
    with pytest.raises(LaunchError, match="--hostfile .*none: cannot be read"):
        chosen_devices(flags(hostfile=str(tmp_path / "none")), 4)
    for text, message in (
        ("localhost\n", "line 1: 'localhost'; expected HOST slots=NUMBER"),
        ("localhost slots=1\nlocalhost slots=2", "line 2: localhost is there twice"),
        ("# none", "names no machine"),
    ):
        with pytest.raises(LaunchError, match=message):
            chosen(text)


def test_processes_share_gpus_only_where_nccl_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    assert [gpu_of(rank, 2) for rank in (0, 1)] == [0, 1]
    for value in (None, "0"):
        if value is not None:
            monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", value)
        with pytest.raises(LaunchError, match="3 processes or more on a machine of 2 GPUs: start at most 2"):
            gpu_of(2, 2)
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert [gpu_of(rank, 2) for rank in range(5)] == [0, 1, 0, 1, 0]
