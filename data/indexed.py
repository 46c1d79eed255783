"""Token files in Megatron-LM's MMIDIDX format: ``PREFIX.bin`` (ids, back to back) and ``PREFIX.idx`` (what is where).

Layout of ``PREFIX.idx``, little-endian, without padding:

    9 bytes   the magic ``MMIDIDX\\0\\0``
    uint64    version, 1
    uint8     code of the id's dtype (DTYPES)
    uint64    S, the number of sequences
    uint64    D + 1, D the number of documents
    int32[S]  tokens in each sequence
    int64[S]  byte offset of each sequence in ``PREFIX.bin``
    int64[D+1] first sequence of each document, then S

Beside them lie two files of ours: ``PREFIX.mask`` (optional; uint8 per token, 1 where the token counts in the loss as
a target) and ``PREFIX.json`` (optional; tokenizer, vocabulary size, end-of-document id, text bytes).
A writer puts the ``.idx`` in place last, and a rebuild removes it first: without it there is no dataset.
"""

from __future__ import annotations

import json
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from megazero.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
_LARGEST_DESCRIPTION = 2**26
"""Bytes of PREFIX.json."""
CODES = {dtype: code for code, dtype in DTYPES.items()}


def token_dtype(vocab_size: int) -> np.dtype:
    """The one dtype for ids below ``vocab_size``. Megatron-LM's rule: uint16 below 65,500 entries, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def companion(prefix: str | Path, suffix: str) -> Path:
    """``PREFIX.suffix``, appended: a prefix may itself contain dots."""
    return Path(f"{prefix}.{suffix}")


def map_file(path: Path) -> np.ndarray:
    """The bytes of ``path`` as a read-only uint8 array; it keeps the mapping alive. An empty file cannot be mapped."""
    if path.stat().st_size == 0:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(path, mode="r"))


def _advise_random(mapped: np.ndarray) -> None:
    """Stop the kernel reading ahead on a mapping that is visited at random: here 10 ms a page, without 10 us."""
    base = mapped
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        base.madvise(mmap.MADV_RANDOM)


class IndexedDataset:
    """A dataset at ``prefix``, opened by memory map in constant time, whatever its size.

    ``tokens`` (N,) is the whole token stream, ``mask`` (N,) uint8 or None, ``metadata`` what ``PREFIX.json`` holds or
    {}. Arrays handed out are read-only views of the mapping; they stay valid after the dataset object is gone.

    Raises DataError where a file is missing, is not MMIDIDX, or has another size than the index says.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        index_path, bin_path = companion(prefix, "idx"), companion(prefix, "bin")
        for path in (index_path, bin_path):
            if not path.is_file():
                raise DataError(f"{path} does not exist; {self._advice()}")
        self._open_index(index_path)
        stored = bin_path.stat().st_size
        described = self._described_bytes()
        if stored != described:
            raise DataError(
                f"{bin_path} has {stored} bytes, but {index_path} describes {described}; "
                "one of the two was cut short or belongs to another build: copy or preprocess again"
            )
        self.tokens: np.ndarray = map_file(bin_path).view(self.dtype)
        self.metadata = self._read_metadata()
        self.mask = self._map_mask()

    def _advice(self) -> str:
        """What to do about a prefix at which there is no dataset."""
        if self.prefix.endswith((".bin", ".idx")):
            return f"give the prefix, without .bin or .idx: {self.prefix[:-4]}"
        if Path(self.prefix).is_file():
            return f"data/preprocess.py --input {self.prefix} --output PREFIX makes a dataset of it; give that PREFIX"
        return f"data/preprocess.py --output {self.prefix} would write it"

    def _open_index(self, path: Path) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size:
            raise DataError(f"{path} has {size} bytes, fewer than its header's {HEADER.size}: copy or preprocess again")
        magic, version, code, sequences, boundaries = HEADER.unpack(head)
        if magic != MAGIC or version != 1:
            raise DataError(f"{path} is not an MMIDIDX index of version 1: preprocess the text again")
        if code not in DTYPES:
            raise DataError(f"{path} holds dtype code {code}, which is no integer type: token ids are expected")
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if size != expected:
            raise DataError(
                f"{path} has {size} bytes, but {sequences} sequences and {boundaries} document boundaries "
                f"take {expected}: copy or preprocess again"
            )
        buffer = map_file(path)
        _advise_random(buffer)
        self.dtype = DTYPES[code]
        self.num_sequences = int(sequences)
        # These views are not aligned (34 bytes come first), so numpy would copy them whole in searchsorted and the
        # like; only indexing is cheap. Hence document_of searches by hand.
        self.lengths = np.ndarray((sequences,), "<i4", buffer, HEADER.size)
        self.pointers = np.ndarray((sequences,), "<i8", buffer, HEADER.size + 4 * sequences)
        self.boundaries = np.ndarray((boundaries,), "<i8", buffer, HEADER.size + 12 * sequences)
        if boundaries == 0 or self.boundaries[0] != 0 or self.boundaries[-1] > sequences:
            raise DataError(f"{path} has document boundaries that do not run from 0 to its {sequences} sequences")

    def _described_bytes(self) -> int:
        if self.num_sequences == 0:
            return 0
        return int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize

    def _read_metadata(self) -> dict[str, Any]:
        path = companion(self.prefix, "json")
        if not path.is_file():
            return {}
        try:
            if path.stat().st_size > _LARGEST_DESCRIPTION:
                raise ValueError(f"{path.stat().st_size} bytes")
            metadata = json.loads(path.read_text("utf-8"))
            tokens = metadata["tokens"]
            for name in ("tokens", "vocab_size", "eod_id"):
                value = metadata.get(name, 0)
                if value is not None and (type(value) is not int or value < 0):
                    raise ValueError(f"{name} is {repr(value)[:50]}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{path} is not a dataset description: {error!r}; remove it or preprocess again") from error
        if tokens != self.num_tokens:
            raise DataError(
                f"{path} describes {tokens} tokens, but {self.prefix}.idx holds {self.num_tokens}; "
                "it belongs to another build: remove it or preprocess again"
            )
        return metadata

    def _map_mask(self) -> np.ndarray | None:
        path = companion(self.prefix, "mask")
        if not path.is_file():
            return None
        size = path.stat().st_size
        if size != self.num_tokens:
            raise DataError(
                f"{path} has {size} bytes, but {self.prefix}.bin holds {self.num_tokens} tokens (one byte each); "
                "it is cut short or belongs to another build: remove it or preprocess again"
            )
        return map_file(path)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.boundaries) - 1

    def __len__(self) -> int:
        """The number of sequences; preprocess.py writes one sequence per document."""
        return self.num_sequences

    def __getitem__(self, index: int) -> np.ndarray:
        """The ids of sequence ``index``: (length,), read-only."""
        index = range(self.num_sequences)[index]
        start, length = int(self.pointers[index]) // self.dtype.itemsize, int(self.lengths[index])
        if not 0 <= start <= start + length <= self.num_tokens:
            raise self.damaged(f"sequence {index} is not inside its {self.num_tokens} tokens")
        return self.tokens[start : start + length]

    def damaged(self, what: str) -> DataError:
        """The error for an index that has the right size and cannot be right."""
        return DataError(f"{self.prefix}.idx is damaged: {what}; copy or preprocess again")

    def advise_random(self) -> None:
        """Tell the kernel that samples will be read in random order."""
        _advise_random(self.tokens)

    def document_starts(self, documents: np.ndarray) -> np.ndarray:
        """First token of each document: int64, same shape. ``num_documents`` is allowed: the end of the last one."""
        sequences = self.boundaries[documents]
        if sequences.size and (sequences.min() < 0 or sequences.max() > self.num_sequences):
            raise self.damaged(f"a document begins outside its {self.num_sequences} sequences")
        if self.num_sequences == 0:
            return np.zeros(sequences.shape, np.int64)
        inside = np.minimum(sequences, self.num_sequences - 1)
        starts = self.pointers[inside] // self.dtype.itemsize
        if starts.size and (starts.min() < 0 or starts.max() > self.num_tokens):
            raise self.damaged(f"a document begins outside its {self.num_tokens} tokens")
        return np.where(sequences == self.num_sequences, self.num_tokens, starts)

    def documents_of(self, tokens: np.ndarray) -> np.ndarray:
        """The document of each token offset (any shape): int64; empty documents hold none.

        A binary search over all offsets at once; it touches O(log D) entries of the index for each.
        """
        low = np.zeros(tokens.shape, np.int64)
        high = np.full(tokens.shape, len(self.boundaries) - 1, np.int64)
        for _ in range(len(self.boundaries).bit_length()):
            middle = (low + high + 1) // 2
            begun = self.document_starts(middle) <= tokens
            low = np.where(begun, middle, low)
            high = np.where(begun, high, middle - 1)
        return low

    def verify(self) -> int:
        """Read and check everything; returns the largest id (-1 without tokens). Raises DataError at a fault."""
        step = 1 << 22
        expected = 0
        for first in range(0, self.num_sequences, step):
            lengths = self.lengths[first : first + step].astype(np.int64)
            ends = expected + np.cumsum(lengths) * self.dtype.itemsize
            starts = np.concatenate([[expected], ends[:-1]])
            wrong = np.flatnonzero((lengths < 0) | (self.pointers[first : first + step] != starts))
            if wrong.size:
                raise DataError(
                    f"{self.prefix}.idx: sequence {first + wrong[0]} does not begin where the one before it ends"
                )
            expected = int(ends[-1])
        for first in range(0, self.num_documents, step):
            wrong = np.flatnonzero(np.diff(self.boundaries[first : first + step + 1]) < 0)
            if wrong.size:
                raise DataError(f"{self.prefix}.idx: document {first + wrong[0]} ends before it begins")
        largest = -1
        vocab_size = self.metadata.get("vocab_size")
        for first in range(0, self.num_tokens, step):
            part = self.tokens[first : first + step]
            check_ids(part, vocab_size, f"{self.prefix}.bin, tokens from {first}")
            largest = max(largest, int(part.max()))
            if self.mask is not None and self.mask[first : first + step].max() > 1:
                raise DataError(f"{self.prefix}.mask holds values other than 0 and 1 at tokens from {first}")
        return largest


def check_ids(ids: np.ndarray, vocab_size: int | None, where: str) -> None:
    """Raise DataError if an id is negative or, with ``vocab_size``, not below it."""
    if ids.size == 0:
        return
    smallest, largest = int(ids.min()), int(ids.max())
    if smallest < 0:
        raise DataError(f"{where}: token id {smallest} is negative")
    if vocab_size is not None and largest >= vocab_size:
        raise DataError(f"{where}: token id {largest} is outside the vocabulary of {vocab_size} entries")
