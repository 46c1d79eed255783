"""Jobs of several machines, with a command in ssh's place that starts everything here; the real thing is in
tests/many_nodes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from megazero.errors import LaunchError
from megazero.launch.environment import first_host, free_port, other_launcher
from megazero.launch.exported import exported
from megazero.launch.hosts import Host, choose, read_hostfile
from megazero.launch.node import interface_to
from megazero.launch.rendezvous import own_store
from megazero.launch.verdict import Cause, Verdict, of_machines

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cluster(tmp_path: Path) -> list[str]:
    """The words that launch on two machines, a with one process and b with two."""
    ssh = tmp_path / "ssh.sh"
    ssh.write_text('#!/bin/bash\n[ "$1" = b ] && [ -e "$0.gone" ] && { echo "ssh: no route to b" >&2; exit 255; }\n')
    with ssh.open("a") as file:
        file.write('shift; exec bash -c "$*"\n')
    ssh.chmod(0o755)
    (tmp_path / "hosts").write_text("a slots=1\nb slots=2\n")
    command = [sys.executable, "-m", "megazero", "launch", "--hostfile", str(tmp_path / "hosts"), "--ssh", str(ssh)]
    return [*command, "--master_addr", "127.0.0.1", "--master_port", str(free_port())]


def script(tmp_path: Path, source: str) -> str:
    path = tmp_path / "job.py"
    path.write_text(
        "import os, sys, time\nrank, starts = os.environ['RANK'], os.environ['MEGAZERO_RESTARTS']\n" + source
    )
    return str(path)


def test_every_rank_runs_where_it_should_and_a_failure_is_started_again(cluster: list[str], tmp_path: Path) -> None:
    source = """
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "HERE", "THERE", "NCCL_X", "CUDA_VISIBLE_DEVICES")
print(*(os.environ.get(name) for name in names))
if starts == "0" and rank == "2":
    raise ValueError("planted")
elif starts == "0":
    time.sleep(100)
"""
    (tmp_path / ".deepspeed_env").write_text("# ours\nHERE=1 2\nTHERE=no\n")
    flags = ["--env", "THERE=yes", "--restarts", "1", "--log_dir", str(tmp_path / "logs"), "--include", "a@b:0,1"]
    environment = {**os.environ, "NCCL_X": "x", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*cluster, *flags, script(tmp_path, source)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    wanted = ["0 0 3 127.0.0.1 1 2 yes x None", "1 0 3 127.0.0.1 1 2 yes x 0,1", "2 1 3 127.0.0.1 1 2 yes x 0,1"]
    for rank, line in enumerate(wanted):
        assert (tmp_path / "logs" / "start_1" / f"rank_{rank}.out").read_text() == line + "\n"
        assert f"[rank {rank}] {line}\n" in done.stdout
    assert "ValueError: planted" in (tmp_path / "logs" / "start_0" / "rank_2.err").read_text()
    last = done.stderr.strip().splitlines()[-1]
    assert last == ("megazero launch: rank 2 failed: ValueError: planted; restart 1 of at most 1 in a row, in 5 s")


def test_a_signal_reaches_all_machines_whose_ranks_may_save(cluster: list[str], tmp_path: Path) -> None:
    source = f"""
import signal
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
open({str(tmp_path)!r} + "/pid" + rank, "w").close()
while not told:
    time.sleep(0.01)
