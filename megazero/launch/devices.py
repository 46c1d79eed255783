"""Which processes DeepSpeed's launcher flags ask for, on this machine."""

from __future__ import annotations

import re
import socket
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megazero.errors import LaunchError

_HERE = ("localhost", "127.0.0.1")
_LATER = "megazero launch starts the processes of one machine"


def chosen_devices(arguments: Namespace, gpus: int) -> tuple[int | None, list[int] | None]:
    """(processes, None where nothing is said; the GPUs to show them, None for all).

    ``gpus``: how many torch sees; 0 on a machine without, where any number of processes may be asked for. Raises
    LaunchError for flags that contradict each other, or ask for what is not there.
    """
    include, exclude, count = arguments.include, arguments.exclude, arguments.num_gpus
    if arguments.num_nodes is not None and arguments.num_nodes != 1:
        raise LaunchError(f"--num_nodes {arguments.num_nodes}: {_LATER}; use Slurm or torchrun for several")
    slots = _slots(Path(arguments.hostfile)) if arguments.hostfile else None
    if include and exclude:
        raise LaunchError("--include and --exclude are both given; give one")
    if count is not None and (include or exclude):
        flag = "--include" if include else "--exclude"
        raise LaunchError(f"--num_gpus and {flag} are both given; give one")
    if count is not None:
        if count < 1:
            raise LaunchError(f"--num_gpus {count}: at least 1 process is needed")
        if gpus and count > gpus:
            raise LaunchError(f"--num_gpus {count}: there are {gpus} GPUs here")
        return count, None
    there = list(range(slots or gpus or 1))
    if include:
        chosen = _indices("--include", include, there, gpus)
        return len(chosen), chosen if gpus else None
    if exclude:
        left = [index for index in there if index not in _indices("--exclude", exclude, there, gpus)]
        if not left:
            raise LaunchError(f"--exclude {exclude}: leaves no GPU")
        return len(left), left if gpus else None
    return slots, None


def _indices(flag: str, text: str, there: Sequence[int], gpus: int) -> list[int]:
    """Of ``localhost:0,2`` or ``localhost``: the numbers, in order."""
    if "@" in text:
        raise LaunchError(f"{flag} {text}: names several machines, and {_LATER}")
    host, _, numbers = text.partition(":")
    _check_here(flag, host)
    if not numbers:
        return list(there)
    if not re.fullmatch(r"\d+(,\d+)*", numbers):
        raise LaunchError(f"{flag} {text}: expected HOST:NUMBER,NUMBER…, as in localhost:0,1")
    found = sorted({int(number) for number in numbers.split(",")})
    if gpus and found[-1] >= gpus:
        raise LaunchError(f"{flag} {text}: there is no GPU {found[-1]}; there are 0 to {gpus - 1}")
    return found


def _slots(path: Path) -> int | None:
    """The processes that a hostfile gives this machine; None where there is no such file, as for DeepSpeed."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path}: cannot be read: {error}") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        found = re.fullmatch(r"(\S+)\s+slots=(\d+)", line)
        if found is None or not int(found[2]):
            raise LaunchError(f"--hostfile {path}, line {number}: {line!r}; expected HOST slots=NUMBER")
        if found[1] in hosts:
            raise LaunchError(f"--hostfile {path}, line {number}: {found[1]} is there twice")
        hosts[found[1]] = int(found[2])
    if not hosts:
        raise LaunchError(f"--hostfile {path}: names no machine")
    if len(hosts) > 1:
        raise LaunchError(f"--hostfile {path}: names {len(hosts)} machines, and {_LATER}; use Slurm or torchrun")
    ((host, slots),) = hosts.items()
    _check_here("--hostfile", host)
    return slots


def _check_here(flag: str, host: str) -> None:
    if host not in (*_HERE, socket.gethostname(), socket.gethostname().partition(".")[0]):
        raise LaunchError(f"{flag}: {host} is not this machine, and {_LATER}; call it localhost")
