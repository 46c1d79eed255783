"""The tensors in a Hugging Face directory's files, read slice by slice: safetensors or pytorch_model.bin, in shards."""

from __future__ import annotations

import json
import math
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from types import EllipsisType
from typing import Any

import safetensors
import torch

from megazero.checkpoint.files import DTYPES
from megazero.errors import ConvertError
from megazero.small_files import is_name, read_small

Index = tuple[slice, ...] | EllipsisType
"""One slice per dim, without steps; ``...`` is the whole tensor."""

_GAP = 512
"""Bytes between two rows of a slice from which on skipping them is quicker than reading them, from memory."""


class Stored:
    """One tensor in a file. ``dtype``: torch's, or as the file spells it where torch has none.

    ``read``: the values of an index in that dtype, memory of the caller's own; it may be called from several threads,
    and raises ConvertError where the file has been cut short since.
    """

    def __init__(
        self, file: Path, shape: tuple[int, ...], dtype: torch.dtype | str, read: Callable[[Index], torch.Tensor]
    ) -> None:
        self.file, self.shape, self.dtype, self.read = file, shape, dtype, read


def open_files(directory: Path) -> dict[str, Stored]:
    """Name in the files → tensor. Only headers are read. Raises ConvertError, naming the file, for what is wrong."""
    for name, opener in (("model.safetensors", _open_safetensors), ("pytorch_model.bin", _open_bin)):
        single, index = directory / name, directory / f"{name}.index.json"
        if os.path.lexists(single):
            return opener(single)
        if index.exists():
            return _open_shards(index, opener)
    there = sorted(path.name for path in directory.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".pth"))
    raise ConvertError(
        f"{directory}: holds neither model.safetensors nor pytorch_model.bin, whole or in shards with their index"
        + (f"; it holds {', '.join(there[:3])}" if there else "")
    )


