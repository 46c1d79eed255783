"""Case 46: a rank that never comes, or is gone, is named within the limit, and with it who waits for it and where."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from megazero.pipeline.schedules import Action, Kind
from megazero.resilience import watchdog
from megazero.resilience.collectives import Entered
from megazero.resilience.position import Position, describe
from megazero.resilience.report import Silence, Statement, report, spelled, waits
from tests.engine.tiny import flags, open_run, tiny, write_corpus

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("job.py")


class Late:
    """A source that keeps its rank from going on until the watchdog has spoken."""

    def __init__(self, source: Any, spoken: threading.Event) -> None:
        self.source, self.spoken, self.reads = source, spoken, 0

    def read(self, *where: int) -> Any:
        self.reads += 1
        if self.reads == 3:
            assert self.spoken.wait(60)
        return self.source.read(*where)


def hang(settings: dict, missing: int, rank_of: Callable[[], int]) -> tuple[str, str, bool]:
    """Train with one rank late at step 3; what the watchdog would have ended this rank with: summary, text, shown."""
    said: list[tuple[str, str, bool]] = []
    spoken = threading.Event()

    def note(summary: str, text: str, shown: bool, then: Callable[[], object]) -> NoReturn:
        said.append((summary, text, shown))
        then()
        spoken.set()
        raise SystemExit

    watchdog.end_process = note
    engine, source, _ = open_run(settings)
    with engine:
        late = Late(source, spoken) if rank_of() == missing else source
        while engine.running():
            engine.train_batch(late)
        assert spoken.wait(60)
    return said[0]


def rank() -> int:
    return int(os.environ["RANK"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_46_a_collective_that_one_rank_never_enters(ranks: Callable, corpus: Path) -> None:
    settings = tiny(corpus, {"parallel.tp": 2, "train.timeout": 5, "train.micro_batch_size": 1, "train.steps": 3})
    endings = ranks(4, hang, settings, 2, rank)
    shown = [(summary, text) for summary, text, is_shown in endings if is_shown]
    assert len(shown) == 1
    summary, text = shown[0]
    assert summary.startswith("no progress for 5 s (train.timeout): all_reduce (number ")
    assert summary.endswith(" missing (rank 2 at step 3: reading data)")
    lines = text.splitlines()
    in_dp = [line for line in lines if "of dp (ranks 0, 2): rank 0 waiting; rank 2 missing" in line]
    in_tp = [line for line in lines if "of tp (ranks 2, 3): rank 3 waiting; rank 2 missing" in line]
    assert len(in_dp) == len(in_tp) == 1
    assert any(line.startswith("  rank 2 on ") and line.endswith("at step 3: reading data") for line in lines)
    assert "in Late.read" in text or ", in read" in text
    assert all("ended by rank" in summary for summary, _, is_shown in endings if not is_shown)


def test_46_a_transfer_that_never_comes(ranks: Callable, corpus: Path) -> None:
    settings = tiny(corpus, {"parallel.pp": 2, "train.timeout": 5, "train.micro_batch_size": 1, "train.steps": 3})
    endings = ranks(2, hang, settings, 0, rank)
    (text,) = [text for _, text, is_shown in endings if is_shown]
    transfer = "a transfer (step 3: recv forward of micro-batch 0 from pipeline rank 0)"
    assert f"  in {transfer}: rank 1 waiting; rank 0 missing" in text


def test_a_stopped_process_is_named_and_the_job_ends(corpus: Path) -> None:
    settings = tiny(corpus, {"watch.peer_timeout": 3, "train.micro_batch_size": 1})
    command = [sys.executable, "-m", "megazero", "launch", "--nproc", "2", str(JOB), "stop", "1", "2", *flags(settings)]
    environment = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    begin = time.monotonic()
    launcher = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        # The stopped one is the agent's to kill, after its time for ending is over; the report does not wait for that.
        lines = []
        for line in launcher.stderr:
            lines.append(line)
            if line.startswith("  stack of"):
                break
    finally:
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=100)
    text = "".join(lines)
    assert "has given no sign of life for 3 s (watch.peer_timeout)" in text, text
    assert "  rank 1 (" in text and "gave no answer: stopped, dead, or cut off; last heard of at " in text
    assert launcher.returncode != 0 and time.monotonic() - begin < 100


NOTHING = {"awaits": (), "groups": (), "stack": "here"}


def statement(at: str = "step 1: forward of micro-batch 0", **given: Any) -> Statement:
    return Statement(**{"host": "a", "process": 1, "at": at, "seconds": 9.0, "device": "", **NOTHING, **given})


def test_the_first_wait_named_is_where_it_began() -> None:
    """Rank 3 reads; 2 waits for it, 1 for 2 and 0 for 1."""
    said = {
        0: statement(groups=(Entered("tp", (0, 1), 5, 5, "all_reduce"),)),
        1: statement(groups=(Entered("tp", (0, 1), 4), Entered("dp", (1, 2), 7, 7, "reduce_scatter"))),
        2: statement(awaits=(3,)),
        3: statement("step 1: reading data", groups=(Entered("pair", (3,), 1),)),
    }
    found = waits(said, said)
    assert [(wait.waiting, wait.missing) for wait in found] == [((2,), (3,)), ((0,), (1,)), ((1,), (2,))]
    assert found[1].operation == "all_reduce (number 5) of tp (ranks 0, 1)"
    text, summary = report("no progress for 9 s", said, {})
    assert summary.endswith("rank 2 waiting, rank 3 missing (rank 3 at step 1: reading data)")
    assert text.count("stack of ranks 0 to 3") == 1


def test_nobody_is_missing_where_all_wait() -> None:
    said = {r: statement(groups=(Entered("dp", (0, 1), 3, 3, "all_reduce"),)) for r in (0, 1)}
    text, summary = report("no progress for 9 s", said, {})
    assert "missing" not in text and summary == "no progress for 9 s"


def test_silent_ranks_are_missing_wherever_they_belong() -> None:
    said = {0: statement(groups=(Entered("world", (0, 1, 2, 3), 3, 3, "all_reduce"),))}
    silent = {r: Silence("b", 10 + r, "step 4: ending") for r in (1, 2, 3)}
    text, summary = report("rank 1 is gone", said, silent)
    assert "rank 0 waiting; ranks 1 to 3 missing" in text and "rank 0 waiting, ranks 1 to 3 missing" in summary
    assert "  rank 2 (b, process 12) gave no answer: stopped, dead, or cut off; last heard of at step 4: ending" in text


def test_ranks_are_spelled_in_runs() -> None:
    assert spelled([3]) == "rank 3" and spelled([2, 1]) == "ranks 1, 2"
    assert spelled([8, 0, 1, 2, 3]) == "ranks 0 to 3, 8"


def test_a_position_says_where_and_for_how_long() -> None:
    position = Position(torch.device("cpu"))
    assert describe(position.now) == "starting" and not position.now.limited
    position.at("reading data", 7)
    time.sleep(0.02)
    position.at(Action(Kind.FORWARD, 2))
    time.sleep(0.03)
    position.at(Action(Kind.RECV_BACKWARD, 2, peer=1, slot=4))
    assert describe(position.now) == "step 7: recv backward of micro-batch 2 from pipeline rank 1"
    time.sleep(0.02)
    position.at("logging")
    # What a rank waits for another is not its own time.
    assert 0.05 <= position.busy() < 0.07 and position.device_at() is None
    position.at("reading data", 8)
    assert position.busy() == 0


def test_statements_survive_the_store() -> None:
    said = statement(awaits=(1,), groups=(Entered("dp", (0, 1), 3, 3, "all_reduce"),))
    assert watchdog._statement_of(json.loads(json.dumps(said))) == said
