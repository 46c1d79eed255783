"""Documents out of text files: .jsonl, .txt and .parquet, each also with .gz or .zst.

A line of .jsonl and a row of .parquet is a document; a .txt file is one document, kept as it is.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megazero.errors import DataError

FORMATS = (".jsonl", ".txt", ".parquet")
PACKINGS = (".gz", ".zst")


@dataclass(frozen=True)
class Document:
    """A document: ``prompt`` is read but not learned, ``text`` is learned; both in UTF-8's reach."""

    text: str
    prompt: str = ""


@dataclass(frozen=True)
class Fields:
    """Which fields of a record make a document: one text, or a prompt and a response."""

    text: str = "text"
    prompt: str | None = None
    response: str | None = None

    @property
    def names(self) -> list[str]:
        return [self.text] if self.prompt is None or self.response is None else [self.prompt, self.response]

    def document(self, record: dict[str, Any], where: str) -> Document:
        """Raises DataError naming ``where`` if a field is missing or is no text."""
        values = []
        for name in self.names:
            if name not in record:
                raise DataError(f"{where} has no field {name!r} (it has {', '.join(map(repr, record)) or 'none'})")
            value = record[name]
            if not isinstance(value, str):
                raise DataError(f"{where}: field {name!r} is {type(value).__name__}, not text")
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"{where}: field {name!r} is not valid Unicode: {error.reason}") from error
            values.append(value)
        return Document(values[0]) if len(values) == 1 else Document(text=values[1], prompt=values[0])


def check_inputs(paths: Sequence[Path], fields: Fields) -> None:
    """Raise DataError for a path that is missing or of a kind that cannot be read."""
    for path in paths:
        if not path.is_file():
            raise DataError(f"--input: {path} {'is not a file' if path.exists() else 'does not exist'}")
        kind, _ = _kind(path)
        if kind == ".txt" and fields.prompt is not None:
            raise DataError(f"--input: {path} is plain text; prompts and responses need .jsonl or .parquet")


def _kind(path: Path) -> tuple[str, str]:
    """(format, packing) by the file's name."""
    packing = path.suffix.lower() if path.suffix.lower() in PACKINGS else ""
    name = path.name.lower().removesuffix(packing)
    for kind in FORMATS:
        if name.endswith(kind):
            return kind, packing
    raise DataError(f"--input: {path} is none of {', '.join(FORMATS)}, nor one of these with {' or '.join(PACKINGS)}")


def read_documents(path: Path, fields: Fields, reached: Callable[[int], None] | None = None) -> Iterator[Document]:
    """The documents of ``path`` in order. ``reached`` is told the position in the (packed) file after each.

    Raises DataError naming file and line for what cannot be read.
    """
    kind, packing = _kind(path)
    readers = {".jsonl": _read_jsonl, ".txt": _read_txt, ".parquet": _read_parquet}
    with path.open("rb") as raw:
        try:
            for document in readers[kind](_unpack(raw, packing, path), path, fields):
                yield document
                if reached is not None:
                    reached(raw.tell())
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} is damaged or cut short: {error}") from error


def _unpack(raw: BinaryIO, packing: str, path: Path) -> BinaryIO:
    if packing == ".gz":
        return gzip.open(raw, "rb")
    if packing == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f"{path}: .zst needs the package zstandard: pip install zstandard") from error
        reader = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(_ZstdStream(reader, path, zstandard.ZstdError), 1 << 20)
    return raw


class _ZstdStream(io.RawIOBase):
    """A zstandard reader whose errors name the file, so that they read as the user's."""

    def __init__(self, reader: Any, path: Path, failure: type[Exception]) -> None:
        self._reader, self._path, self._failure = reader, path, failure

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return self._reader.readinto(buffer)
        except self._failure as error:
            raise DataError(f"{self._path} is damaged or cut short: {error}") from error


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from error


def _read_txt(stream: BinaryIO, path: Path, fields: Fields) -> Iterator[Document]:
    yield Document(_decode(stream.read(), str(path)).removeprefix("\ufeff"))


def _read_jsonl(stream: BinaryIO, path: Path, fields: Fields) -> Iterator[Document]:
    for number, line in enumerate(stream, start=1):
        where = f"{path}, line {number}"
        text = _decode(line, where).removeprefix("\ufeff").strip()
        if not text:
            continue
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{where} is not a JSON object")
        yield fields.document(record, where)


def _read_parquet(stream: BinaryIO, path: Path, fields: Fields) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: .parquet needs the package pyarrow: pip install pyarrow") from error
    try:
        file = pyarrow.parquet.ParquetFile(stream if _kind(path)[1] == "" else io.BytesIO(stream.read()))
        absent = [name for name in fields.names if name not in file.schema_arrow.names]
        if absent:
            raise DataError(f"{path} has no column {absent[0]!r} (it has {', '.join(file.schema_arrow.names)})")
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=fields.names):
            for record in batch.to_pylist():
                row += 1
                yield fields.document(record, f"{path}, row {row}")
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
