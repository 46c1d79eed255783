"""Which process of the job this one is, as the launcher (ours, torchrun, or none) says in the environment."""

from __future__ import annotations

import os
import socket
import sys
from typing import NamedTuple

from megazero.errors import LaunchError


class ProcessEnvironment(NamedTuple):
    """``rank`` of ``world_size`` processes; ``local_rank`` counts those of this machine and picks the GPU."""

    rank: int
    local_rank: int
    world_size: int


def process_environment() -> ProcessEnvironment:
    """Read RANK, LOCAL_RANK and WORLD_SIZE; a process without a launcher is rank 0 of 1.

    In that case MASTER_ADDR, MASTER_PORT and gloo's interface are set to the loopback and a free port where they are
    unset, so that ``init_process_group`` with its ``env://`` default works. Raises LaunchError where the environment
    is set by half.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        keep_gloo_on_loopback()
        return ProcessEnvironment(0, 0, 1)
    rank, world_size = _number("RANK"), _number("WORLD_SIZE")
    local_rank = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    if not 0 <= rank < world_size:
        raise LaunchError(f"RANK={rank} with WORLD_SIZE={world_size}: ranks are 0 to WORLD_SIZE - 1")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise LaunchError(f"RANK is set but {name} is not: start the script with `megazero launch` or torchrun")
    return ProcessEnvironment(rank, local_rank, world_size)


def keep_gloo_on_loopback() -> None:
    """For jobs of one machine: left alone, gloo looks its own host name up, which need not resolve or be reachable."""
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def free_port() -> int:
    """A TCP port of the loopback that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _number(name: str) -> int:
    value = os.environ.get(name)
    if value is None or not value.isdigit():
        raise LaunchError(f"{name}={value!r} in the environment: expected a whole number, as torchrun sets it")
    return int(value)
