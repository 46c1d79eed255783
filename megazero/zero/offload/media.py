"""Where a block's state lies: host memory, or a file that is read ahead and written behind.

A medium has named fields of one length and of several dtypes; pieces of it are fetched, changed and put back.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch

from megazero.host_memory import HostMemory
from megazero.zero.offload.files import PAGE, StateFile

Fields = Mapping[str, torch.dtype]
Views = dict[str, torch.Tensor]


class Medium(Protocol):
    def ahead(self) -> None:
        """Every piece is about to be fetched, in order."""

    def fetch(self, start: int, end: int) -> Views:
        """A piece's fields, to be changed in place. ``start`` is a multiple of the size of pieces."""

    def put(self, start: int, changed: bool) -> None:
        """The piece fetched last at ``start`` is done with."""

    def read(self, name: str, start: int, end: int) -> torch.Tensor:
        """A copy, or a view, of any part of a field."""

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        """Replace a part of a field by values of its dtype."""


class InMemory:
    def __init__(self, memory: HostMemory, fields: Fields, numel: int) -> None:
        self._fields = {name: memory.empty(numel, dtype) for name, dtype in fields.items()}

    def ahead(self) -> None:
        pass

    def fetch(self, start: int, end: int) -> Views:
        return {name: values[start:end] for name, values in self._fields.items()}

    def put(self, start: int, changed: bool) -> None:
        pass

    def read(self, name: str, start: int, end: int) -> torch.Tensor:
        return self._fields[name][start:end]

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        self._fields[name][start : start + values.numel()].copy_(values)


class Disk:
    """One rank's file, its buffers and the threads that read and write.

    [Note: buffers of the disk] A piece's buffer is taken when its read is issued, in the order of the update, and given
    back when its write is done: a fixed number of buffers bounds how far reads run ahead and writes lag behind, and
    because one thread takes them in order, the piece that the update waits for always has one. After an error nothing
    more is read, nor waited for.
    """

    def __init__(
        self, path: str, memory: HostMemory, buffers: int, record: int, needed: int, ahead: bool, behind: bool
    ) -> None:
        """``record``: bytes of the largest piece. ``needed``: of all state on this rank."""
        self.file = StateFile(path, needed)
        self.memory, self.reads_ahead, self.writes_behind = memory, ahead, behind
        self._record = record
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(buffers):
            self._free.put(memory.empty(record, torch.uint8))
        self._orders = ThreadPoolExecutor(1, "offload-order")
        self._io = ThreadPoolExecutor(4, "offload-io")
        self._error: BaseException | None = None
        self.read_bytes = self.written_bytes = 0

    def order(self, offset: int, size: int, after: Future | None) -> Future[Future[torch.Tensor]]:
        """A read of whole pages, after a write of the same."""

        def issue() -> Future[torch.Tensor]:
            return self._io.submit(self._read, self._take(), offset, size, after)

        return self._orders.submit(issue)

    def _take(self) -> torch.Tensor:
        while True:
            if self._error is not None:
                raise self._error
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=0.1)  # seconds between looks at an error

    def _read(self, buffer: torch.Tensor, offset: int, size: int, after: Future | None) -> torch.Tensor:
        try:
            if after is not None:
                after.result()
            self.file.read(buffer[:size], offset)
        except Exception as error:
            self._error = error
            raise
        self.read_bytes += size
        return buffer

    def fail(self, error: BaseException) -> None:
        """An update has ended in ``error``, its buffers with it."""
        self._error = error

    def give_back(self, buffer: torch.Tensor, offset: int, size: int, changed: bool) -> Future | None:
        """Write it where it is changed; it is free after that."""
        if not changed:
            self._free.put(buffer)
            return None
        written = self._io.submit(self._write, buffer, offset, size)
        if not self.writes_behind:
            written.result()
        return written

    def _write(self, buffer: torch.Tensor, offset: int, size: int) -> None:
        try:
            self.file.write(buffer[:size], offset)
        except Exception as error:
            self._error = error
            raise
        self.written_bytes += size
        self._free.put(buffer)

    def close(self) -> None:
        self._orders.shutdown()
        self._io.shutdown()
        self.file.close()


class _Record(NamedTuple):
    """Where a piece lies: ``offset`` in the file, ``places``: each field's first byte in it, ``size`` in bytes."""

    offset: int
    places: dict[str, int]
    size: int


