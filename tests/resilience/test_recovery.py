"""After a fault a run goes on from the newest good checkpoint, and ends as one that was never disturbed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megazero.checkpoint.locate import newest_or_none
from megazero.resilience.signals import LateFlags, StopRequest
from tests.engine.tiny import flags, rank_files, run_script, tiny, write_corpus
from tests.forked_scripts import run_forked

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def events(path: Path) -> list[tuple[str, int]]:
    return [(line["event"], line["step"]) for line in map(json.loads, path.read_text().splitlines())]


def saved(directory: Path) -> dict[str, object]:
    """Settings of six steps, each second one saved in ``directory``."""
    place = {"checkpoint.dir": directory / "run", "checkpoint.save_interval": 2}
    return {"train.steps": 6, "zero.stage": 1, "log.events": directory / "events.jsonl", **place}


def test_a_killed_rank_and_a_damaged_checkpoint_cost_a_restart_and_no_more(
    ranks: Callable, corpus: Path, tmp_path: Path
) -> None:
    """SIGKILL after step 5, where step 4 is saved; the launcher starts the job again by itself. Then a bit flips."""
    whole, here = tmp_path / "whole", tmp_path / "here"
    ranks(2, run_script, tiny(corpus, saved(whole)))
    command = ["-m", "megazero", "launch", "--nproc", "2", "--restarts", "1"]
    command += [str(Path(__file__).with_name("job.py")), "kill", "1", "5", *flags(tiny(corpus, saved(here)))]
    done = run_forked(*command, directory=ROOT)
    assert done.returncode == 0, done.stderr
    assert "was killed by SIGKILL; restart 1 of at most 1 in a row, in 5 s" in done.stderr
    assert "2 processes begin after step 4 (restart 1)" in done.stdout
    assert rank_files(here / "run") == rank_files(whole / "run")
    found = events(here / "events.jsonl")
    assert [event for event in found if event[0] == "save"] == [("save", 2), ("save", 4), ("save", 6)]
    assert ("start", 0) in found and ("start", 4) in found

    file = here / "run" / "step_00000006" / "rank_00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    ranks(2, run_script, tiny(corpus, saved(here)))
    assert newest_or_none(here / "run") == here / "run" / "step_00000006"
    assert rank_files(here / "run") == rank_files(whole / "run")
    assert (here / "run" / "step_00000006.damaged").is_dir()
    texts = [json.loads(line)["text"] for line in (here / "events.jsonl").read_text().splitlines()]
    assert any("passing over a damaged checkpoint" in text and "rank_00001.safetensors" in text for text in texts)


def test_flags_that_nobody_asks_about_are_few_and_none_is_lost() -> None:
    late = LateFlags(torch.device("cpu"))
    for step in range(1000):
        late.note(torch.tensor(float(step == 7)))
    assert len(late._flags) < 100
    assert late.up() and not late.up()
    late.note(torch.tensor(1.0))
    assert not late.up()


def test_slurms_warning_saves_and_stops() -> None:
    request = StopRequest()
    request.install()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.requested(0.0, 0.0) and request.reason == "received SIGUSR1"
    finally:
        request.uninstall()
