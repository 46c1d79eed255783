"""manifest.json: what a checkpoint holds and where, with a checksum for every byte of it."""

from __future__ import annotations

import json
import math
import stat
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megazero.checkpoint.files import DTYPES
from megazero.errors import CheckpointError
from megazero.sharding import Rectangle
from megazero.small_files import is_name

NAME = "manifest.json"
FORMAT, VERSION = "megazero checkpoint", 2
_CHECKSUM_LINE = '{{"checksum": "{:08x}",\n'


@dataclass(frozen=True)
class Chunk:
    """A box of one global tensor, row-major, at byte ``start`` of ``file``; ``dtype`` as safetensors spells it."""

    file: str
    kind: str
    name: str
    box: Rectangle
    start: int
    checksum: int
    dtype: str = "F32"

    @property
    def key(self) -> str:
        return chunk_key(self.kind, self.name, self.box)

    @property
    def size(self) -> int:
        """Bytes."""
        return DTYPES[self.dtype].itemsize * self.box.numel


@dataclass(frozen=True)
class StateTensor:
    """A tensor of one rank alone, e.g. the state of its random generators; ``dtype`` as safetensors spells it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    checksum: int


@dataclass(frozen=True)
class RankFile:
    """One rank's file: its size in bytes, the CRC-32 of its safetensors header, what is in it."""

    name: str
    size: int
    header_checksum: int
    chunks: tuple[Chunk, ...]
    state: tuple[StateTensor, ...]

    @property
    def header_size(self) -> int:
        """Bytes before the first tensor."""
        return min((tensor.start for tensor in (*self.chunks, *self.state)), default=self.size)


@dataclass(frozen=True)
class Manifest:
    """``parameters``: global name → global shape. ``files``: by rank."""

    step: int
    meta: dict[str, Any]
    parameters: dict[str, tuple[int, ...]]
    files: tuple[RankFile, ...]


def chunk_key(kind: str, name: str, box: Rectangle) -> str:
    """The tensor's name inside its safetensors file."""
    return f"{kind}/{name}@{','.join(map(str, box.offsets))}"


def uncovered(box: Rectangle, by: Iterable[Rectangle]) -> list[Rectangle]:
    """What is left of a box after taking these boxes out of it, as disjoint boxes."""
    left = [box] if box.numel else []
    # In order, so that what is left stays a few boxes: ranks' slices come in any.
    for hole in sorted(by, key=lambda hole: hole.offsets):
        if not left:
            break
        left = [rest for piece in left for rest in _subtract(piece, hole)]
    return left


def _subtract(box: Rectangle, hole: Rectangle) -> list[Rectangle]:
    common = box.intersect(hole)
    if common is None:
        return [box]
    rests, offsets, shape = [], list(box.offsets), list(box.shape)
    for dim, (low, count) in enumerate(zip(common.offsets, common.shape, strict=True)):
        for start, end in ((offsets[dim], low), (low + count, offsets[dim] + shape[dim])):
            if end > start:
                rest_offsets, rest_shape = offsets.copy(), shape.copy()
                rest_offsets[dim], rest_shape[dim] = start, end - start
                rests.append(Rectangle(tuple(rest_offsets), tuple(rest_shape)))
        offsets[dim], shape[dim] = low, count
    return rests


