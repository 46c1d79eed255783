"""deepspeed.utils.groups: all processes are data-parallel ones, and none shares a sequence."""

from __future__ import annotations

import torch.distributed as dist


def _get_data_parallel_group() -> dist.ProcessGroup:
    return dist.group.WORLD


def _get_data_parallel_rank() -> int:
    return dist.get_rank()


def _get_data_parallel_world_size() -> int:
    return dist.get_world_size()


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_rank = _get_data_parallel_rank
get_data_parallel_world_size = _get_data_parallel_world_size


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_sequence_parallel_group() -> None:
    return None


def _get_model_parallel_world_size() -> int:
    return 1