def record_places(fields: Fields, numel: int) -> tuple[dict[str, int], int]:
    """(first byte of each field in a piece of ``numel`` elements, bytes of the piece), in whole pages."""
    places, size = {}, 0
    for name, dtype in fields.items():
        places[name] = size
        size += -(-numel * dtype.itemsize // PAGE) * PAGE
    return places, size


class Pages(Protocol):
    """A rank's file, and memory to read it into."""

    file: StateFile
    memory: HostMemory


class InFile:
    """Fields in pieces of ``piece`` elements, one after another in a file; any part of them can be read and written."""

    def __init__(self, where: Pages, fields: Fields, numel: int, piece: int) -> None:
        self._where, self._fields, self._piece = where, fields, piece
        self._records: dict[int, _Record] = {}
        for start in range(0, numel, piece):
            places, size = record_places(fields, min(piece, numel - start))
            self._records[start] = _Record(where.file.claim(size), places, size)

    def offset_of(self, start: int) -> int:
        """The first byte of the piece that begins with element ``start``."""
        return self._records[start].offset

    def _wait_for_write(self, start: int) -> None:
        """A piece is about to be read or written: return when no other write of it is under way."""

    def read(self, name: str, start: int, end: int) -> torch.Tensor:
        values = torch.empty(end - start, dtype=self._fields[name])
        for first, last, pages, offset, part in self._parts(name, start, end):
            self._where.file.read(pages, offset)
            values[first:last] = pages[part].view(values.dtype)
        return values

    def write(self, name: str, start: int, values: torch.Tensor) -> None:
        for first, last, pages, offset, part in self._parts(name, start, start + values.numel()):
            # Of what is not replaced, the file has to be asked only for the rest of the first and the last page.
            if part.start:
                self._where.file.read(pages[:PAGE], offset)
            if part.stop < pages.numel():
                self._where.file.read(pages[-PAGE:], offset + pages.numel() - PAGE)
            pages[part].view(values.dtype).copy_(values[first:last])
            self._where.file.write(pages, offset)

    def _parts(self, name: str, start: int, end: int) -> Iterator[tuple[int, int, torch.Tensor, int, slice]]:
        """Of each piece, elements [first, last) counted from ``start``: room for the pages that hold them, the offset
        of those in the file, and which of their bytes are meant. Nothing where there are none, wherever that is."""
        itemsize = self._fields[name].itemsize
        if start == end:
            return
        for at in range(start // self._piece * self._piece, end, self._piece):
            low, high = max(start, at), min(end, at + self._piece)
            self._wait_for_write(at)
            place = self._records[at].offset + self._records[at].places[name]
            first, last = place + (low - at) * itemsize, place + (high - at) * itemsize
            offset = first // PAGE * PAGE
            pages = self._where.memory.empty(-(-(last - offset) // PAGE) * PAGE, torch.uint8)
            yield low - start, high - start, pages, offset, slice(first - offset, last - offset)


class OnDisk(InFile):
    """Pieces of one block's state, fetched and put back in order by a disk's threads."""

    def __init__(self, disk: Disk, fields: Fields, numel: int, piece: int) -> None:
        super().__init__(disk, fields, numel, piece)
        self._disk = disk
        self._ordered: dict[int, Future[Future[torch.Tensor]]] = {}
        self._writes: dict[int, Future | None] = {}
        self._fetched: dict[int, torch.Tensor] = {}

    def _wait_for_write(self, start: int) -> None:
        if (write := self._writes.get(start)) is not None:
            write.result()

    def ahead(self) -> None:
        if self._disk.reads_ahead:
            for start in self._records:
                self._order(start)

    def _order(self, start: int) -> None:
        record = self._records[start]
        self._ordered[start] = self._disk.order(record.offset, record.size, self._writes.get(start))

    def fetch(self, start: int, end: int) -> Views:
        if start not in self._ordered:
            self._order(start)
        buffer = self._fetched[start] = self._ordered.pop(start).result().result()
        places = self._records[start].places
        return {
            name: buffer[places[name] : places[name] + (end - start) * dtype.itemsize].view(dtype)
            for name, dtype in self._fields.items()
        }

    def put(self, start: int, changed: bool) -> None:
        record = self._records[start]
        self._writes[start] = self._disk.give_back(self._fetched.pop(start), record.offset, record.size, changed)