def encode(manifest: Manifest) -> bytes:
    """The file's bytes. The first line holds the CRC-32 of all that follow it, so no byte goes unchecked."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "world_size": len(manifest.files),
        "meta": manifest.meta,
        "parameters": {name: {"shape": shape} for name, shape in sorted(manifest.parameters.items())},
        "files": [
            {
                "name": file.name,
                "size": file.size,
                "header_checksum": file.header_checksum,
                "chunks": [
                    {
                        "key": chunk.key,
                        "kind": chunk.kind,
                        "name": chunk.name,
                        "offsets": chunk.box.offsets,
                        "shape": chunk.box.shape,
                        "start": chunk.start,
                        "checksum": chunk.checksum,
                        "dtype": chunk.dtype,
                    }
                    for chunk in file.chunks
                ],
                "state": [vars(tensor) for tensor in file.state],
            }
            for file in manifest.files
        ],
    }
    rest = json.dumps(body, separators=(",", ":"))[1:].encode() + b"\n"
    return _CHECKSUM_LINE.format(zlib.crc32(rest)).encode() + rest


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory; CheckpointError where it is missing, damaged or of a newer format."""
    path = directory / NAME
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path}: is no file, so {directory} is no checkpoint, or a damaged one")
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{directory}: holds no {NAME}: it is no checkpoint, or a damaged one") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except MemoryError:
        raise CheckpointError(f"{path}: damaged: {path.stat().st_size} bytes do not fit into memory") from None
    line, _, rest = data.partition(b"\n")
    if line + b"\n" != _CHECKSUM_LINE.format(zlib.crc32(rest)).encode():
        raise CheckpointError(f"{path}: damaged ({len(data)} bytes, checksum does not match). {remedy(directory)}")
    try:
        body = json.loads(data)
        if body["format"] != FORMAT or body["version"] > VERSION:
            raise CheckpointError(
                f"{path}: version {body['version']} of the format, this program reads up to {VERSION}: update megazero"
            )
        return _decode(body)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: not as it was written, though its checksum matches: {type(error).__name__}: {error}. "
            f"{remedy(directory)}"
        ) from error


def remedy(directory: Path) -> str:
    """What to do about a damaged file of a checkpoint."""
    return (
        f"Restore the file from a copy, or remove {directory}: a run goes on from the checkpoint before it then, and "
        "begins anew where there is none"
    )


def _decode(body: dict[str, Any]) -> Manifest:
    """Raises ValueError, or what Python does, for what cannot be; so nothing in it leads out of the directory or out of
    a file, nor takes more memory than a file has bytes."""
    parameters = {name: _sizes(entry["shape"]) for name, entry in body["parameters"].items()}
    if not isinstance(body["meta"], dict):
        raise ValueError("meta is no object")
    (step,) = _sizes([body["step"]])
    return Manifest(step, body["meta"], parameters, tuple(_decode_file(file, parameters) for file in body["files"]))


def _decode_file(file: dict[str, Any], parameters: dict[str, tuple[int, ...]]) -> RankFile:
    name, (size,) = file["name"], _sizes([file["size"]])
    if not is_name(name):
        raise ValueError(f"{name} is not the name of a file beside it")

    def place(tensor: dict[str, Any], dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
        start, checksum = _sizes([tensor["start"], tensor["checksum"]])
        if start + DTYPES[dtype].itemsize * math.prod(shape) > size:
            raise ValueError(f"a tensor {list(shape)} from byte {start} on is not inside the {size} bytes of {name}")
        return start, checksum

    chunks = []
    for chunk in file["chunks"]:
        box = Rectangle(_sizes(chunk["offsets"]), _sizes(chunk["shape"]))
        shape, dtype = parameters[chunk["name"]], chunk.get("dtype", "F32")  # version 1 has no other
        if any(o + n > s for o, n, s in zip(box.offsets, box.shape, shape, strict=True)):
            raise ValueError(f"{box} is not inside {chunk['name']}, {list(shape)}")
        chunks.append(Chunk(name, str(chunk["kind"]), chunk["name"], box, *place(chunk, dtype, box.shape), dtype))
    state = []
    for tensor in file["state"]:
        shape = _sizes(tensor["shape"])
        if not isinstance(tensor["key"], str):
            raise ValueError(f"{tensor['key']} is not the name of a tensor")
        state.append(StateTensor(tensor["key"], tensor["dtype"], shape, *place(tensor, tensor["dtype"], shape)))
    return RankFile(name, size, file["header_checksum"], tuple(chunks), tuple(state))


def _sizes(values: list[int]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values} are not sizes")
    return tuple(values)


def within(tree: Any, *keys: str) -> Any:
    """What is under these keys, one inside the other; None where there is nothing."""
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
