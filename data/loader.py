"""Global batches as torch tensors, each data-parallel rank reading its own share, one batch ahead."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from data.dataset import SampleReader

MicroBatch = dict[str, torch.Tensor]


class _Request(NamedTuple):
    first: int
    dp_rank: int
    dp_size: int
    global_batch_size: int
    micro_batch_size: int


class BatchSource:
    """Micro-batches as a pure function of their position in the sample order.

    A thread reads the batch that is likely to be asked for next; what is returned does not depend on it. The thread
    ends with ``close`` or with the process.
    """

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader
        self._pool = ThreadPoolExecutor(1, "batch-reader")
        self._ahead: tuple[_Request, Future[list[MicroBatch]]] | None = None

    @property
    def length(self) -> int:
        """Samples of one epoch."""
        return self._reader.length

    def read(
        self, first: int, dp_rank: int, dp_size: int, global_batch_size: int, micro_batch_size: int
    ) -> list[MicroBatch]:
        """Rank ``dp_rank``'s micro-batches of the global batch that begins at sample ``first``.

        Micro-batch j holds the samples at first + (j * dp_size + dp_rank) * micro_batch_size + [0, micro_batch_size):
        tokens (B, S+1) int64; weights (B, S) float32, 0 where the target is out of the loss; samples (B,) int64, the
        positions; and with reset_at_document positions (B, S) and documents (B, S) int64.

        Raises DataError for an id outside the vocabulary.
        """
        assert global_batch_size % (dp_size * micro_batch_size) == 0, "micro-batches do not fill the global batch"
        request = _Request(first, dp_rank, dp_size, global_batch_size, micro_batch_size)
        if self._ahead is not None and self._ahead[0] == request:
            batches = self._ahead[1].result()
        else:
            batches = self._read(request)
        following = request._replace(first=first + global_batch_size)
        self._ahead = (following, self._pool.submit(self._read, following))
        return batches

    def _read(self, request: _Request) -> list[MicroBatch]:
        first, rank, ranks, global_size, size = request
        count = global_size // (ranks * size)
        starts = first + (np.arange(count, dtype=np.int64) * ranks + rank) * size
        positions = (starts[:, None] + np.arange(size)).reshape(-1)
        samples = self._reader.read(positions)
        arrays = {"tokens": samples.tokens, "weights": samples.weights, "samples": positions}
        if samples.positions is not None and samples.documents is not None:
            arrays |= {"positions": samples.positions, "documents": samples.documents}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if torch.cuda.is_available():  # a copy to the GPU is asynchronous only from pinned memory
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return [{name: tensor[j * size : (j + 1) * size] for name, tensor in tensors.items()} for j in range(count)]

    def close(self) -> None:
        """End the thread. Reading again is an error."""
        self._pool.shutdown(cancel_futures=True)
        self._ahead = None
