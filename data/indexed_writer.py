"""Writes datasets in the format that data/indexed.py reads, so that a dataset is whole or absent."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from data.indexed import CODES, HEADER, MAGIC, IndexedDataset, check_ids, companion
from megazero.errors import DataError, explained

LONGEST_SEQUENCE = 2**31 - 1


def index_bytes(dtype: np.dtype, lengths: np.ndarray, boundaries: np.ndarray) -> list[bytes]:
    """The parts of an .idx file, in order.

    ``lengths`` (S,) tokens per sequence, each below 2**31; ``boundaries`` (D+1,) first sequence of each document,
    then S.
    """
    lengths = np.asarray(lengths, np.int64)
    assert lengths.size == 0 or (lengths.min() >= 0 and lengths.max() <= LONGEST_SEQUENCE)
    pointers = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1] * np.int64(dtype.itemsize), out=pointers[1:])
    header = HEADER.pack(MAGIC, 1, CODES[dtype], len(lengths), len(boundaries))
    return [
        header,
        lengths.astype("<i4").tobytes(),
        pointers.astype("<i8").tobytes(),
        boundaries.astype("<i8").tobytes(),
    ]


@contextlib.contextmanager
def _writing(target: str | Path) -> Iterator[None]:
    """DataError with the target's name in place of an OSError, which may have none or that of a temporary file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{target}: cannot be written: {explained(error)}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it has all of ``content`` or does not exist; folders are made for it. Raises DataError."""
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_synced(temporary, [content])
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _write_synced(path: Path, parts: list[bytes]) -> None:
    with path.open("wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


class DatasetWriter:
    """Writes ``prefix``.bin, .idx and, as asked, .mask and .json.

    Everything goes to temporary names beside the target; ``commit`` renames them, the .idx last. It is a context
    manager: what is not committed at the end of the block leaves no trace. What cannot be written is a DataError.

    ``dtype``: of the stored ids, from data.indexed.token_dtype. ``vocab_size``: ids must be below it, if given.
    ``masked``: also keep a loss mask.
    """

    def __init__(
        self, prefix: str | Path, dtype: np.dtype, *, vocab_size: int | None = None, masked: bool = False
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        assert self.dtype in CODES, f"{self.dtype} cannot hold token ids"
        self.vocab_size = vocab_size
        self.num_tokens = 0
        self._lengths: list[np.ndarray] = []
        self._boundaries: list[np.ndarray] = [np.zeros(1, np.int64)]
        self._num_sequences = 0
        self.num_documents = 0
        self._files: dict[str, BinaryIO] = {}
        self._made_folders: list[Path] = []
        try:
            with _writing(self.prefix):
                self._make_folder()
                for suffix in ["bin", "mask"] if masked else ["bin"]:
                    self._files[suffix] = self._temporary(suffix).open("wb")
        except BaseException:
            self.abort()
            raise

    def _make_folder(self) -> None:
        folder = Path(self.prefix).parent
        self._made_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)

    def _temporary(self, suffix: str) -> Path:
        return companion(self.prefix, f"{suffix}.tmp{os.getpid()}")

    def add_document(self, tokens: Sequence[int] | np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append one document, which may be empty. ``mask`` as in add_documents."""
        self.add_documents(np.asarray(tokens), np.array([len(tokens)]), mask)

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Append documents laid end to end: ``tokens`` (sum of lengths,), ``lengths`` (documents,).

        ``mask`` (same length as tokens, 0 or 1): which tokens count in the loss as targets; all of them if None.
        Raises DataError for an id outside the vocabulary or the dtype.
        """
        assert len(tokens) == int(np.sum(lengths)), "documents and their lengths disagree"
        assert mask is None or ("mask" in self._files and len(mask) == len(tokens))
        where = f"{self.prefix}.bin, tokens from {self.num_tokens}"
        check_ids(tokens, self.vocab_size, where)
        if tokens.size and int(tokens.max()) > np.iinfo(self.dtype).max:
            raise DataError(
                f"{where}: token id {int(tokens.max())} does not fit the file's {self.dtype}; it needs a wider dtype"
            )
        with _writing(self.prefix):
            self._files["bin"].write(tokens.astype(self.dtype).tobytes())
            if "mask" in self._files:
                mask = np.ones(len(tokens), np.uint8) if mask is None else np.asarray(mask)
                self._files["mask"].write(mask.astype(np.uint8).tobytes())
        self._note_documents(np.asarray(lengths, np.int64))
        self.num_tokens += len(tokens)

    def _note_documents(self, lengths: np.ndarray) -> None:
        """One sequence per document; a document past the format's int32 lengths takes several sequences."""
        pieces = np.maximum(-(-lengths // LONGEST_SEQUENCE), 1)
        if (pieces > 1).any():
            spread = np.full(int(pieces.sum()), LONGEST_SEQUENCE, np.int64)
            last = np.cumsum(pieces) - 1
            spread[last] = lengths - (pieces - 1) * LONGEST_SEQUENCE
            lengths = spread
        self._lengths.append(lengths)
        self._boundaries.append(self._num_sequences + np.cumsum(pieces))
        self._num_sequences += len(lengths)
        self.num_documents += len(pieces)

    def add_dataset(self, prefix: str | Path) -> None:
        """Append a whole dataset, e.g. one that another machine tokenised: files are copied, not decoded."""
        shard = IndexedDataset(prefix)
        if shard.dtype != self.dtype:
            raise DataError(
                f"{prefix} holds {shard.dtype} ids, {self.prefix} {self.dtype}: preprocess with one tokenizer"
            )
        if (shard.mask is not None) != ("mask" in self._files):
            raise DataError(f"{prefix} and {self.prefix} must both have a loss mask, or neither")
        for suffix, file in self._files.items():
            with companion(prefix, suffix).open("rb") as source, _writing(self.prefix):
                shutil.copyfileobj(source, file, 1 << 24)
        self._lengths.append(np.asarray(shard.lengths, np.int64))
        self._boundaries.append(self._num_sequences + np.asarray(shard.boundaries[1:], np.int64))
        self._num_sequences += shard.num_sequences
        self.num_documents += shard.num_documents
        self.num_tokens += shard.num_tokens

    def commit(self, metadata: dict[str, Any] | None = None) -> None:
        """Put the files in place. ``metadata`` goes to ``prefix``.json, with tokens and documents added.

        A crash on the way leaves a dataset without .idx, which nobody opens, or the finished one.
        """
        with _writing(self.prefix):
            self._commit(metadata)
        self._made_folders = []

    def _commit(self, metadata: dict[str, Any] | None) -> None:
        boundaries = np.concatenate(self._boundaries)
        _write_synced(
            self._temporary("idx"),
            index_bytes(self.dtype, np.concatenate([np.zeros(0, np.int64), *self._lengths]), boundaries),
        )
        if metadata is not None:
            counts = {"documents": self.num_documents, "tokens": self.num_tokens}
            _write_synced(self._temporary("json"), [(json.dumps({**metadata, **counts}, indent=1) + "\n").encode()])
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        present = [*self._files, *(["json"] if metadata is not None else [])]
        companion(self.prefix, "idx").unlink(missing_ok=True)
        for suffix in ("bin", "mask", "json"):
            if suffix in present:
                os.replace(self._temporary(suffix), companion(self.prefix, suffix))
            else:
                companion(self.prefix, suffix).unlink(missing_ok=True)
        os.replace(self._temporary("idx"), companion(self.prefix, "idx"))

    def abort(self) -> None:
        """Remove the temporary files and the folders made for them; after a commit there are none."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # what it still holds does not fit on a full disk
                file.close()
        for suffix in ("bin", "mask", "json", "idx"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._temporary(suffix).unlink()
        for folder in self._made_folders:
            try:
                folder.rmdir()
            except OSError:
                break

    def __enter__(self) -> DatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
