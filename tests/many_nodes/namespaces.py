"""Machines made of network namespaces, joined by a bridge, each with its own sshd.

Needs root, openssh-server and nftables.

They share the file system, as nodes of a cluster often do; what is theirs alone is the network: addresses, the loopback
and every listening port.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType


def call(*words: str, check: bool = True) -> str:
    """Run a command; its output."""
    return subprocess.run(words, check=check, capture_output=True, text=True).stdout


class Machines:
    """``count`` machines with addresses 10.77.PID.1, …; a context manager that takes them down again."""

    def __init__(self, count: int) -> None:
        self._tag = f"mz{os.getpid() % 10000}"
        self.names = [f"{self._tag}n{index}" for index in range(count)]
        self.addresses = [f"10.77.{os.getpid() % 250}.{index + 1}" for index in range(count)]
        self._directory = Path(tempfile.mkdtemp(prefix="megazero-machines-"))
        self._daemons: list[subprocess.Popen] = []

    def __enter__(self) -> Machines:
        try:
            self._set_up()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._take_down()

    def _set_up(self) -> None:
        key = self._directory / "key"
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
        shutil.copy(f"{key}.pub", self._directory / "authorized")
        os.makedirs("/run/sshd", exist_ok=True)
        call("ip", "link", "add", self._tag, "type", "bridge")
        call("ip", "link", "set", self._tag, "up")
        for name, address in zip(self.names, self.addresses, strict=True):
            call("ip", "netns", "add", name)
            call("ip", "link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            call("ip", "link", "set", f"{name}v", "master", self._tag, "up")
            inside = ("ip", "-n", name)
            call(*inside, "addr", "add", f"{address}/24", "dev", "eth0")
            call(*inside, "link", "set", "eth0", "up")
            call(*inside, "link", "set", "lo", "up")
            options = [f"HostKey={key}", f"AuthorizedKeysFile={self._directory}/authorized", "StrictModes=no"]
            options += [
                f"ListenAddress={address}",
                "PermitRootLogin=yes",
                "UsePAM=no",
                f"PidFile={self._directory}/{name}",
            ]
            daemon = ["/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", *(f"-o{option}" for option in options)]
            log = (self._directory / f"{name}.log").open("w")
            self._daemons.append(subprocess.Popen([*self.inside(name), *daemon], stderr=log, stdin=subprocess.DEVNULL))
        time.sleep(0.5)

    def _take_down(self) -> None:
        for name in self.names:
            self.kill(name)
        for name in self.names:
            call("ip", "netns", "del", name, check=False)
            call("ip", "link", "del", f"{name}v", check=False)
        call("ip", "link", "del", self._tag, check=False)
        shutil.rmtree(self._directory, ignore_errors=True)

    @staticmethod
    def inside(name: str) -> list[str]:
        """The words that run what follows on a machine."""
        return ["ip", "netns", "exec", name]

    @property
    def ssh(self) -> str:
        """--ssh of the launcher."""
        options = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        return f"ssh -i {self._directory}/key {options}"

    def hostfile(self, slots: Sequence[int]) -> Path:
        path = self._directory / "hosts"
        path.write_text("".join(f"{a} slots={n}\n" for a, n in zip(self.addresses, slots, strict=True)))
        return path

    def processes(self, name: str) -> dict[int, str]:
        """Process → command line, of those on a machine apart from its sshd."""
        found = {}
        for word in call("ip", "netns", "pids", name, check=False).split():
            with suppress(OSError):
                words = Path(f"/proc/{word}/cmdline").read_bytes().decode().split("\0")
                if "sshd" not in words[0]:
                    found[int(word)] = " ".join(words)
        return found

    def kill(self, name: str) -> None:
        """End everything on a machine, as a power cut does; on leaving, its sshd too."""
        for word in call("ip", "netns", "pids", name, check=False).split():
            with suppress(ProcessLookupError):
                os.kill(int(word), signal.SIGKILL)

    def link(self, name: str, *words: str) -> None:
        """``up``, ``down``, or a tc qdisc's words for the machine's end of its link."""
        if words in (("up",), ("down",)):
            call("ip", "-n", name, "link", "set", "eth0", *words)
        else:
            call("tc", "-n", name, "qdisc", "replace", "dev", "eth0", "root", *words)

    def drop(self, name: str, percent: int) -> None:
        """Lose this share of what arrives at a machine, at random."""
        for words in (
            "add table inet faults",
            "add chain inet faults in { type filter hook input priority 0; }",
            f"add rule inet faults in iifname eth0 numgen random mod 100 < {percent} drop",
        ):
            call(*self.inside(name), "nft", words)

    def daemon(self, name: str) -> int:
        """Its sshd, whose mounts its processes see."""
        return self._daemons[self.names.index(name)].pid

    def heal(self, name: str) -> None:
        self.link(name, "up")
        call(*self.inside(name), "nft", "flush", "ruleset", check=False)
        call("tc", "-n", name, "qdisc", "del", "dev", "eth0", "root", check=False)
