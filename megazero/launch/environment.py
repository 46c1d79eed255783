"""Which process of the job this one is, as the launcher (ours, torchrun, or none) says in the environment."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from typing import NamedTuple

from megazero.errors import LaunchError

_LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
)
"""Names of a process's rank, of that on its machine, and of the number of processes."""
_OTHER_PORT = "29500"


class ProcessEnvironment(NamedTuple):
    """``rank`` of ``world_size`` processes; ``local_rank`` counts those of this machine and picks the GPU."""

    rank: int
    local_rank: int
    world_size: int


def process_environment() -> ProcessEnvironment:
    """Read RANK, LOCAL_RANK and WORLD_SIZE, or where these are unset what srun or MPI's launcher has set; a process
    without a launcher is rank 0 of 1.

    In that case MASTER_ADDR, MASTER_PORT and gloo's interface are set to the loopback and a free port where they are
    unset, so that ``init_process_group`` with its ``env://`` default works. Raises LaunchError where the environment
    is set by half.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        os.environ.update(other_launcher(os.environ))
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


def other_launcher(given: Mapping[str, str]) -> dict[str, str]:
    """The variables that torchrun would have set, from those of srun (one task per process), of Open MPI's mpirun, or
    of MPICH's and Intel's; none where no such launcher is there, or it has started one process.

    Raises LaunchError where the processes are on several machines and nothing says where these meet.
    """
    for names in _LAUNCHERS:
        rank, local, size = (given.get(name, "") for name in names)
        if rank.isdigit() and size.isdigit() and int(size) > 1:
            break
    else:
        return {}
    found = {"RANK": rank, "LOCAL_RANK": local if local.isdigit() else rank, "WORLD_SIZE": size}
    if "MASTER_ADDR" in given:
        return {"MASTER_PORT": _OTHER_PORT, **found} if "MASTER_PORT" not in given else found
    if names[0] == "SLURM_PROCID":
        nodes = given.get("SLURM_STEP_NODELIST", "")
        one = given.get("SLURM_STEP_NUM_NODES", "1") == "1"
        return {
            **found,
            "MASTER_ADDR": "127.0.0.1" if one else first_host(nodes),
            "MASTER_PORT": str(slurm_port(given)),
        }
    if given.get("OMPI_COMM_WORLD_LOCAL_SIZE", given.get("MPI_LOCALNRANKS")) != size:
        raise LaunchError(
            "MPI has started processes on several machines: set MASTER_ADDR to the first one's address, and "
            "MASTER_PORT to a port that is free there (mpirun -x MASTER_ADDR=… -x MASTER_PORT=…)"
        )
    # All are children of one process on this machine, and no other job's are.
    return {**found, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getppid() % 20000)}


def first_host(nodes: str) -> str:
    """Of Slurm's short form: a[03-05,9],b → a03."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise LaunchError(f"SLURM_STEP_NODELIST={nodes!r}: names no machine")
    return "".join(part or "" for part in match.groups())


def slurm_port(given: Mapping[str, str]) -> int:
    """From the job's number: two jobs on one machine do not meet."""
    number = int(given.get("SLURM_JOB_ID", "0")) * 8 + int(given.get("SLURM_STEP_ID", "0"))
    return 20000 + number % 20000


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
