"""Which machines a job runs on, and with how many processes each: a hostfile and what is chosen of it."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import NamedTuple

from megazero.errors import LaunchError
from megazero.small_files import read_small

HERE = ("localhost", "127.0.0.1")


class Host(NamedTuple):
    """A machine. ``devices``: the GPUs to show to its ``slots`` processes, None for all."""

    name: str
    slots: int
    devices: tuple[int, ...] | None = None

    @property
    def is_here(self) -> bool:
        return self.name in (*HERE, socket.gethostname(), socket.gethostname().partition(".")[0])


def read_hostfile(path: Path) -> list[Host]:
    """Lines of ``HOST slots=N``; what follows a # is none of it. Raises LaunchError with the line's number."""
    try:
        lines = read_small(path, pipe=True).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path}: cannot be read: {error}") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        found = re.fullmatch(r"([^\s-]\S*)\s+slots=(\d{1,4})", line)
        if found is None or not int(found[2]):
            raise LaunchError(f"--hostfile {path}, line {number}: {line!r}; expected HOST slots=NUMBER")
        if found[1] in hosts:
            raise LaunchError(f"--hostfile {path}, line {number}: {found[1]} is there twice")
        hosts[found[1]] = Host(found[1], int(found[2]))
    if not hosts:
        raise LaunchError(f"--hostfile {path}: names no machine")
    return list(hosts.values())


def choose(
    hosts: list[Host], include: str | None, exclude: str | None, num_nodes: int | None, per_node: int | None
) -> list[Host]:
    """The hosts, and of each the slots, that are asked for.

    ``include``, ``exclude``: as DeepSpeed has them, HOST or HOST:N,N…, several joined by @. ``num_nodes``: only the
    first so many; ``per_node``: processes on each. Raises LaunchError for what is not there.
    """
    if include and exclude:
        raise LaunchError("--include and --exclude are both given; give one")
    if per_node is not None and (include or exclude):
        raise LaunchError("a number of processes and --include or --exclude are both given; give one")
    if include:
        chosen = _parts("--include", include, hosts)
        hosts = [Host(h.name, len(chosen[h.name] or range(h.slots)), chosen[h.name]) for h in hosts if h.name in chosen]
    elif exclude:
        chosen, left = _parts("--exclude", exclude, hosts), []
        for host in hosts:
            if host.name not in chosen:
                left.append(host)
            elif gone := chosen[host.name]:
                devices = tuple(index for index in range(host.slots) if index not in gone)
                left += [Host(host.name, len(devices), devices)] if devices else []
        hosts = left
    if not hosts:
        raise LaunchError(f"--exclude {exclude}: leaves no machine")
    if num_nodes is not None:
        if not 1 <= num_nodes <= len(hosts):
            raise LaunchError(f"--num_nodes {num_nodes}: there are {len(hosts)} machines to choose from")
        hosts = hosts[:num_nodes]
    if per_node is not None:
        if short := [host for host in hosts if host.slots < per_node]:
            raise LaunchError(f"{per_node} processes on each machine: {short[0].name} has slots={short[0].slots}")
        hosts = [Host(host.name, per_node) for host in hosts]
    return hosts


def _parts(flag: str, text: str, hosts: list[Host]) -> dict[str, tuple[int, ...] | None]:
    """Host → the numbers given for it, None where there are none."""
    slots = {host.name: host.slots for host in hosts}
    found: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in slots:
            raise LaunchError(f"{flag} {text}: {name!r} is not in the hostfile; it has {', '.join(slots)}")
        if name in found:
            raise LaunchError(f"{flag} {text}: {name} is there twice")
        if not colon:
            found[name] = None
            continue
        if not re.fullmatch(r"\d+(,\d+)*", numbers):
            raise LaunchError(f"{flag} {text}: expected HOST:NUMBER,NUMBER…, as in {name}:0,1")
        indices = tuple(sorted({int(number) for number in numbers.split(",")}))
        if indices[-1] >= slots[name]:
            raise LaunchError(f"{flag} {text}: {name} has slots 0 to {slots[name] - 1}")
        found[name] = indices
    return found
