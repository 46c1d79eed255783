"""Parts of a dataset's token stream, and the division of a dataset into a training and an evaluation part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.indexed import IndexedDataset


@dataclass(frozen=True)
class TokenRange:
    """Tokens [start, stop) of a dataset."""

    dataset: IndexedDataset
    start: int
    stop: int

    @classmethod
    def whole(cls, dataset: IndexedDataset) -> TokenRange:
        return cls(dataset, 0, dataset.num_tokens)

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def split_at_document(dataset: IndexedDataset, shares: tuple[float, float]) -> tuple[TokenRange, TokenRange]:
    """The documents before and after the document border nearest to the first share of the tokens.

    Either part may come out empty; whether that will do is the caller's question.
    """
    wanted = round(dataset.num_tokens * shares[0] / sum(shares))
    at = int(dataset.documents_of(np.array([wanted]))[0])
    around = np.array([at, min(at + 1, dataset.num_documents)])
    borders = dataset.document_starts(around)
    border = int(borders[np.argmin(np.abs(borders - wanted))])
    return TokenRange(dataset, 0, border), TokenRange(dataset, border, dataset.num_tokens)
