"""Where a job runs: machines of a hostfile or of a Slurm allocation, or this machine as one of several."""

from __future__ import annotations

import os
import subprocess
from argparse import Namespace
from pathlib import Path

from megazero.errors import LaunchError
from megazero.launch.cluster import Reach, by_srun, by_ssh
from megazero.launch.environment import first_host, slurm_port
from megazero.launch.hosts import Host, choose, read_hostfile

PORT = 29500
"""Where machines meet unless the user or Slurm's job number says otherwise."""


def cluster_hosts(arguments: Namespace) -> tuple[list[Host], Reach]:
    """The machines to start the job on from here, none where it runs here alone, and how they are reached."""
    reach = by_ssh(arguments.ssh)
    per_node = arguments.nproc or arguments.num_gpus
    if arguments.node_rank is not None:
        return [], reach
    if arguments.hostfile:
        found = read_hostfile(Path(arguments.hostfile))
        if len(found) == 1 and found[0].is_here:
            return [], reach
        return choose(found, arguments.include, arguments.exclude, arguments.num_nodes, per_node), reach
    names = _allocated()
    if len(names) < 2:
        return [], reach
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    slots = per_node or (int(gpus) if gpus.isdigit() else 1)
    hosts = [Host(name, slots) for name in names]
    return choose(hosts, arguments.include, arguments.exclude, arguments.num_nodes, None), by_srun


def _allocated() -> list[str]:
    """The machines of the Slurm allocation that this process is in, unless srun has started it on each of them."""
    if "SLURM_JOB_ID" not in os.environ or "SLURM_STEP_ID" in os.environ:
        return []
    try:
        words = ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"inside a Slurm job, and scontrol does not say which machines it has: {error}") from None


def own_place(arguments: Namespace) -> tuple[int, int, str, int]:
    """(machines, which one this is, the address and port where they meet) of a job started on each by itself."""
    environment = os.environ
    if arguments.node_rank is not None:
        nodes, node, first = arguments.num_nodes or 1, arguments.node_rank, arguments.master_addr
        if not 0 <= node < nodes:
            raise LaunchError(f"--node_rank {node} with --num_nodes {nodes}: expected 0 to {nodes - 1}")
        if nodes > 1 and not first:
            raise LaunchError("--node_rank needs --master_addr: an address of machine 0 that all of them reach")
        return nodes, node, first or "127.0.0.1", arguments.master_port or PORT
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    if "SLURM_STEP_ID" in environment and nodes > 1:
        if environment.get("SLURM_STEP_NUM_TASKS") != str(nodes):
            raise LaunchError("srun has started megazero launch more than once per machine: use --ntasks-per-node=1")
        address = arguments.master_addr or first_host(environment["SLURM_STEP_NODELIST"])
        return nodes, int(environment["SLURM_NODEID"]), address, arguments.master_port or slurm_port(environment)
    return 1, 0, "127.0.0.1", 0
