"""Loading: any box of any global tensor, from whichever files hold parts of it."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megazero.checkpoint import files, locate, manifest
from megazero.errors import CheckpointError
from megazero.sharding import Rectangle

_MAX_OPEN_FILES = 32

Shapes = Mapping[str, Sequence[int]]


def differences(found: Shapes, wanted: Shapes) -> list[str]:
    """In which ways what a checkpoint holds (name → shape) is not what is wanted, as ends of a sentence on it."""
    problems = [
        ("lacks", [name for name in wanted if name not in found]),
        ("has in excess", [name for name in found if name not in wanted]),
        (
            "has in another shape",
            [
                f"{name} {list(found[name])}, not {list(shape)}"
                for name, shape in wanted.items()
                if name in found and tuple(found[name]) != tuple(shape)
            ],
        ),
    ]
    return [
        f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for what, names in problems
        if names
    ]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint, or the newest whole one under a directory; CheckpointError where there is none."""
    return Checkpoint(locate.newest(path))


class Checkpoint:
    """A whole checkpoint on disk.

    ``step``; ``meta``: what was saved with it; ``parameters``: global name → global shape; ``world_size``: how
    many ranks saved it. Nothing is read before it is asked for, every byte read is checked against its
    checksum, and at most one chunk beyond the result is held in memory. ``contents``: its manifest. For a second
    thread make ``Checkpoint(path, contents)``: never half of this save and half of one that has replaced it.
    """

    def __init__(self, directory: Path, contents: manifest.Manifest | None = None, past_cache: bool = False) -> None:
        """``past_cache``: what the kernel has of its files in memory is forgotten, before they are read and after."""
        self.path, self._past_cache = directory, past_cache
        self.contents = contents = contents or locate.read_whole(directory)
        self.step: int = contents.step
        self.meta: dict[str, Any] = contents.meta
        self.parameters: dict[str, tuple[int, ...]] = contents.parameters
        self._files = {file.name: file for file in contents.files}
        self._ranks = contents.files
        self._chunks: dict[tuple[str, str], list[manifest.Chunk]] = {}
        for file in contents.files:
            for chunk in file.chunks:
                self._chunks.setdefault((chunk.kind, chunk.name), []).append(chunk)
        self._open: dict[str, int] = {}
        self._checked: set[tuple[str, int, int]] = set()
        self._last: tuple[manifest.Chunk, torch.Tensor] | None = None

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    @property
    def kinds(self) -> set[str]:
        """What there is of some parameter or other: weight, and what the optimizer keeps."""
        return {kind for kind, _ in self._chunks}

    def has(self, kind: str, name: str) -> bool:
        """Whether there is a tensor of this kind for the parameter; weights-only checkpoints have no moments."""
        return (kind, name) in self._chunks or (kind == "weight" and name in self.parameters)

    def dtype_of(self, kind: str, name: str) -> torch.dtype:
        """What a tensor is stored in; float32 where its chunks are not all of one dtype."""
        dtypes = {chunk.dtype for chunk in self._chunks.get((kind, name), ())}
        return files.DTYPES[dtypes.pop()] if len(dtypes) == 1 else torch.float32

    def read(
        self, kind: str, name: str, box: Rectangle | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """A box of a global tensor (the whole of it if none is given), on the CPU, of the box's shape."""
        if box is None:
            shape = self._shape(name)
            box = Rectangle((0,) * len(shape), shape)
        sources = self._sources(kind, name, box)
        if len(sources) == 1 and sources[0][0].box == box:
            whole = self._read_chunk(sources[0][0])
            self._last = None  # it is the caller's now
            return whole.to(dtype)
        result = torch.empty(box.shape, dtype=dtype)
        for chunk, part in sources:
            result[part.within(box)] = self._read_chunk(chunk)[part.within(chunk.box)]
        return result

    def state_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The shapes of what ``rank_state`` reads."""
        return {tensor.key: tensor.shape for tensor in self._ranks[rank].state}

    def rank_state(self, rank: int) -> dict[str, torch.Tensor]:
        """What that rank, of ``world_size``, saved for itself alone."""
        file = self._ranks[rank]
        result = {}
        for tensor in file.state:
            dtype = files.DTYPES[tensor.dtype]
            empty = torch.empty(tensor.shape, dtype=dtype)
            size = empty.numel() * dtype.itemsize
            data = self._read_bytes(file.name, tensor.start, size, tensor.checksum, f"state {tensor.key}")
            result[tensor.key] = data.view(dtype).reshape(tensor.shape) if size else empty
        return result

    def verify(self, boxes: Iterable[tuple[str, str, Rectangle]] | None = None) -> None:
        """Checks every byte that reading these (kind, name, box) needs, or every byte there is.

        Raises CheckpointError naming file and tensor. Called before any state is touched, it makes loading
        all or nothing. Chunks found good are not checked again when they are read.
        """
        if boxes is not None:
            for kind, name, box in boxes:
                for chunk, _ in self._sources(kind, name, box):
                    self._check(chunk)
            return
        for _ in self.verified_pieces():
            pass

    def verified_pieces(self, ranks: Iterable[int] | None = None) -> Iterator[None]:
        """Checks every byte there is, or of these ranks' files, piece by piece; raises as ``verify`` does."""
        for rank in range(self.world_size) if ranks is None else ranks:
            file = self._ranks[rank]
            self._descriptor(file.name)
            for chunk in file.chunks:
                self._check(chunk)
                self._last = None
                yield
            self.rank_state(rank)
            self._forget(file.name)
            yield

    def check_matches(self, parameters: Shapes) -> None:
        """CheckpointError unless the checkpoint's parameters are exactly these (global name → global shape)."""
        told = differences(self.parameters, parameters)
        if told:
            raise CheckpointError(
                f"{self.path}: is of another model: it {'; it '.join(told)}. Give the model settings that it was "
                f"saved with, or another checkpoint.dir"
            )

    def close(self) -> None:
        """Closes the files; reading opens them again."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()
        self._last = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # __init__ may have raised before there was anything to close.
        if hasattr(self, "_open"):
            self.close()

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.parameters:
            raise CheckpointError(f"{self.path}: holds no parameter {name}: it is of another model")
        return self.parameters[name]

    def _sources(self, kind: str, name: str, box: Rectangle) -> list[tuple[manifest.Chunk, Rectangle]]:
        """Disjoint parts that make up a box, each with a chunk that holds it."""
        shape = self._shape(name)
        outside = len(shape) != len(box.shape) or any(
            o + n > s for o, n, s in zip(box.offsets, box.shape, shape, strict=True)
        )
        if outside:
            raise CheckpointError(
                f"{self.path}: is of another model: its {name} has shape {list(shape)}, which does not hold {box}"
            )
        left, sources = [box] if box.numel else [], []
        for chunk in self._chunks.get((kind, name), ()):
            rest = []
            for piece in left:
                common = piece.intersect(chunk.box)
                if common is None:
                    rest.append(piece)
                    continue
                sources.append((chunk, common))
                rest.extend(manifest.uncovered(piece, [common]))
            left = rest
            if not left:
                break
        if left:
            have = (
                "it holds weights only; to start from it, give it as model.init_from"
                if not self.has(kind, name)
                else f"{left[0]} is missing"
            )
            raise CheckpointError(f"{self.path}: no {kind} of {name}: {have}")
        return sources

    def _read_chunk(self, chunk: manifest.Chunk) -> torch.Tensor:
        if self._last is None or self._last[0] is not chunk:
            what = f"{chunk.kind} of {chunk.name}"
            data = self._read_bytes(chunk.file, chunk.start, chunk.size, chunk.checksum, what)
            self._last = chunk, data.view(files.DTYPES[chunk.dtype]).reshape(chunk.box.shape)
        return self._last[1]

    def _check(self, chunk: manifest.Chunk) -> None:
        if (chunk.file, chunk.start, chunk.size) not in self._checked:
            self._read_chunk(chunk)

    def _read_bytes(self, file: str, start: int, size: int, checksum: int, what: str) -> torch.Tensor:
        """Bytes of a file (uint8), checked the first time."""
        data = torch.empty(size, dtype=torch.uint8)  # a bytearray would be filled with zeros first
        descriptor, view = self._descriptor(file), memoryview(data.numpy())
        try:
            while view:
                count = os.preadv(descriptor, [view], start + size - len(view))
                if count == 0:
                    raise CheckpointError(self._damage(file, f"ends inside {what}"))
                view = view[count:]
        except OSError as error:
            raise CheckpointError(self._damage(file, f"{what} cannot be read: {error.strerror}")) from error
        if (file, start, size) not in self._checked:
            if zlib.crc32(data.numpy()) != checksum:
                raise CheckpointError(self._damage(file, f"the checksum of {what} does not match"))
            self._checked.add((file, start, size))
        return data

    def _descriptor(self, name: str) -> int:
        """An open descriptor, the file's safetensors header checked."""
        if name not in self._open:
            if len(self._open) >= _MAX_OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            file = self._files[name]
            try:
                self._open[name] = os.open(self.path / name, os.O_RDONLY)
                self._forget(name)
                header = os.pread(self._open[name], file.header_size, 0)
            except OSError as error:
                if isinstance(error, PermissionError):
                    raise CheckpointError(f"{self.path / name}: cannot be read: {error.strerror}") from error
                raise CheckpointError(self._damage(name, f"cannot be read: {error.strerror}")) from error
            if zlib.crc32(header) != file.header_checksum:
                os.close(self._open.pop(name))
                raise CheckpointError(self._damage(name, "the checksum of its safetensors header does not match"))
        return self._open[name]

    def _forget(self, name: str) -> None:
        if self._past_cache:
            os.posix_fadvise(self._open[name], 0, 0, os.POSIX_FADV_DONTNEED)

    def _damage(self, file: str, what: str) -> str:
        if locate.is_gone(self.path):
            return f"{self.path}: was removed while it was read, as a run with checkpoint.keep does; take a newer one"
        return f"{self.path / file}: damaged: {what}. {manifest.remedy(self.path)}"
