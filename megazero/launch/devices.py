"""Which GPU a process has, and which processes DeepSpeed's launcher flags ask for, on this machine."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from megazero.errors import LaunchError
from megazero.launch.hosts import Host, read_hostfile


def gpu_of(local_rank: int, gpus: int) -> int:
    """The GPU, of ``gpus``, of a machine's process. Processes share one only where NCCL is told to let them, by its own
    NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 and newer). Raises LaunchError where there are too few."""
    if local_rank >= gpus and not shares_gpus():
        raise LaunchError(
            f"{local_rank + 1} processes or more on a machine of {gpus} GPUs: start at most {gpus} per machine, set "
            f"CUDA_VISIBLE_DEVICES= to nothing to use the CPU, or, to try a layout, NCCL_MULTI_RANK_GPU_ENABLE=1 to "
            f"share them (NCCL 2.30 or newer)"
        )
    return local_rank % gpus


def shares_gpus() -> bool:
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") not in ("", "0")


def chosen_devices(arguments: Namespace, gpus: int) -> tuple[int | None, list[int] | None]:
    """(processes, None where nothing is said; the GPUs to show them, None for all).

    ``gpus``: how many torch sees; 0 on a machine without, where any number of processes may be asked for. Raises
    LaunchError for flags that contradict each other, or ask for what is not there.
    """
    include, exclude, count = arguments.include, arguments.exclude, arguments.num_gpus
    if arguments.num_nodes is not None and arguments.num_nodes != 1:
        raise LaunchError(
            f"--num_nodes {arguments.num_nodes}: this is one machine; name the others in a --hostfile, or start it on "
            f"each with --node_rank"
        )
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
        raise LaunchError(f"{flag} {text}: names several machines; they are to be in a --hostfile")
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


def _slots(path: Path) -> int:
    """The processes that a hostfile of this machine alone gives it.

    Of other files the job is started elsewhere: see places.cluster_hosts.
    """
    return read_hostfile(path)[0].slots


def _check_here(flag: str, name: str) -> None:
    if not Host(name, 1).is_here:
        raise LaunchError(f"{flag}: {name} is not this machine; call it localhost, or name the others in a --hostfile")
