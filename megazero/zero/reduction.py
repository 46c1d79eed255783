"""What happens to gradients in and after backward: moved into their blocks' buffers, reduced bucket by bucket, kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain

import torch

from megazero.comm import Communicator, Work
from megazero.zero.block import Block, Sharding


class GradientReduction:
    """``buckets``: per chunk of the model, which one backward runs, of indices into ``blocks``, in the order in which
    they are reduced over ``group``. ``overlap``: backward goes on while a bucket is reduced. See [Note: order of
    collectives] in zero.sharded."""

    def __init__(
        self,
        blocks: Sequence[Block],
        buckets: Sequence[Sequence[Sequence[int]]],
        group: Communicator,
        sharding: Sharding,
        overlap: bool,
    ) -> None:
        self._blocks, self._chunks, self._group = blocks, buckets, group
        self._chunk = 0
        self._sharding, self._overlap = sharding, overlap
        # Whether what is reduced need not be held any longer: it is cut, or leaves for host memory.
        self._lets_go = sharding.gradients or any(block.host_grad is not None for block in blocks)
        self.last_of_step = False  # the running backward, or the one to come, completes its chunk's gradients
        self._complete: set[int] = set()  # blocks whose gradient of the running backward is accumulated
        self._next = 0
        self._reduced: set[int] = set()
        self._in_flight: deque[tuple[Sequence[int], Work | None]] = deque()

    @property
    def trained(self) -> list[Block]:
        """Blocks with gradients and optimizer state."""
        return [block for block in self._blocks if block.trainable]

    @property
    def reduced(self) -> bool:
        """Whether whole gradient buffers hold, in this rank's slices, the sums over ranks."""
        return len(self._reduced) == len(self._chunks)

    @property
    def _buckets(self) -> Sequence[Sequence[int]]:
        """Those of the running backward."""
        return self._chunks[self._chunk]

    @property
    def in_flight(self) -> int:
        """Buckets whose reduction was issued and not waited for."""
        return len(self._in_flight)

    @property
    def _reduces(self) -> bool:
        return self.last_of_step or self._sharding.gradients

    def begin_backward(self, chunk: int) -> None:
        self.finish_cut(self.in_flight)
        self._chunk, self._next = chunk, 0
        if chunk in self._reduced:
            # Another backward in the same step after one that was to be the last: what is summed over ranks is set
            # apart, so that it is not summed again.
            self.wait()
            for index in chain.from_iterable(self._buckets):
                if self._blocks[index].host_grad is None:
                    self._blocks[index].gradient.keep_owned()
            self._reduced.remove(chunk)

    def gradient_ready(self, index: int, position: int) -> None:
        """Autograd has made the gradient of one parameter of a block."""
        if index not in self._complete:
            self._blocks[index].gradient.move([position])

    def move(self, index: int) -> None:
        """Of a block's gradients those are there that this backward makes; a later one makes the rest."""
        if self._blocks[index].trainable:
            self._blocks[index].gradient.move()

    def add_product(self, index: int, position: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """A matrix's gradient of the running backward is left · right."""
        if self._blocks[index].trainable:
            assert index not in self._complete, self._blocks[index].layout.name
            self._blocks[index].gradient.add_product(position, left, right)

    def accumulate(self, index: int) -> None:
        """A block's parameters have all their gradients of the running backward."""
        if self._blocks[index].trainable and index not in self._complete:
            self._blocks[index].gradient.accumulate()
            self._complete.add(index)

    def issue_ready(self) -> None:
        """Issue the reductions whose turn it is, as far as their blocks are complete."""
        while self._reduces and self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if not self._complete.issuperset(bucket):
                return
            self._next += 1
            for host_grad in (self._blocks[i].host_grad for i in bucket):
                if host_grad is not None:
                    host_grad.fetch_ahead()
            work = self._issue([self._blocks[i] for i in bucket if self._blocks[i].layout.numel])
            if work is not None and not self._overlap:
                work.wait()
            self._in_flight.append((bucket, work))

    def _issue(self, blocks: Sequence[Block]) -> Work | None:
        if not blocks or self._group.size == 1:
            return None
        grads = [block.gradient.buffer for block in blocks]
        if self._sharding.state:
            return self._group.reduce_scatter(grads, [block.gradient.reduce_into() for block in blocks])
        return self._group.all_reduce(grads)

    def move_all(self) -> None:
        """A backward has ended that a later one completes."""
        for index in chain.from_iterable(self._buckets):
            self.move(index)

    def flush(self) -> None:
        """Backward has ended: complete, with zeros, what autograd did not report, in order."""
        for index in chain.from_iterable(self._buckets):
            self.accumulate(index)
        self.issue_ready()

    def end_backward(self) -> None:
        self._complete.clear()
        if self._reduces:
            assert self._next == len(self._buckets)
            if not self._sharding.gradients:
                self._reduced.add(self._chunk)
        self.last_of_step = False

    def abandon(self) -> None:
        """The running backward ended in an error; ``forget`` is next."""
        self._complete.clear()
        self.last_of_step = False

    def take_gradients(self, whole: Sequence[torch.Tensor]) -> None:
        """Of every trained block, in order: what a step's backwards have made where there is nothing to reduce."""
        assert self._group.size == 1 and not self._lets_go
        for block, gradient in zip(self.trained, whole, strict=True):
            block.gradient.take(gradient)
        self._reduced.update(range(len(self._chunks)))

    def finish_cut(self, count: int) -> None:
        """Where gradients are cut or leave, wait for the ``count`` reductions that were issued first: what is not this
        rank's, or not to be here, need not be held any longer."""
        for _ in range(count if self._lets_go else 0):
            self._finish_first()

    def _finish_first(self) -> None:
        bucket, work = self._in_flight.popleft()
        if work is not None:
            work.wait()
        for block in (self._blocks[i] for i in bucket):
            if self._sharding.gradients:
                block.gradient.keep_owned()
            if block.host_grad is not None:
                block.settle()
                block.gradient.leave()

    def wait(self) -> None:
        """Order what follows after every reduction."""
        while self._in_flight:
            self._finish_first()

    def finish(self) -> None:
        """As ``wait``; the step's gradients are whole."""
        self.wait()
        self._reduced.clear()

    def forget(self) -> None:
        """Gradients that no step has used are as if they had not been."""
        self.finish()
        for block in self.trained:
            block.gradient.drop()