open({str(tmp_path)!r} + "/saved" + rank, "w").close()
"""
    launcher = subprocess.Popen(
        [*cluster, "--restarts", "3", script(tmp_path, source)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 180
    while len(list(tmp_path.glob("pid*"))) < 3:
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    _, err = launcher.communicate(timeout=100)
    assert launcher.returncode == 128 + signal.SIGTERM and err == "megazero launch: stopped by SIGTERM\n"
    assert len(list(tmp_path.glob("saved*"))) == 3


def test_a_machine_out_of_reach_is_named(cluster: list[str], tmp_path: Path) -> None:
    (tmp_path / "ssh.sh.gone").touch()
    done = subprocess.run([*cluster, script(tmp_path, "")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 255
    last = done.stderr.strip().splitlines()[-1]
    assert last == "megazero launch: b is out of reach, or its launcher died: ssh: no route to b"


HOSTS = [Host("a", 2), Host("b", 4), Host("c", 4)]


@pytest.mark.parametrize(
    ("include", "exclude", "num_nodes", "per_node", "wanted"),
    [
        (None, None, None, None, HOSTS),
        (None, None, 2, None, HOSTS[:2]),
        (None, None, None, 2, [Host("a", 2), Host("b", 2), Host("c", 2)]),
        ("c:3,0@a", None, None, None, [Host("a", 2, None), Host("c", 2, (0, 3))]),
        (None, "b@c:1", None, None, [Host("a", 2), Host("c", 3, (0, 2, 3))]),
        (None, "a:0,1", None, None, HOSTS[1:]),
    ],
)
def test_what_is_chosen(include, exclude, num_nodes, per_node, wanted) -> None:
    assert choose(HOSTS, include, exclude, num_nodes, per_node) == wanted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("a", "b", None, None), "both given"),
        (("d", None, None, None), "'d' is not in the hostfile; it has a, b, c"),
        (("a:2", None, None, None), "a has slots 0 to 1"),
        (("a:x", None, None, None), "expected HOST:NUMBER"),
        (("a@a:1", None, None, None), "a is there twice"),
        ((None, "a@b@c", None, None), "leaves no machine"),
        ((None, None, 4, None), "--num_nodes 4: there are 3 machines"),
        ((None, None, None, 3), "3 processes on each machine: a has slots=2"),
    ],
)
def test_what_cannot_be_chosen(given: tuple, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        choose(HOSTS, *given)


def test_a_hostfile_cannot_give_ssh_options(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("-oProxyCommand=x slots=1\n")
    with pytest.raises(LaunchError, match="line 1"):
        read_hostfile(path)


def test_a_hostfile_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(LaunchError, match="File too large"):
        read_hostfile(path)
    path.write_text("x" * 100_000)
    with pytest.raises(LaunchError, match=r"line 1: 'x+ … \(98\d+ characters\) … x+'; expected HOST slots=NUMBER"):
        read_hostfile(path)


def test_variables_and_mistakes_in_them(tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("A=1\nB = 2\n")
    with pytest.raises(LaunchError, match=r"\.deepspeed_env, line 2: 'B = 2'; expected NAME=VALUE"):
        exported({}, [], [tmp_path])
    assert exported({"PATH": "x", "NCCL_DEBUG": "INFO", "PYTHONPATH": "p"}, ["C=a=b"], []) == {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "p",
        "C": "a=b",
    }
    with pytest.raises(LaunchError, match="--env: 'C'; expected NAME=VALUE"):
        exported({}, ["C"], [])
    (tmp_path / ".deepspeed_env").write_bytes(b"A=\xff\n")
    with pytest.raises(LaunchError, match=r"\.deepspeed_env: cannot be read"):
        exported({}, [], [tmp_path])


def test_the_cause_is_the_rank_that_came_forward_not_what_followed() -> None:
    said, lost = Verdict(1, "rank 1 failed: boom", Cause.SAID), Verdict(255, "b is out of reach", Cause.LOST)
    ended = Verdict(143, "stopped by SIGTERM", Cause.TERMINATED)
    assert of_machines([ended, lost, said]) is said and of_machines([ended, lost]) is lost
    assert [v.may_be_restarted for v in (said, lost, Verdict(0), Verdict(2, "error"))] == [True, True, False, False]
    assert not Verdict(143, stopped=True).may_be_restarted


def test_under_srun_and_mpi() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2"}
    slurm |= {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}
    wanted = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu07", "MASTER_PORT": "20099"}
    assert other_launcher(slurm) == wanted
    mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("LOCAL_RANK", "0"), ("SIZE", "2"))}
    with pytest.raises(LaunchError, match="set MASTER_ADDR"):
        other_launcher({**mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})
    there = other_launcher({**mpi, "MASTER_ADDR": "h"})
    assert there == {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    here = other_launcher({**mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert here["MASTER_ADDR"] == "127.0.0.1" and here["MASTER_PORT"].isdigit()
    # The script of a batch job, which srun has not started.
    assert other_launcher({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"}) == {}
    assert [first_host(text) for text in ("a[03-05,9]-x,b", "a,b", "n1")] == ["a03-x", "a", "n1"]


def test_a_job_of_one_machine_that_mpirun_started_listens_on_the_loopback_alone(monkeypatch) -> None:
    """torch's own store would listen at every address of the machine."""
    port, second = free_port(), timedelta(seconds=5)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "node-a")
    assert own_store(0, 2, second) is None, "the others come from elsewhere"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store = own_store(0, 1, second)
    store.set("key", "value")
    assert own_store(1, 1, second).get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert own_store(0, 2, second) is None, "the launcher serves it"


def test_the_interface_of_an_address_of_this_machine() -> None:
    assert interface_to("127.0.0.1", 9) == "lo" and interface_to("no such name", 9) is None
