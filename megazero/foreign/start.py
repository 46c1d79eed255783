"""This process among the others: the launcher's, or a process group that the user has started."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from megazero.engine import device_of, start_process_group
from megazero.errors import ConfigError
from megazero.launch.environment import ProcessEnvironment, process_environment
from megazero.layout import Layout
from megazero.topology import Topology

TIMEOUT = 1800
"""Seconds that a collective waits for a rank."""


def start_topology(stages: int = 1) -> Topology:
    """All processes in ``stages`` pipeline stages of data-parallel ones, in a process group that is started where there
    is none. Raises ConfigError where the processes do not divide by the stages."""
    environment = own_environment()
    if environment.world_size % stages:
        raise ConfigError.single(
            "num_stages",
            f"{stages} stages cannot share {environment.world_size} processes equally; start a multiple of {stages}",
        )
    device = device_of(environment)
    start_process_group(environment, device, TIMEOUT)
    return Topology(Layout(pp=stages, dp=environment.world_size // stages), environment.rank, device)


def own_environment() -> ProcessEnvironment:
    """As the launcher says, or the process group that the user has started."""
    if not dist.is_initialized():
        return process_environment()
    rank = dist.get_rank()
    local_rank = os.environ.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count()))
    return ProcessEnvironment(rank, int(local_rank), dist.get_world_size())


def timeout_of(device: torch.device) -> float:
    """Seconds that a collective of the default process group waits, whoever has made it."""
    if not dist.is_initialized():
        return TIMEOUT
    return dist.group.WORLD._get_backend(device).options._timeout.total_seconds()
