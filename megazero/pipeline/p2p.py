"""Transfers between neighbouring pipeline ranks: batched by peer, of a shape known from the config.

[Note: lifetime of transferred tensors]
A transfer reads or writes its tensor until it completes, and the allocator must not give the memory to others before
that. Batches with one peer complete in order, so that what waits for one comes after all before it: only then, or when
the step ends, are the tensors let go of that these have sent. What is received into was free on the compute stream, and
a batch starts after what is on that stream when it is issued; it is read only by what comes after the wait. On a GPU a
wait orders streams, and the host goes on.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megazero.layout import Layout
from megazero.pipeline.bundle import Payload


def neighbour_groups(layout: Layout, rank: int, ring: bool, timeout: float) -> dict[int, ProcessGroup]:
    """By pipeline rank, a group with each that ``rank`` exchanges tensors with; none are needed where there are two.

    All ranks call it before any makes a group that others do not. ``ring``: the last exchanges with the first, too.
    ``timeout``: seconds that a transfer waits for its peer.

    [Note: groups that only their members make] torch names such a group by how many groups a member has, so these must
    be as many on each of them. In a round every rank therefore makes one, with a neighbour or with itself alone: a
    handful on each rank, however many ranks there are.
    """
    if layout.pp <= 2:
        return {}
    groups, own = {}, layout.coordinates(rank)["pp"]
    for pairs in _rounds(layout.pp, ring):
        pair = next((pair for pair in pairs if own in pair), (own,))
        ranks = sorted(layout.along(rank, "pp", pair))
        group = dist.new_group(ranks, timeout=timedelta(seconds=timeout), use_local_synchronization=True)
        groups |= {peer: group for peer in pair if peer != own}
    return groups


def _rounds(ranks: int, ring: bool) -> list[list[tuple[int, int]]]:
    """Neighbours along a pipeline in rounds, in each of which a rank has one of them at most."""
    rounds = [[(first, first + 1) for first in range(start, ranks - 1, 2)] for start in (0, 1)]
    if ring:
        last = [(0, ranks - 1)]
        rounds = [*rounds, last] if ranks % 2 else [rounds[0], rounds[1] + last]
    return rounds


class Receipt(NamedTuple):
    """What is being received: the ``batch``-th one with rank ``peer`` brings it."""

    tensor: Payload
    peer: int
    batch: int


class Transfers:
    """Issues batches of transfers, each with one peer, and waits for them where a tensor is wanted."""

    def __init__(
        self,
        group: ProcessGroup,
        ranks: Sequence[int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        pairs: Mapping[int, ProcessGroup] | None = None,
    ) -> None:
        """``ranks``: global rank of each pipeline rank; ``shape``: (T or T/tp, H) of every transfer. ``pairs``: for
        each peer a group of the two, so that transfers with it wait for those with no other; else all use ``group``."""
        self.group, self.ranks, self.pairs = group, ranks, pairs or {}
        self.shape, self.dtype, self.device = shape, dtype, device
        self._under_way: dict[int, deque[tuple[list[dist.Work], list[torch.Tensor]]]] = defaultdict(deque)
        self._waited: Counter[int] = Counter()

    def connect(self, rank: int, ring: bool) -> None:
        """Exchange a tensor with each neighbour of pipeline rank ``rank``, round by round.

        NCCL connects two ranks in their first transfer of a size, and the host waits for both. In a step it must not:
        the peer may itself be waiting, for another rank, or with a kernel's first launch for what was sent before.
        """
        for pairs in _rounds(len(self.ranks), ring):
            for peer in (peer for pair in pairs if rank in pair for peer in pair if peer != rank):
                self._start(peer, [torch.zeros(self.shape, dtype=self.dtype, device=self.device)], [self._empty()])
                self.drain()

    def issue(
        self, peer: int, sends: Sequence[Payload], receives: int, outputs: Sequence[Payload] = ()
    ) -> list[Receipt]:
        """Start one batch: send these tensors to a pipeline rank and receive as many as ``receives`` from it.

        ``outputs``: what was sent there that the received are the gradients of, if they are; of one shape here.
        """
        received = [self._empty() for _ in range(receives)]
        batch = self._start(peer, [tensor.detach().contiguous() for tensor in sends], received)
        return [Receipt(tensor, peer, batch) for tensor in received]

    def _empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def _start(self, peer: int, sent: list[torch.Tensor], received: list[torch.Tensor]) -> int:
        """Start a batch of contiguous tensors; its number, by which it is waited for."""
        group, rank = self.pairs.get(peer, self.group), self.ranks[peer]
        operations = [dist.P2POp(dist.isend, tensor, rank, group) for tensor in sent]
        operations += [dist.P2POp(dist.irecv, tensor, rank, group) for tensor in received]
        self._under_way[peer].append((dist.batch_isend_irecv(operations) if operations else [], sent))
        return self._waited[peer] + len(self._under_way[peer])

    def wait(self, receipt: Receipt) -> Payload:
        """The received tensor; what follows on the current stream sees its values."""
        while self._waited[receipt.peer] < receipt.batch:
            self._wait_for_first(receipt.peer)
        return receipt.tensor

    def _wait_for_first(self, peer: int) -> None:
        works, _ = self._under_way[peer][0]
        for work in works:
            work.wait()
        self._under_way[peer].popleft()
        self._waited[peer] += 1

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[int]) -> list[torch.Tensor]:
        """Send each (tensor, pipeline rank), one by one; receive one tensor from each of ``receives``, and wait."""
        for tensor, peer in sends:
            self.issue(peer, [tensor], 0)
        receipts = [self.issue(peer, [], 1)[0] for peer in receives]
        return [self.wait(receipt) for receipt in receipts]

    def drain(self) -> None:
        """Order what follows after every transfer."""
        for peer, batches in self._under_way.items():
            while batches:
                self._wait_for_first(peer)
