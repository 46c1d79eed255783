"""Samples out of token streams: numpy arrays for any global positions, read from the memory maps at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.indexed import check_ids
from data.sample_order import Located, SampleOrder
from data.splits import TokenRange
from megazero.errors import DataError


@dataclass(frozen=True)
class Samples:
    """B samples of S inputs and S targets. ``tokens`` (B, S+1) int64: inputs are [:, :-1], targets [:, 1:].

    ``weights`` (B, S) float32: 0 where the target is out of the loss. ``positions`` and ``documents`` (B, S) int64 of
    the inputs, only with reset_at_document: the place within the document as far as the sample holds it, and a number
    that differs between documents.
    """

    tokens: np.ndarray
    weights: np.ndarray
    positions: np.ndarray | None = None
    documents: np.ndarray | None = None


class SampleReader:
    """Reads samples of ``seq_length`` + 1 tokens of ``parts``, merged and ordered by ``order``.

    ``eod_id``: positions whose input is this id are out of the loss (None: no such rule). ``vocab_size``: ids are
    checked to be below it as they are read. ``once``: a sample met again (the order goes round for ever) is out of
    the loss, so that an evaluation counts each at most once.
    """

    def __init__(
        self,
        parts: Sequence[TokenRange],
        order: SampleOrder,
        seq_length: int,
        *,
        eod_id: int | None = None,
        reset_at_document: bool = False,
        vocab_size: int | None = None,
        once: bool = False,
    ) -> None:
        self._parts, self._order, self._seq_length = parts, order, seq_length
        self._eod_id, self._reset, self._vocab_size, self._once = eod_id, reset_at_document, vocab_size, once

    @property
    def length(self) -> int:
        """Samples of one epoch."""
        return self._order.length

    def read(self, positions: np.ndarray) -> Samples:
        """The samples at global ``positions`` (B,) int64. Raises DataError for an id outside the vocabulary."""
        located = self._order.locate(positions)
        size = self._seq_length
        tokens = np.empty((len(positions), size + 1), np.int64)
        weights = np.ones((len(positions), size), np.float32)
        places = np.zeros((len(positions), size), np.int64) if self._reset else None
        documents = np.zeros((len(positions), size), np.int64) if self._reset else None
        for k in np.unique(located.dataset):
            rows = np.flatnonzero(located.dataset == k)
            part = self._parts[k]
            starts = part.start + located.offset[rows]
            tokens[rows] = _windows(part.dataset.tokens, starts, size + 1)
            check_ids(tokens[rows], self._vocab_size, f"{part.dataset.prefix}.bin")
            if part.dataset.mask is not None:
                weights[rows] = mask = _windows(part.dataset.mask, starts + 1, size)
                if mask.max() > 1:
                    raise DataError(f"{part.dataset.prefix}.mask holds values other than 0 and 1: preprocess again")
            if places is not None and documents is not None:
                places[rows], documents[rows] = _within_documents(part, starts, size)
        if self._eod_id is not None:
            weights[tokens[:, :-1] == self._eod_id] = 0
        if self._once:
            weights[self._seen_before(located)] = 0
        return Samples(tokens, weights, places, documents)

    def _seen_before(self, located: Located) -> np.ndarray:
        return located.index >= np.array(self._order.counts)[located.dataset]


def _windows(stream: np.ndarray, starts: np.ndarray, width: int) -> np.ndarray:
    """``stream[start : start + width]`` for each start (B,): (B, width)."""
    return np.lib.stride_tricks.sliding_window_view(stream, width)[starts]


def _within_documents(part: TokenRange, starts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(position in the document, document) of ``size`` tokens from each start (B,): int64 (B, size) each.

    A sample that begins inside a document counts from 0 at its own beginning.
    """
    dataset = part.dataset
    first = dataset.documents_of(starts)
    last = dataset.documents_of(starts + size - 1)
    if (last < first).any():
        raise dataset.damaged("documents do not follow each other")
    begins = np.zeros((len(starts), size), np.int64)
    row = np.repeat(np.arange(len(starts)), last - first)
    later = np.arange(len(row)) - np.repeat(np.cumsum(last - first) - (last - first), last - first)
    column = dataset.document_starts(first[row] + 1 + later) - starts[row]
    if (column < 0).any() or (column >= size).any():
        raise dataset.damaged("documents do not follow each other")
    begins[row, column] = column
    begins = np.maximum.accumulate(begins, axis=1)
    jumps = np.zeros((len(starts), size), np.int64)
    np.add.at(jumps, (row, column), 1)
    return np.arange(size) - begins, first[:, None] + np.cumsum(jumps, axis=1)
