"""File operations that survive a power cut, and safetensors files written as a stream.

Everything that changes the disk goes through plain ``os`` calls, one after another, so that a save can be
cut off between any two of them in a test.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def sync_directory(path: Path) -> None:
    """Makes the entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Creates a directory and its missing parents, durably."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory)
        sync_directory(directory.parent)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def write_file(path: Path, data: bytes) -> None:
    """A new file with these bytes, fsynced."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_all(descriptor, memoryview(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """A file with these bytes in place of what was there, durably; at any instant it is the former or the new one."""
    new = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    write_file(new, data)
    os.rename(new, path)
    sync_directory(path.parent)


def remove_tree(path: Path) -> None:
    """Removes a directory that another process may be removing as well."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


_turns: dict[str, threading.Lock] = {}
"""By path: the kernel's locks are a process's, whose threads take turns by these."""


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[bool]:
    """Holds a lock on a file while inside; the kernel drops it with the process, however that ends. Waits for other
    threads of this process.

    Yields False where the file system has no locks. Raises BlockingIOError where another process holds it.
    """
    with _turns.setdefault(os.path.realpath(path), threading.Lock()):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                # A record lock, not flock: forked children do not inherit it, and NFS and Lustre have it.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                raise BlockingIOError(f"{path} is locked by another process") from error
            except OSError:
                yield False
            else:
                yield True
        finally:
            os.close(descriptor)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, row-major, little-endian as on every machine torch runs on."""
    whole = tensor.detach().cpu().contiguous()
    # Not reshape: a dimension of one element keeps whatever stride it had, with which there is no view as bytes.
    return memoryview(whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy())


@dataclass(frozen=True)
class Entry:
    """A tensor to write; ``value`` may be a function, called when its turn comes."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    value: torch.Tensor | Callable[[], torch.Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def tensor(self) -> torch.Tensor:
        value = self.value if isinstance(self.value, torch.Tensor) else self.value()
        assert value.dtype == self.dtype and tuple(value.shape) == self.shape, self.key
        return value


@dataclass(frozen=True)
class Written:
    """Where a tensor went: its first byte in the file, and the CRC-32 of its bytes."""

    start: int
    checksum: int


@dataclass(frozen=True)
class WrittenFile:
    """``size`` in bytes, CRC-32 of everything before the first tensor, and one entry per tensor, in order."""

    size: int
    header_checksum: int
    tensors: list[Written]


def write_safetensors(path: Path, entries: Sequence[Entry]) -> WrittenFile:
    """Writes a new safetensors file, fsynced; tensors may be on any device and are copied out one at a time.

    Callers order them by falling element size, so that each is aligned for readers that map the file.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        assert entry.key not in header, f"{entry.key} twice in {path.name}"
        end = position + entry.size
        header[entry.key] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    prefix = len(encoded).to_bytes(8, "little") + encoded

    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_all(descriptor, memoryview(prefix))
        written, start = [], len(prefix)
        for entry in entries:
            data = tensor_bytes(entry.tensor())
            _write_all(descriptor, data)
            written.append(Written(start, zlib.crc32(data)))
            start += len(data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return WrittenFile(start, zlib.crc32(prefix), written)
