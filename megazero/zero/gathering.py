"""Blocks made whole from the ranks' values, wherever those are, and whenever they are ready."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from megazero.comm import Work
from megazero.zero.block import Block, Sharding
from megazero.zero.groups import DataParallel
from megazero.zero.offload.tier import Tier


class Gathering:
    """``local_copies``: by block's id, the slices that backward gathers from inside a node, where there are any."""

    def __init__(
        self, groups: DataParallel, sharding: Sharding, tier: Tier | None, local_copies: Mapping[int, torch.Tensor]
    ) -> None:
        self._groups, self._sharding, self._tier, self._local_copies = groups, sharding, tier, local_copies
        self._late: deque[_LateGather] = deque()

    def issue(self, blocks: Sequence[Block], in_backward: bool) -> None:
        """Issue the all-gather of blocks."""
        for block in blocks:
            if block.sharding.parameters:
                block.settle()
                block.gather_into()
        work = self._gather(blocks, in_backward)
        for block in blocks:
            block.gathering(work if block.layout.numel else None)

    def issue_when_ready(self, blocks: Sequence[Block]) -> None:
        """The same for blocks that stay whole between uses.

        [Note: gathers that wait for the host] What the host is still updating is gathered when it is first used, so
        that the next forward begins while the update goes on; all that was asked for before it is gathered first, in
        the order in which it was asked for: which is the same on every rank, whatever each of them uses first.
        """
        if not self._late and not any(block.is_updating for block in blocks):
            self.issue(blocks, False)
        elif blocks:
            late = _LateGather(self._late, lambda: self._gather(blocks, False))
            for block in blocks:
                block.gathering(late)

    def _gather(self, blocks: Sequence[Block], in_backward: bool) -> Work | None:
        blocks = [block for block in blocks if block.layout.numel]
        if not blocks:
            return None
        for block in blocks:
            block.settle()
        shard, local = self._groups.shard, self._groups.local
        if local is not None and in_backward and all(id(block) in self._local_copies for block in blocks):
            return local.all_gather([b.flat for b in blocks], [self._local_copies[id(b)] for b in blocks])
        if any(block.values_leave for block in blocks):
            return self._gather_from_host(blocks)
        if self._sharding.state and shard.size > 1:
            return shard.all_gather([b.flat for b in blocks], [b.values for b in blocks])
        for block in blocks:
            if block.sharding.parameters:
                block.flat.copy_(block.values)
        return None

    def _gather_from_host(self, blocks: Sequence[Block]) -> Work | None:
        assert self._tier is not None
        shard = self._groups.shard
        slices = [shard.slice_of(block.flat) for block in blocks]
        with self._tier.meter.timed("copies"):
            copies = [block.send_values(own) for own, block in zip(slices, blocks, strict=True)]
        if shard.size == 1:
            return _Together(copies)
        with self._tier.link.stream_back():  # so that the collective waits for the copies, and nothing else does
            _Together(copies).wait()
            return shard.all_gather([block.flat for block in blocks], slices)


class _LateGather:
    """An all-gather that is issued when it is waited for; see [Note: gathers that wait for the host].

    ``queue``: those that are not issued, in order."""

    def __init__(self, queue: deque[_LateGather], issue: Callable[[], Work | None]) -> None:
        self._queue, self._issue = queue, issue
        self._issued, self._work = False, None
        queue.append(self)

    def wait(self) -> None:
        while not self._issued:
            first = self._queue[0]
            first._work, first._issued = first._issue(), True  # unless a signal comes between: it stays where it is
            self._queue.popleft()
        if self._work is not None:
            self._work.wait()


class _Together:
    """Several copies as one work."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
