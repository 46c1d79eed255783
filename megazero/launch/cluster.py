"""A job on several machines: one process on each, started over ssh or by srun, that does that machine's part.

All is told over the standard streams of these processes, so that no port is needed but the one where ranks meet, and
the job ends everywhere when this process does, however it ends.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megazero.launch.agent import Part
from megazero.launch.hosts import Host
from megazero.launch.node import VERDICT
from megazero.launch.verdict import Cause, Verdict, of_machines

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""That end a job; its workers may save first."""
_GRACE = 150.0
"""Seconds the machines have to end, once they are told to: their workers may save."""
_LOST_GRACE = 45.0
"""The same where one has failed: the others have nothing to save, and one that is gone will not answer."""

_FEW_LINES = 4

Reach = Callable[[Host], list[str]]
"""The command that starts another one on a machine: what that is to be follows as further words."""


def by_ssh(command: str) -> Reach:
    """``command``: as --ssh has it. A machine that asks for a password is an error, as there is nobody to ask."""

    def reach(host: Host) -> list[str]:
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15"]
        words = shlex.split(command)
        return [*words, *(options if Path(words[0]).name == "ssh" else []), host.name]

    return reach


def by_srun(host: Host) -> list[str]:
    """Inside a Slurm allocation: a step of one task on that machine."""
    return ["srun", "--nodes=1", "--ntasks=1", "--overlap", "--unbuffered", f"--nodelist={host.name}"]


class Cluster:
    """One start of a job. ``environment``: for every machine. ``meeting``: address and port of the first."""

    def __init__(
        self,
        hosts: Sequence[Host],
        reach: Reach,
        command: Sequence[str],
        environment: Mapping[str, str],
        meeting: tuple[str, int],
        logs: str | None,
    ) -> None:
        self._hosts, self._reach, self._command, self._environment = hosts, reach, command, environment
        self._meeting, self._logs = meeting, logs
        self._verdicts: dict[int, Verdict] = {}
        self._ending = False
        self._changed = threading.Condition()
        self._processes: list[subprocess.Popen] = []
        self._readers: list[threading.Thread] = []

    def run(self) -> Verdict:
        """Start every part, wait for the end of all, and say how it went. SIGINT and SIGTERM go to all."""
        told: list[int] = []
        before = {number: signal.signal(number, lambda n, frame: told.append(n)) for number in SIGNALS}
        try:
            run_id = uuid.uuid4().hex
            for node, host in enumerate(self._hosts):
                self._start(node, host, run_id)
            self._watch(told)
        finally:
            for process in self._processes:
                with suppress(OSError):
                    process.kill()
            for number, handler in before.items():
                signal.signal(number, handler)
        if told:
            return Verdict(128 + told[0], f"stopped by {signal.Signals(told[0]).name}", Cause.SAID, stopped=True)
        return of_machines(self._verdicts.values())

    def _start(self, node: int, host: Host, run_id: str) -> None:
        address, port = self._meeting
        part = Part(host.slots, address, port, node, len(self._hosts), run_id, self._logs)
        environment = dict(self._environment)
        if host.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.devices))
        order: dict[str, Any] = {
            "part": part._asdict(),
            "command": list(self._command),
            "environment": environment,
            "directory": os.getcwd(),
        }
        words = [sys.executable, str(Path(__file__).with_name("node.py"))]
        words = words if host.is_here else [*self._reach(host), shlex.join(words)]
        if words[0] == "srun":
            words = [*self._reach(host), sys.executable, str(Path(__file__).with_name("node.py"))]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        )
        self._processes.append(process)
        with suppress(OSError):  # its verdict says why it is gone
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        reader = threading.Thread(target=self._read, args=(node, host, process), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _read(self, node: int, host: Host, process: subprocess.Popen) -> None:
        """Pass on what a machine prints; its verdict is kept."""
        verdict, printed = None, []
        for line in process.stderr:
            if line.startswith(VERDICT):
                code, message, cause, *rest = json.loads(line.removeprefix(VERDICT))
                verdict = Verdict(code, message, Cause(cause), *rest)
            else:
                printed.append(line.strip())
                del printed[_FEW_LINES:]
                sys.stderr.write(line)
                sys.stderr.flush()
        code = process.wait()
        if verdict is not None and verdict.stopped and self._ending:
            verdict = verdict._replace(cause=Cause.TERMINATED, stopped=False)  # by us
        if verdict is None:
            # What ssh or srun has to say is little; of much, the job itself was the author.
            reason = f": {'; '.join(printed)}" if 0 < len(printed) < _FEW_LINES else ""
            verdict = Verdict(code or 1, f"{host.name} is out of reach, or its launcher died{reason}", Cause.LOST)
        with self._changed:
            self._verdicts[node] = verdict
            self._changed.notify_all()

    def _watch(self, told: list[int]) -> None:
        passed, deadline = 0, None
        with self._changed:
            while len(self._verdicts) < len(self._hosts):
                self._changed.wait(0.1)
                for number in told[passed:]:
                    self._tell(str(int(number)))
                    deadline = time.monotonic() + _GRACE
                passed = len(told)
                if deadline is None and any(verdict.code for verdict in self._verdicts.values()):
                    self._ending = True
                    self._tell(str(int(signal.SIGTERM)))
                    deadline = time.monotonic() + _LOST_GRACE
                if deadline is not None and time.monotonic() > deadline:
                    for node in set(range(len(self._hosts))) - set(self._verdicts):
                        message = f"{self._hosts[node].name} did not end when told to"
                        self._verdicts[node] = Verdict(1, message, Cause.LOST)

    def _tell(self, line: str) -> None:
        for process in self._processes:
            with suppress(OSError, ValueError):
                process.stdin.write(line + "\n")
                process.stdin.flush()


def meeting_address(hosts: Sequence[Host]) -> str:
    """A numeric address of the first machine that the others reach, as far as names resolve here.

    On a machine itself its name often means an address of the loopback.
    """
    if len(hosts) == 1 and hosts[0].is_here:
        return "127.0.0.1"
    try:
        if not hosts[0].is_here:
            return socket.gethostbyname(hosts[0].name)
        family, _, _, _, place = socket.getaddrinfo(hosts[1].name, 9, socket.AF_INET, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return probe.getsockname()[0]
    except OSError:
        return hosts[0].name  # an alias of ssh's, say: --master_addr says what is right
