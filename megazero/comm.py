"""The collectives megazero issues, by one set of names over every supported torch, and their count.

torch 2.13 renamed ``all_gather_into_tensor`` and ``reduce_scatter_tensor``; this is the one place that knows.
In-place collectives work on contiguous buffers and can overlap with compute; functional ones can stay
inside a torch.compile graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the operators
from torch.distributed import ProcessGroup

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# The operators, not torch's Python around them: that wraps each result, and imports the compiler at the first one.
_functional = torch.ops._c10d_functional


def all_reduce(x: torch.Tensor, group: ProcessGroup, op: str = "sum") -> torch.Tensor:
    """A new tensor: ``x`` reduced over the group. ``op``: sum or max. Traceable by torch.compile."""
    return _functional.wait_tensor(_functional.all_reduce(x.contiguous(), op, group.group_name))


def all_gather(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(n, …) → (n · group size, …): every rank's rows in rank order. Traceable by torch.compile."""
    gathered = _functional.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)
    return _functional.wait_tensor(gathered)


def reduce_scatter(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """(n · group size, …) → (n, …): this rank's rows of the sum. Traceable by torch.compile."""
    scattered = _functional.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name)
    return _functional.wait_tensor(scattered)


class Work(Protocol):
    """A collective under way; ``wait`` orders what follows on the current stream after it."""

    def wait(self) -> object: ...


class _Works:
    """Several collectives as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Communicator:
    """In-place collectives of one process group over flat buffers.

    ``elements`` counts, per kind of collective, the elements of the whole buffers it was called on: the
    traffic per rank is that times (N−1)/N (twice that for an all-reduce).
    """

    def __init__(self, group: ProcessGroup | None, size: int, rank: int) -> None:
        self.group, self.size, self.rank = group, size, rank
        self.elements: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def slice_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """This rank's equal share of a flat buffer."""
        share = buffer.numel() // self.size
        return buffer[self.rank * share : (self.rank + 1) * share]

    def all_reduce(self, buffers: Sequence[torch.Tensor]) -> Work:
        """Sum every buffer over the group, in place, as one coalesced call."""
        self._count("all_reduce", buffers)
        return self._together(dist.all_reduce, [(buffer,) for buffer in buffers])

    def reduce_scatter(self, buffers: Sequence[torch.Tensor], slices: Sequence[torch.Tensor]) -> Work:
        """Put this rank's slice of each buffer's sum over the group into ``slices``; one may be part of the buffer
        itself, whose rest is then undefined."""
        self._count("reduce_scatter", buffers)
        return self._together(_reduce_scatter, list(zip(slices, buffers, strict=True)))

    def all_gather(self, buffers: Sequence[torch.Tensor], slices: Sequence[torch.Tensor]) -> Work:
        """Fill every buffer with each rank's slice of it; a slice may be this rank's part of the buffer itself."""
        self._count("all_gather", buffers)
        return self._together(_all_gather, list(zip(buffers, slices, strict=True)))

    def broadcast(self, buffer: torch.Tensor, source: int = 0) -> None:
        """Replace every rank's values by those of the group's first, or of its ``source``-th."""
        dist.broadcast(buffer, group=self.group, group_src=source)

    def _together(self, collective: Callable[..., Work], arguments: Sequence[tuple[torch.Tensor, ...]]) -> Work:
        """Issue a collective on each of ``arguments``, coalesced where that is safe.

        [Note: gloo and coalesced calls] torch's gloo group has two threads, which note the name of what they finished
        last in one string, without a lock. Names of the coalesced kinds are too long for a string to hold in place: two
        that finish at once free the same memory. One by one, each under its short name, they do the same work.
        """
        if arguments[0][0].is_cuda:
            with dist._coalescing_manager(group=self.group, async_ops=True) as work:
                for tensors in arguments:
                    collective(*tensors, group=self.group)
            return work
        return _Works([collective(*tensors, group=self.group, async_op=True) for tensors in arguments])

    def _count(self, kind: str, buffers: Sequence[torch.Tensor]) -> None:
        self.calls[kind] += 1
        self.elements[kind] += sum(b.numel() for b in buffers)
