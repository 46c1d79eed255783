"""The ranks that save or load together: the little communication that a checkpoint needs."""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist

from megazero.errors import CheckpointError


class Group(Protocol):
    """``size`` processes, this one being ``rank``. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank, on every rank."""
        ...

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's value, by rank, on rank 0; None elsewhere."""
        ...


class OneProcess:
    """A group of this process alone."""

    rank, size = 0, 1

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def gather(self, value: Any) -> list[Any] | None:
        return [value]


class TorchGroup:
    """A torch process group; one on gloo keeps the values off the GPU."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather(self, value: Any) -> list[Any] | None:
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values


def raise_together(group: Group, error: Exception | None) -> None:
    """Raises on every rank where any rank has an error: a CheckpointError with the first one's message.

    A phase that can fail on one rank ends with this, so that the others do not wait for it in the next.
    """
    messages = group.all_gather(None if error is None else f"{error}" or type(error).__name__)
    for rank, message in enumerate(messages):
        if message is not None:
            where = f" (rank {rank} of {group.size})" if group.size > 1 else ""
            raise CheckpointError(message + where) from error
