"""The sum of partial gradients, and the gradient norm, over the blocks' reduced gradients.

[Note: partial gradients]
A parameter held by several ranks of an axis whose local gradients are only shares of the whole (norms under
sequence parallelism, replicated key/value heads, the two copies of a tied embedding) is summed over those
ranks. Replicas have the same local layout, so they own the same ranges of the same blocks, and the sum runs
once a step, on the data-parallel-reduced values. Addition commutes bitwise in a sum of two; with more
members the all-reduce gives every member the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megazero.comm import Communicator
from megazero.sharding import is_counted
from megazero.topology import Topology
from megazero.zero.block import Block

LARGE = 1 << 20  # elements from which a range is summed in place rather than copied into a common buffer


class PartialSums:
    """Which ranges of the owned gradients are summed over which ranks, in one fixed order."""

    def __init__(self, blocks: Sequence[Block], topology: Topology) -> None:
        self.blocks = blocks
        ranges: dict[tuple[str, tuple[int, ...]], list[tuple[int, int, int]]] = {}
        for index, block in enumerate(blocks):
            for first, last, piece, _ in block.layout.pieces(*block.owned):
                for replication in piece.replication:
                    if replication.gradient == "partial":
                        key = (replication.axis, replication.members)
                        ranges.setdefault(key, []).append((index, first - block.owned[0], last - block.owned[0]))
        # tp before pp on every rank, so that a parameter replicated over both is summed in one order.
        self._ranges: list[tuple[Communicator, list[tuple[int, int, int]]]] = [
            (topology.communicator(axis, members), _merged(parts))
            for (axis, members), parts in sorted(ranges.items(), reverse=True)
        ]

    def sum(self) -> None:
        """Replace every partial gradient by the sum over its replicas."""
        for communicator, ranges in self._ranges:
            views = [self.blocks[index].owned_grad()[a:b] for index, a, b in ranges]
            large = [v for v in views if v.numel() >= LARGE]
            small = [v for v in views if v.numel() < LARGE]
            common = torch.cat(small) if small else None
            communicator.all_reduce(large + ([common] if common is not None else [])).wait()
            if common is not None:
                torch._foreach_copy_(small, list(common.split([v.numel() for v in small])))


class GradientNorm:
    """The squared norm of this rank's share of the gradient: each element counts on one rank only.

    ``counts``: whether this rank's copy of the model state is the one that does.
    """

    def __init__(self, blocks: Sequence[Block], coordinates: Mapping[str, int], counts: bool = True) -> None:
        self.blocks = blocks
        self._ranges: list[tuple[int, int, int]] = []
        for index, block in enumerate(blocks if counts else ()):
            counted = [
                (index, first - block.owned[0], last - block.owned[0])
                for first, last, piece, _ in block.layout.pieces(*block.shard)
                if is_counted(piece, coordinates)
            ]
            self._ranges += _merged(counted)

    def squared(self) -> torch.Tensor:
        """Σ g² over the counted elements: a float64 scalar on the device; not finite where a gradient is not."""
        views = [self.blocks[index].owned_grad()[a:b] for index, a, b in self._ranges]
        if not views:
            return torch.zeros((), dtype=torch.float64, device=self.blocks[0].flat.device)
        norms = torch.stack(torch._foreach_norm(views, 2, dtype=torch.float32)).double()
        return norms.square().sum()


def _merged(ranges: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Adjacent (block, first, last) ranges as one."""
    result: list[tuple[int, int, int]] = []
    for index, first, last in ranges:
        if result and result[-1][0] == index and result[-1][2] == first:
            result[-1] = (index, result[-1][1], last)
        else:
            result.append((index, first, last))
    return result
