"""Tokenises documents in order, on several processes."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from data.corpus_reader import Document
from data.tokenizer import Tokenizer, load_tokenizer
from megazero.errors import DataError

_BATCH_CHARACTERS = 1 << 18
_BATCHES_AHEAD = 4
"""Batches in flight per process: enough to keep it busy, few enough to bound memory."""


@dataclass(frozen=True)
class Encoded:
    """Some documents end to end: ``tokens`` (T,) int64, ``lengths`` (documents,) int64, ``mask`` (T,) uint8 with 0 on
    prompts, and the ``bytes`` of their text in UTF-8."""

    tokens: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray
    bytes: int


def encode_batch(tokenizer: Tokenizer, documents: list[Document], append_eod: bool) -> Encoded:
    """Tokenise ``documents``. Prompt and response are tokenised apart, so that the mask ends exactly between them."""
    tokens: list[int] = []
    mask: list[np.ndarray] = []
    lengths = np.zeros(len(documents), np.int64)
    size = 0
    for row, document in enumerate(documents):
        prompt = tokenizer.encode(document.prompt) if document.prompt else []
        text = tokenizer.encode(document.text) if document.text else []
        end = [tokenizer.eod_id] if append_eod and tokenizer.eod_id is not None else []
        tokens += prompt + text + end
        mask += [np.zeros(len(prompt), np.uint8), np.ones(len(text) + len(end), np.uint8)]
        lengths[row] = len(prompt) + len(text) + len(end)
        size += len(document.prompt.encode()) + len(document.text.encode())
    return Encoded(np.array(tokens, np.int64), lengths, np.concatenate([np.zeros(0, np.uint8), *mask]), size)


def encode_documents(documents: Iterable[Document], spec: str, append_eod: bool, workers: int) -> Iterator[Encoded]:
    """Tokenise ``documents`` in order; the result is the same whatever ``workers`` is."""
    batches = _batched(documents)
    if workers == 1:
        tokenizer = load_tokenizer(spec)
        for batch in batches:
            yield encode_batch(tokenizer, batch, append_eod)
        return
    # spawn: a fork would copy the locks of the tokenizer libraries' threads in whatever state they are
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (spec, append_eod))
    try:
        waiting: deque[Future[Encoded]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) >= workers * _BATCHES_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a tokenising process died, perhaps for lack of memory: try fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _batched(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text) + len(document.prompt) + 1
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


# A worker process is given its tokenizer once, by the pool's initialiser, which has no other place to leave it.
_worker: tuple[Tokenizer, bool] | None = None


def _start_worker(spec: str, append_eod: bool) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends these
    _worker = (load_tokenizer(spec), append_eod)


def _encode_in_worker(documents: list[Document]) -> Encoded:
    assert _worker is not None
    tokenizer, append_eod = _worker
    return encode_batch(tokenizer, documents, append_eod)
