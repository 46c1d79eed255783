"""The harness itself: results, failures, crashes and hangs, and that it works again after each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import distributed as dist

from tests.distributed.harness import RankFailure


@dataclass
class Point:
    """A class of this module, to be sent both ways."""

    x: int


def sum_of_ranks(scale: int, offset: int = 0) -> tuple[int, float]:
    total = torch.tensor(float(dist.get_rank() * scale + offset))
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def environment() -> tuple[str, ...]:
    return os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], str(torch.get_num_threads())


def move(point: Point) -> Point:
    return Point(point.x + dist.get_rank())


def process_id() -> int:
    return os.getpid()


def raise_on_rank_1() -> None:
    print("about to fail")
    if dist.get_rank() == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.zeros(1))


def lose_rank_1() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        sleep_for_ever()


def sleep_for_ever() -> None:
    while True:
        time.sleep(1)


def use_subgroups() -> float:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value, group=mesh.get_group("dp"))
    return value.item()


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_results_by_rank(ranks: Callable, world_size: int) -> None:
    total = 10.0 * sum(range(world_size)) + world_size
    assert ranks(world_size, sum_of_ranks, 10, offset=1) == [(rank, total) for rank in range(world_size)]


def test_environment_says_who_a_rank_is(ranks: Callable) -> None:
    assert ranks(2, environment) == [("0", "0", "2", "1"), ("1", "1", "2", "1")]


def test_classes_of_the_test_module_travel(ranks: Callable) -> None:
    assert ranks(2, move, Point(5)) == [Point(5), Point(6)]


def test_subgroups_are_fresh_in_every_job(ranks: Callable) -> None:
    for _ in range(3):
        assert ranks(4, use_subgroups) == [1.0, 1.0, 5.0, 5.0]


def test_workers_persist(ranks: Callable) -> None:
    assert ranks(2, process_id) == ranks(2, process_id)
    assert os.getpid() not in ranks(2, process_id)


def test_a_failure_shows_the_cause_and_the_stacks(ranks: Callable, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(3, raise_on_rank_1)
    message = str(failure.value)
    assert message.index("rank 1 raised") < message.index("ValueError: the cause") < message.index("rank 0 had not")
    assert "rank 2 had not ended" in message and "in raise_on_rank_1" in message
    assert "[rank 1] about to fail" in capsys.readouterr().out
    assert ranks(3, sum_of_ranks, 1)[2] == (2, 3.0)


def test_a_dead_process_is_reported(ranks: Callable) -> None:
    with pytest.raises(RankFailure, match="rank 1's process died: SIGKILL"):
        ranks(2, lose_rank_1)
    assert ranks(2, sum_of_ranks, 1)[1] == (1, 1.0)


def test_a_hang_is_ended_and_located(ranks: Callable) -> None:
    before = ranks(2, process_id)
    with pytest.raises(RankFailure, match="(?s)timeout.*rank 1 had not ended.*in sleep_for_ever"):
        ranks(2, hang_on_rank_1, timeout=1)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert ranks(2, sum_of_ranks, 1)[1] == (1, 1.0)


def test_only_module_level_functions(ranks: Callable) -> None:
    with pytest.raises(AssertionError, match="only module-level"):
        ranks(2, lambda: None)
