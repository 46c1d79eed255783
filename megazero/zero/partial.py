"""The sum of partial gradients, and the gradient norm, over the blocks' reduced gradients.

[Note: partial gradients]
A parameter held by several ranks of an axis whose local gradients are only shares of the whole (norms under
sequence parallelism, replicated key/value heads, the two copies of a tied embedding) is summed over those
ranks. Replicas have the same local layout, so they own the same ranges of the same blocks, and the sum runs
once a step, on the data-parallel-reduced values. Blocks go in the order of their names: stages that share several
may come to them in other orders. Addition commutes bitwise in a sum of two; with more members the all-reduce
gives every member the same bits.
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
        self.blocks, self._device = blocks, topology.device
        ranges: dict[tuple[str, tuple[int, ...]], list[tuple[int, int, int]]] = {}
        for index, block in sorted(enumerate(blocks), key=lambda pair: pair[1].layout.entries[0].name):
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
            views = [self.blocks[index].gradient.owned()[a:b] for index, a, b in ranges]
            large = [v for v in views if v.numel() >= LARGE]
            small = [v for v in views if v.numel() < LARGE]
            here = [v.to(self._device) for v in large]  # the same tensors, unless they are in host memory
            common = torch.cat([v.to(self._device) for v in small]) if small else None
            communicator.all_reduce(here + ([common] if common is not None else [])).wait()
            for view, summed in zip(large, here, strict=True):
                if view is not summed:
                    view.copy_(summed)
            if common is not None:
                torch._foreach_copy_(small, list(common.split([v.numel() for v in small])))


class GradientNorm:
    """The squared norm of this rank's share of the gradient: each element counts on one rank only.

    ``counts``: whether this rank's copy of the model state is the one that does.
    """

    def __init__(
        self, blocks: Sequence[Block], coordinates: Mapping[str, int], device: torch.device, counts: bool = True
    ) -> None:
        self.blocks, self._device = blocks, device
        # Of each block: ranges that are whole when they are reduced, and those that PartialSums completes after that.
        self._ranges: list[tuple[int, list[tuple[int, int]], list[tuple[int, int]]]] = []
        for index, block in enumerate(blocks if counts else ()):
            ranges: dict[bool, list[tuple[int, int, int]]] = {False: [], True: []}
            for first, last, piece, _ in block.layout.pieces(*block.shard):
                if is_counted(piece, coordinates):
                    partial = any(replication.gradient == "partial" for replication in piece.replication)
                    ranges[partial].append((index, first - block.owned[0], last - block.owned[0]))
            whole, late = ([(a, b) for _, a, b in _merged(ranges[partial])] for partial in (False, True))
            self._ranges.append((index, whole, late))
            if block.host_grad is not None:
                block.host_grad.norm_ranges = whole

    def squared(self) -> torch.Tensor:
        """Σ g² over the counted elements: a float64 scalar on the device; not finite where a gradient is not."""
        device = self._device
        norms: list[torch.Tensor] = []
        views: dict[int, torch.Tensor] = {}  # of gradients on the device, by place among the norms: one call for all
        for index, whole, late in self._ranges:
            block = self.blocks[index]
            if block.host_grad is None:
                parts = [block.gradient.owned()[a:b] for a, b in (*whole, *late)]
                views |= enumerate(parts, start=len(norms))
                norms += parts
                continue
            norms += block.host_grad.norms  # taken when it left
            if late:
                there = block.gradient.owned()
                found = torch._foreach_norm([there[a:b] for a, b in late], 2, dtype=torch.float32)
                norms += [norm.to(device) for norm in found]
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=device)
        if views:
            for place, norm in zip(views, torch._foreach_norm(list(views.values()), 2, dtype=torch.float32)):
                norms[place] = norm
        return torch.stack(norms).double().square().sum()


def _merged(ranges: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Adjacent (block, first, last) ranges as one."""
    result: list[tuple[int, int, int]] = []
    for index, first, last in ranges:
        if result and result[-1][0] == index and result[-1][2] == first:
            result[-1] = (index, result[-1][1], last)
        else:
            result.append((index, first, last))
    return result
