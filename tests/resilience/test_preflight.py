"""What is not alike on all ranks is named before any weight is made; so is an interface that is not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megazero.errors import LaunchError
from megazero.resilience import preflight
from megazero.resilience.preflight import disabled_infiniband, missing_interface, slow_links
from tests.engine.tiny import open_run, tiny, write_corpus


def start_unlike(settings: dict, rank: int, name: str) -> str:
    """The error of a start in which one rank has other code, another seed, or an interface that is not there."""
    if int(os.environ["RANK"]) == rank:
        if name == "code":
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
        preflight.code_hash = CODE_HASH
    return str(caught.value)


CODE_HASH = preflight.code_hash


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("code", "megazero's code: not the same on all machines: other on rank 2 ("),
        ("seed", "the settings: not the same on all machines: "),
        ("interface", ": NCCL_SOCKET_IFNAME=ib9: this machine has no such interface; it has "),
    ],
)
def test_what_is_not_alike_is_named_on_every_rank(ranks: Callable, tmp_path: Path, name: str, words: str) -> None:
    errors = ranks(3, start_unlike, tiny(write_corpus(tmp_path), {"train.global_batch_size": 12}), 2, name)
    assert len(set(errors)) == 1 and words in errors[0] and "rank 2" in errors[0]


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
