"""Slurm itself on this machine, two nodes of it, and the ways to start a job there: a table.

    python tests/many_nodes/slurm.py

Needs root and the packages slurmctld, slurmd, slurm-client and munge. Not a test that pytest runs.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

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
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[26821-26822] CPUs=2 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
LIMIT = 240.0


class Slurm:
    """The daemons; a context manager that ends them."""

    def __init__(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="megazero-slurm-"))
        self.environment = {**os.environ, "SLURM_CONF": str(self.place / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Slurm:
        place = self.place
        os.chmod(place, 0o755)
        (place / "state").mkdir()
        (place / "slurm.conf").write_text(CONFIG.format(host=socket.gethostname().partition(".")[0], place=place))
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
        deadline = time.monotonic() + 30
        while self.run("sinfo", "-h", "-o", "%t").split() != ["idle"]:
            assert time.monotonic() < deadline, self.run("sinfo")
            time.sleep(0.5)
        return self

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


def job(slurm: Slurm, name: str, script: str, signal_after: str | None = None) -> str:
    """Submit; the output once the job is done."""
    path = slurm.place / f"{name}.sh"
    path.write_text(f"#!/usr/bin/env bash\nset -e\n{script}\n")
    log = slurm.place / f"{name}.log"
    words = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", f"--output={log}"]
    number = slurm.run(*words, f"--chdir={ROOT}", str(path)).strip()
    assert number.isdigit(), number
    deadline = time.monotonic() + LIMIT
    while slurm.run("squeue", "-h", "-j", number).strip() and time.monotonic() < deadline:
        if signal_after and log.exists() and signal_after in log.read_text():
            slurm.run("scancel", "--batch", "--signal=USR1", number)
            signal_after = None
        time.sleep(1)
    return log.read_text() if log.exists() else slurm.run("scontrol", "show", "job", number)


def main() -> int:
    corpus = write_corpus(Path(tempfile.mkdtemp(prefix="megazero-corpus-")))
    python, failed = sys.executable, False
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the daemons are ended
    training = " ".join(["pretrain/gpt.py", *flags(tiny(corpus, {"train.micro_batch_size": 1}))])
    with Slurm() as slurm:
        saved = f"{training} --train.steps 4000 --checkpoint.dir {slurm.place}/run --log.interval 20"
        # The nodes' names, which other machines would know, mean nothing here.
        launch = f"{python} -m megazero launch --master_addr 127.0.0.1"
        ways = {
            "megazero launch in a batch script": (f"{launch} --nproc 2 {training}", "step 8/8", None),
            "srun megazero launch": (f"srun --kill-on-bad-exit=1 {launch} --nproc 2 {training}", "step 8/8", None),
            "srun python pretrain/gpt.py": (f"MASTER_ADDR=127.0.0.1 srun {python} {training}", "step 8/8", None),
            "USR1 to the script, which is the launcher": (f"exec {launch} {saved}", "received SIGUSR1", "step 20/"),
        }
        print("| started by | outcome |\n|---|---|", flush=True)
        for number, (way, (script, wanted, signal_after)) in enumerate(ways.items()):
            output = job(slurm, f"job{number}", script, signal_after)
            failed |= wanted not in output
            print(f"| {way} | {'as it should be' if wanted in output else 'FAILED:' + output[-2000:]} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