def read_json(path: Path, missing: str) -> dict[str, Any]:
    """The object in a JSON file; ConvertError, with the message ``missing`` where there is no file."""
    try:
        value = json.loads(read_small(path))
    except FileNotFoundError:
        raise ConvertError(missing) from None
    except RecursionError:
        raise ConvertError(f"{path}: cannot be read: nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ConvertError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConvertError(f"{path}: not a JSON object")
    return value


def _open_shards(index: Path, opener: Callable[[Path], dict[str, Stored]]) -> dict[str, Stored]:
    weight_map = read_json(index, f"{index}: missing").get("weight_map")
    plain = isinstance(weight_map, dict) and all(map(is_name, weight_map.values()))
    if not plain or not weight_map:
        raise ConvertError(f"{index}: its weight_map must give the name of a file beside it for each tensor")
    files = sorted(set(weight_map.values()))
    lost = [file for file in files if not (index.parent / file).exists()]
    if lost:
        raise ConvertError(f"{index}: names {', '.join(lost[:4])}, missing in {index.parent}")
    found: dict[str, Stored] = {}
    for file in files:
        for key, stored in opener(index.parent / file).items():
            if key in found:
                raise ConvertError(f"{stored.file}: {key} is in {found[key].file.name} as well; one of them is wrong")
            found[key] = stored
    for key, file in weight_map.items():
        if key not in found:
            raise ConvertError(f"{index.parent / file}: has no tensor {key}, which {index.name} says it has")
    return found


class _File:
    """An open file; read by position, so that threads may share it."""

    def __init__(self, path: Path) -> None:
        self.path, self._descriptor, self._lock = path, -1, threading.Lock()

    def read(self, start: int, into: torch.Tensor, what: str) -> None:
        """Fills a contiguous tensor with the bytes from ``start`` on."""
        view = memoryview(into.reshape(-1).view(torch.uint8).numpy())
        try:
            with self._lock:
                if self._descriptor < 0:
                    self._descriptor = os.open(self.path, os.O_RDONLY)
            while view:
                count = os.preadv(self._descriptor, [view], start)
                if count == 0:
                    raise ConvertError(f"{self.path}: ends inside {what}: cut short while it was read")
                start, view = start + count, view[count:]
        except OSError as error:
            raise ConvertError(f"{self.path}: {what} cannot be read: {error.strerror}") from error

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def _open_safetensors(path: Path) -> dict[str, Stored]:
    _check_is_file(path)
    try:
        # The library checks that the header and the file's size fit each other; it reads by memory map, whose pages
        # would count as this process's memory, so the tensors are read here.
        with safetensors.safe_open(path, framework="pt"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (OSError, ValueError, RecursionError, MemoryError, safetensors.SafetensorError) as error:
        raise ConvertError(f"{path}: {_unreadable(path)} ({error})") from error
    header.pop("__metadata__", None)
    file = _File(path)
    found = {}
    for name, entry in header.items():
        start = 8 + size + entry["data_offsets"][0]
        shape, dtype = tuple(entry["shape"]), DTYPES.get(entry["dtype"])
        found[name] = Stored(
            path, shape, entry["dtype"] if dtype is None else dtype, _reader(file, name, start, shape, dtype)
        )
    return found


def _reader(
    file: _File, name: str, start: int, shape: tuple[int, ...], dtype: torch.dtype | None
) -> Callable[[Index], torch.Tensor]:
    def read(index: Index) -> torch.Tensor:
        if dtype is None:
            raise ConvertError(f"{file.path}: {name} is of a dtype that is not supported")
        if isinstance(index, EllipsisType) or not shape:
            result = torch.empty(shape, dtype=dtype)
            file.read(start, result, name)
            return result
        low, high, _ = index[0].indices(shape[0])
        row = math.prod(shape[1:])
        offset = start + low * row * dtype.itemsize
        inner = [part.indices(size) for part, size in zip(index[1:], shape[1:], strict=True)]
        width = math.prod(max(0, last - first) for first, last, _ in inner)
        if len(shape) == 2 and (row - width) * dtype.itemsize >= _GAP:
            result = torch.empty(high - low, width, dtype=dtype)
            for number, part in enumerate(result.unbind() if width else ()):
                file.read(offset + (number * row + inner[0][0]) * dtype.itemsize, part, name)
            return result
        rows = torch.empty(high - low, *shape[1:], dtype=dtype)
        file.read(offset, rows, name)
        return rows if width == row else rows[(slice(None), *index[1:])].clone()

    return read


def _open_bin(path: Path) -> dict[str, Stored]:
    _check_is_file(path)
    zipped = _starts_with(path, b"PK")
    if not zipped and not _starts_with(path, b"\x80"):  # of a tar archive torch would make a directory somewhere
        raise ConvertError(f"{path}: {_unreadable(path)}")
    try:
        # Mapped, so that only what is asked for is read; old files are no zip archive and cannot be.
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, pickle.UnpicklingError):  # torch's first line of it tells how to let the file run code
            reason = "or it holds more than tensors"
        raise ConvertError(f"{path}: {_unreadable(path)} ({reason})") from error
    if not isinstance(tensors, dict):
        raise ConvertError(f"{path}: holds a {type(tensors).__name__}, not a dict of tensors")
    found = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            if tensor.layout != torch.strided or tensor.device.type != "cpu":
                kind = "without values" if tensor.device.type != "cpu" else "sparse"
                raise ConvertError(f"{path}: {key} is a tensor {kind}, which is not supported; save it dense")
            found[str(key)] = Stored(path, tuple(tensor.shape), tensor.dtype, _copying(tensor.detach()))
    return found


def _copying(tensor: torch.Tensor) -> Callable[[Index], torch.Tensor]:
    return lambda index: tensor[index].clone()


def _check_is_file(path: Path) -> None:
    """Of a pipe, reading would never end."""
    if not path.is_file():
        raise ConvertError(f"{path}: {_unreadable(path)}")


def _unreadable(path: Path) -> str:
    if not path.is_file():
        if path.exists():
            return f"a {'directory' if path.is_dir() else 'pipe or device'}, not a file"
        return f"a link to {path.readlink()}, which is missing: copy it too"
    if _starts_with(path, b"version https://git-lfs"):
        return "a Git LFS pointer, not the weights: fetch them with git lfs pull"
    return "damaged or cut short"


def _starts_with(path: Path, prefix: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(prefix)) == prefix
    except OSError as error:
        raise ConvertError(f"{path}: cannot be read: {error.strerror}") from error
