"""Slow ranks are named, against the others of their stage, and only where they are slow again and again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megazero.resilience.stragglers import slow_ranks
from tests.engine.tiny import open_run, tiny, write_corpus

STAGES = {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1}


def test_each_stage_has_its_own_median() -> None:
    times = [1.0, 1.1, 1.0, 2.0, 2.1, 3.0]
    assert [(slow.rank, slow.seconds, slow.median) for slow in slow_ranks([times] * 3, STAGES, 1.3)] == [(5, 3.0, 2.1)]
    assert slow_ranks([times] * 3, STAGES, 1.5) == []


def test_once_is_chance() -> None:
    slow, fair = [1.0, 1.0, 9.0, 2.0, 2.0, 2.0], [1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    assert slow_ranks([slow, fair, slow], STAGES, 1.3) == []
    assert [found.rank for found in slow_ranks([slow, slow, slow], STAGES, 1.3)] == [2]


def test_the_slower_of_two_and_nobody_for_a_millisecond() -> None:
    assert [found.rank for found in slow_ranks([[1.0, 2.0]] * 3, {0: 0, 1: 0}, 1.3)] == [1]
    assert slow_ranks([[0.001, 0.002]] * 3, {0: 0, 1: 0}, 1.3) == []


class Slow:
    """A source that takes its time."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def read(self, *where: int) -> Any:
        time.sleep(0.2)
        return self.source.read(*where)


def train_with_a_slow_rank(settings: dict, slow: int) -> list[str]:
    """The lines of a run in which one rank's reads are slow."""
    engine, source, _ = open_run(settings)
    lines: list[str] = []
    engine.telemetry.message = lines.append
    with engine:
        if int(os.environ["RANK"]) == slow:
            source = Slow(source)
        while engine.running():
            engine.train_batch(source)
    return [line for line in lines if line.startswith("slow: ")]


def test_a_slow_rank_is_named_in_the_log(ranks: Callable, tmp_path: Path) -> None:
    settings = tiny(write_corpus(tmp_path), {"train.steps": 5, "watch.straggler_factor": 4})
    lines = ranks(2, train_with_a_slow_rank, settings, 1)[0]
    assert len(lines) == 1 and lines[0].startswith("slow: rank 1 on ") and " s is the median of its stage" in lines[0]
