"""Slurm itself on this machine, two nodes of it, and the ways to start a job there: a table.

    python tests/many_nodes/slurm.py [--only WAY …]

Needs root and the packages slurmctld, slurmd, slurm-client and munge. Not a test that pytest runs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)

from tests.engine.tiny import flags, tiny, write_corpus  # noqa: E402

CONFIG = """
ClusterName=megazero
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
CredType=cred/munge
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldPort=26817
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
KillWait=30
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[26821-26822] CPUs=2 RealMemory=1000 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
LIMIT = 900.0
"""Seconds for a job; one that goes back into the queue waits there for two minutes."""


class Slurm:
    """The daemons; a context manager that ends them."""

    def __init__(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="megazero-slurm-"))
        self.environment = {**os.environ, "SLURM_CONF": str(self.place / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Slurm:
        try:
            self._set_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _set_up(self) -> None:
        place = self.place
        os.chmod(place, 0o755)
        (place / "state").mkdir()
        (place / "slurm.conf").write_text(CONFIG.format(host=socket.gethostname().partition(".")[0], place=place))
        for number in range(8):  # which nobody opens
            (place / f"gpu{number}").touch()
        (place / "gres.conf").write_text(f"Name=gpu File={place}/gpu[0-7]\n")
        key = place / "munge.key"
        key.write_bytes(os.urandom(1024))
        os.chmod(key, 0o400)
        words = ["--key-file", key, "--socket", place / "munge.socket", "--pid-file", place / "munge.pid"]
        words += ["--log-file", place / "munge.log", "--seed-file", place / "munge.seed"]
        self._start("munged", "--foreground", "--force", *map(str, words))
        time.sleep(1)
        self._start("slurmctld", "-D")
        for node in ("node1", "node2"):
            self._start("slurmd", "-D", "-N", node)
        deadline = time.monotonic() + 60
        while self.run("sinfo", "-h", "-o", "%t").split() != ["idle"]:
            assert time.monotonic() < deadline, self.run("sinfo")
            time.sleep(0.5)

    def _start(self, *words: str) -> None:
        log = (self.place / f"{words[0]}-{len(self._daemons)}.log").open("w")
        self._daemons.append(subprocess.Popen(words, env=self.environment, stdout=log, stderr=log))

    def run(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, cwd=ROOT, capture_output=True, text=True)
        return done.stdout + done.stderr

    def __exit__(self, *error: object) -> None:
        self.run("scancel", "--user=root", "--signal=KILL")
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
        shutil.rmtree(self.place, ignore_errors=True)

    def state(self, number: str) -> str:
        """As ``scontrol show job`` has it: RUNNING, COMPLETED, …; with the exit code and how often it was requeued."""
        told = self.run("scontrol", "show", "job", number)
        found = dict(re.findall(r"(JobState|ExitCode|Restarts)=(\S+)", told))
        return f"{found.get('JobState')} exit {found.get('ExitCode')} restarts {found.get('Restarts')}"


class Way(NamedTuple):
    """``script``: what is submitted, a shell script's text, or the path of one with its arguments. ``wanted``: patterns
    that its output and its last state must match. ``after``: output upon which ``do`` is done to the job, once."""

    script: str | list[str]
    wanted: tuple[str, str]
    after: str = ""
    do: Callable[[Slurm, str], None] | None = None


def job(slurm: Slurm, name: str, way: Way, environment: dict[str, str]) -> tuple[str, str]:
    """Submit; the output and the state once the job is done."""
    log = slurm.place / f"{name}.log"
    words = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", f"--output={log}"]
    if isinstance(way.script, str):
        path = slurm.place / f"{name}.sh"
        path.write_text(f"#!/usr/bin/env bash\nset -e\n{way.script}\n")
        submitted = [str(path)]
    else:
        submitted = way.script
    slurm.environment.update(environment)
    number = slurm.run(*words, f"--chdir={ROOT}", *submitted).strip()
    assert number.isdigit(), number
    deadline, do = time.monotonic() + LIMIT, way.do
    while not re.match("COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL", slurm.state(number)):
        if time.monotonic() > deadline:
            slurm.run("scancel", number)
            return log.read_text() if log.exists() else "", f"HUNG {slurm.state(number)}"
        if do is not None and log.exists() and way.after in log.read_text():
            do(slurm, number)
            do = None
        time.sleep(1)
    return log.read_text() if log.exists() else "", slurm.state(number)


def warn(slurm: Slurm, number: str) -> None:
    """What Slurm does two minutes before the time limit."""
    slurm.run("scancel", "--batch", "--signal=USR1", number)


def kill_rank(slurm: Slurm, number: str) -> None:
    """SIGKILL to rank 1 of the job."""
    for place in Path("/proc").iterdir():
        with suppress(OSError):
            environment = (place / "environ").read_bytes().split(b"\0")
            if {f"SLURM_JOB_ID={number}".encode(), b"RANK=1"} <= set(environment):
                os.kill(int(place.name), signal.SIGKILL)


def ways(corpus: Path, place: Path) -> dict[str, Way]:
    python = sys.executable
    settings = tiny(corpus, {"train.micro_batch_size": 1})
    training = " ".join(["pretrain/gpt.py", *flags(settings)])
    saved = f"{training} --train.steps 4000 --checkpoint.dir {place}/run --log.interval 20"
    # The nodes' names, which other machines would know, mean nothing here.
    launch = f"{python} -m megazero launch --master_addr 127.0.0.1"
    example = ["examples/slurm.sbatch", *flags(settings)]
    long = [*example, "--log.interval", "20", "--train.steps"]
    done = ("step 8/8", "COMPLETED exit 0:0")
    return {
        "megazero launch in a batch script": Way(f"{launch} --nproc 2 {training}", done),
        "srun megazero launch": Way(f"srun --kill-on-bad-exit=1 {launch} --nproc 2 {training}", done),
        "srun python pretrain/gpt.py": Way(f"MASTER_ADDR=127.0.0.1 srun {python} {training}", done),
        "USR1 to the script, which is the launcher": Way(
            f"exec {launch} {saved}", ("received SIGUSR1", ""), "step 20/", warn
        ),
        "examples/slurm.sbatch": Way(example, done),
        "examples/slurm.sbatch, the warning signal: saved, requeued, resumed": Way(
            [*long, "400", "--checkpoint.dir", f"{place}/again"],
            (r"(?s)received SIGTERM.*resumed step \d+.*step 400/400", "COMPLETED exit 0:0 restarts 1"),
            "step 20/",
            warn,
        ),
        "examples/slurm.sbatch, SIGKILL of a rank": Way(
            [*long, "4000", "--checkpoint.dir", f"{place}/killed"], ("", r"FAILED exit [1-9]"), "step 20/", kill_rank
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="WAY", help="those that have one of these words (default: all)")
    arguments = parser.parse_args()
    corpus = write_corpus(Path(tempfile.mkdtemp(prefix="megazero-corpus-")))
    failed = False
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the daemons are ended
    with Slurm() as slurm:
        environment = {"PYTHON": sys.executable, "NPROC": "1", "DATA": str(corpus / "train"), "CHECKPOINTS": ""}
        environment |= {"OUT": str(slurm.place / "out")}
        print("| started by | outcome |\n|---|---|", flush=True)
        for number, (name, way) in enumerate(ways(corpus, slurm.place).items()):
            if arguments.only and not any(word in name for word in arguments.only):
                continue
            output, state = job(slurm, f"job{number}", way, environment)
            right = re.search(way.wanted[0], output) and re.search(way.wanted[1], state)
            failed |= not right
            print(f"| {name} | {state}{'' if right else '; FAILED: ' + output[-3000:]} |", flush=True)
    return int(failed)


def with_names() -> None:
    """Start again where the nodes' names mean this machine: in a mount namespace with a file of hosts of its own."""
    hosts = Path(tempfile.mkdtemp(prefix="megazero-hosts-")) / "hosts"
    hosts.write_text(Path("/etc/hosts").read_text() + "127.0.0.1 node1 node2\n")
    script = 'mount --bind "$0" /etc/hosts && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", script, str(hosts), sys.executable, *sys.argv]
    os.execvpe(words[0], words, {**os.environ, "MEGAZERO_NAMED": "1"})


if __name__ == "__main__":
    if "MEGAZERO_NAMED" not in os.environ:
        with_names()
    sys.exit(main())
