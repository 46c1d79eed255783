"""`--min_nodes`: which machines a restart is on, and what is said where a layout fits none."""

from __future__ import annotations

import signal
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from megazero.config import Config
from megazero.errors import ConfigError, WorldSizeError
from megazero.launch import main
from megazero.launch.fewer import answering, restart
from megazero.launch.hosts import Host
from megazero.launch.verdict import Cause, Verdict, of_failures

HOSTS = [Host(name, 1) for name in "abcd"]
MISFIT = Verdict(2, "rank 0 failed: 8 is not a multiple", Cause.SAID, misfits=True)


class Job:
    """Fits the numbers of machines in ``fits``; remembers where it was started, and what was said."""

    def __init__(self, *fits: int) -> None:
        self.fits, self.starts, self.said = fits, [], []

    def start(self, hosts: Sequence[Host]) -> Verdict:
        self.starts.append("".join(host.name for host in hosts))
        return Verdict(0) if len(hosts) in self.fits else MISFIT

    def without(self, gone: str, least: int) -> Verdict:
        return restart(HOSTS, least, lambda host: host.name not in gone, self.start, self.said.append)


def test_all_that_answer_are_used() -> None:
    job = Job(3, 4)
    assert job.without("", 1).code == 0 and job.starts == ["abcd"] and job.said == []
    assert job.without("a", 2).code == 0 and job.starts[1:] == ["bcd"]
    assert job.said == ["a: no answer; 3 of 4 machines are left (--min_nodes 2)"]


def test_a_layout_that_does_not_fit_takes_fewer_still() -> None:
    job = Job(1, 2, 4)
    assert job.without("b", 1).code == 0 and job.starts == ["acd", "ac"]
    assert job.said[1] == "not on 3: rank 0 failed: 8 is not a multiple"


def test_one_that_cannot_shrink_says_so_and_may_be_tried_again() -> None:
    job = Job(4)
    verdict = job.without("b", 2)
    assert job.starts == ["acd", "ac"] and verdict.may_be_restarted
    assert verdict.message == (
        "b: no answer; 3 of 4 machines are left, and the job fits none of 2 to 3: rank 0 failed: 8 is not a multiple"
    )
    # Where all are there it is the user's to mend, as without --min_nodes.
    assert job.without("", 2).code == 0 and not Job(3).without("", 2).may_be_restarted


def test_too_few() -> None:
    verdict = Job(1).without("abc", 2)
    assert verdict.message == "a, b, c: no answer; 1 of 4 machines are left, and --min_nodes is 2"
    assert verdict.may_be_restarted


def test_a_machine_answers_where_a_command_runs_there(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\n[ "$1" = gone ] && exit 255\nshift; exec "$@"\n')
    ssh.chmod(0o755)
    answers = answering(lambda host: [str(ssh), host.name])
    assert [answers(Host(name, 1)) for name in ("there", "gone", "localhost")] == [True, False, True]
    assert not answering(lambda host: [str(tmp_path / "none")])(Host("there", 1))


def test_only_the_number_of_processes_makes_a_misfit() -> None:
    tree = {"parallel": {"tp": 2}, "train": {"global_batch_size": 8}}
    with pytest.raises(WorldSizeError, match="does not divide the 3 processes"):
        Config.from_dict(tree, world_size=3)
    with pytest.raises(WorldSizeError, match="8 is not a multiple of train.micro_batch_size x dp = 1 x 3"):
        Config.from_dict(tree).validate_world(6)
    wrong = {**tree, "optimizer": {"warmup_steps": 5000}}
    with pytest.raises(ConfigError, match="does not divide the 3 processes") as caught:
        Config.from_dict(wrong, world_size=3)
    assert not isinstance(caught.value, WorldSizeError)
    for misfits in (True, False):
        record = {"first": True, "code": 2, "summary": "…", "misfits": misfits}
        failure = SimpleNamespace(error_file_data={"megazero": record}, exitcode=2, pid=1, timestamp=0)
        assert of_failures({0: failure}).misfits is misfits


def test_of_ranks_that_were_killed_the_first_is_named() -> None:
    """Rank 0 waited for rank 1, say for its part of a save, when that was killed; the agent has killed it later."""
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=rank, exitcode=-signal.SIGKILL, error_file="none") for rank in (0, 1)
    }
    failures[0].timestamp += 30
    assert of_failures(failures).message == "rank 1 (process 1) was killed by SIGKILL"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--restarts", "2"], "knows of no others; give --hostfile"),
        (["--restarts", "2", "--hostfile", "hosts", "--min_nodes", "3"], "there are 2 machines; expected 1 to 2"),
        (["--hostfile", "hosts"], "give --restarts N as well"),
    ],
)
def test_what_cannot_be_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, flags: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    (tmp_path / "job.py").touch()
    parser = ArgumentParser()
    main.add_arguments(parser)
    assert main.run(parser.parse_args(["--min_nodes", "1", *flags, "job.py"])) == 2
    assert words in capsys.readouterr().err
