"""Transfers between neighbouring pipeline stages: batched, of shapes known from the config."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


class Transfers:
    """Issues one batch of sends and receives at a time, and keeps sent tensors alive until they are gone.

    [Note: lifetime of sent activations]
    A send reads its tensor until it completes. Sends of a batch are waited for when the next batch is issued,
    by when the peer has long received; until then ``_sent`` holds the tensors.
    """

    def __init__(
        self,
        group: ProcessGroup,
        ranks: Sequence[int],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``ranks``: global rank of each stage; ``shape``: (T or T/tp, H) of every transfer."""
        self.group, self.ranks = group, ranks
        self.shape, self.dtype, self.device = shape, dtype, device
        self._sent: list[tuple[torch.Tensor, dist.Work]] = []

    def exchange(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[int]) -> list[torch.Tensor]:
        """Send each (tensor, stage) and receive one tensor from each stage of ``receives``; returns the received.

        What follows on the current stream sees the received values.
        """
        received = [torch.empty(self.shape, dtype=self.dtype, device=self.device) for _ in receives]
        tensors = [tensor.detach().contiguous() for tensor, _ in sends]
        operations = [
            dist.P2POp(dist.isend, tensor, self.ranks[stage], self.group)
            for tensor, (_, stage) in zip(tensors, sends, strict=True)
        ]
        operations += [
            dist.P2POp(dist.irecv, buffer, self.ranks[stage], self.group)
            for buffer, stage in zip(received, receives, strict=True)
        ]
        works = dist.batch_isend_irecv(operations)
        self.drain()
        if len(works) < len(operations):  # NCCL: one work for the whole batch
            self._sent = [(tensor, works[0]) for tensor in tensors]
            if received:
                works[0].wait()
        else:
            self._sent = list(zip(tensors, works[: len(tensors)], strict=True))
            for work in works[len(tensors) :]:
                work.wait()
        return received

    def drain(self) -> None:
        """Order what follows after every send."""
        for _, work in self._sent:
            work.wait()
        self._sent.clear()
