"""Saving: every rank writes its own file, rank 0 commits them all with one rename.

Until that rename nothing under the root looks like a checkpoint, and a former one is removed only after it:
at any instant there is a whole one to be found. (Note [commit]: the order is data, fsync of the files and of
their directory, manifest, fsync, rename, fsync of the root; each is needed before the next may be durable.)
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megazero.checkpoint import files, locate, manifest
from megazero.checkpoint.group import Group, OneProcess, raise_together
from megazero.errors import CheckpointError, reason_of
from megazero.sharding import Rectangle

# Larger chunks are cut along their first dimension, so that who reads a slice checks and holds no more than this.
MAX_CHUNK_BYTES = 64 * 2**20


class ChunkData(NamedTuple):
    """A box of a global tensor. ``kind``: weight, exp_avg or exp_avg_sq.

    ``tensor``: of ``dtype`` and the box's shape, on any device; or a function that makes it when its turn comes.
    ``dtype``: what a run trains is float32; of an import it is what the source had.
    """

    kind: str
    name: str
    box: Rectangle
    global_shape: tuple[int, ...]
    tensor: torch.Tensor | Callable[[], torch.Tensor]
    dtype: torch.dtype = torch.float32

    @property
    def key(self) -> str:
        """Its name in the file."""
        return manifest.chunk_key(self.kind, self.name, self.box)

    @property
    def size(self) -> int:
        """Bytes."""
        return self.dtype.itemsize * self.box.numel


AnyChunk = ChunkData | tuple[str, str, Rectangle, Sequence[int], torch.Tensor]


class CheckpointWriter:
    """Saves one run's checkpoints under ``root``; made and called by every rank of ``group`` together.

    ``keep``: how many of the newest to keep, 0 for all; ``verifies``: whether ``is_good`` is called for those that
    were read back, by any thread of rank 0. ``start_step``: the step this run starts from, that of
    the checkpoint it resumed, or 0. Creating one leaves nothing on the disk. Raises CheckpointError where nothing can
    be written at the root, or it holds whole checkpoints of later steps: they are of another run, and a later resume
    would pick them.
    """

    setting = "checkpoint.dir"
    """What the user calls ``root``."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        group: Group | None = None,
        keep: int = 0,
        start_step: int = 0,
        verifies: bool = False,
    ) -> None:
        assert keep >= 0
        self.root, self.group, self.keep = Path(root), group or OneProcess(), keep
        self._verifies, self._one_at_a_time = verifies, threading.Lock()
        self._known: set[int] = set()
        with self._together(first_only=True) as active:
            if active:
                if self.root.exists() and not self.root.is_dir():
                    raise CheckpointError(f"{self.root}: is a file; {self.setting} must be a directory")
                self._look_around(start_step)
                self._try_to_write()

    def _look_around(self, start_step: int) -> None:
        found = locate.step_directories(self.root) if self.root.exists() else []
        self._known.update(step for step, _ in found)
        for step, directory in reversed(found):
            if step > start_step and locate.is_whole(directory):
                raise CheckpointError(
                    f"{self.root}: holds step {step} of another run; this one starts from step {start_step}. "
                    f"Resume that run (checkpoint.resume auto), or choose another checkpoint.dir, or remove {directory}"
                )

    def _try_to_write(self) -> None:
        """Raise now the OSError that the first save would meet, hours later. Nothing is left behind."""
        there = next(path for path in (self.root, *self.root.absolute().parents) if path.exists())
        try:
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(there)) from error

    def save(
        self,
        step: int,
        chunks: Iterable[AnyChunk],
        rank_state: Mapping[str, torch.Tensor] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Path:
        """Writes a checkpoint and returns its directory; a former one of the same step is replaced.

        ``chunks``: this rank's; together the ranks' chunks must cover every tensor, overlaps are allowed.
        ``rank_state``: tensors of any dtype that only this rank gets back. ``meta``: JSON; rank 0's is kept.
        Raises CheckpointError with the same message on every rank, the checkpoints before it untouched.
        """
        return self._save(locate.step_directory(self.root, step), step, chunks, rank_state or {}, meta or {})

    def _save(
        self,
        target: Path,
        step: int,
        chunks: Iterable[AnyChunk],
        rank_state: Mapping[str, torch.Tensor],
        meta: Mapping[str, Any],
    ) -> Path:
        group, saving = self.group, self.root / f".{target.name}{locate.SAVING}"
        with contextlib.ExitStack() as stack:
            with self._together(first_only=True) as active:
                if active:
                    stack.enter_context(self._claim(saving))
            try:
                rank_file: manifest.RankFile | None = None
                shapes: dict[str, tuple[int, ...]] = {}
                with self._together():
                    rank_file, shapes = _write_rank(saving, group.rank, chunks, rank_state)
                gathered = group.gather((rank_file, shapes))
                with self._together(first_only=True) as active:
                    if active:
                        assert gathered is not None
                        contents = _assemble(step, dict(meta), gathered)
                        self._commit(saving, target, contents)
            except CheckpointError:
                if group.rank == 0:
                    with contextlib.suppress(OSError):
                        files.remove_tree(saving)
                raise
            with self._together(first_only=True) as active:
                if active:
                    self._committed(target, step)
        return target

    def _committed(self, target: Path, step: int) -> None:
        """Rank 0: what follows once the checkpoint is whole."""
        self._known.add(step)
        if not self._verifies:
            self._retain()

    @contextlib.contextmanager
    def _together(self, first_only: bool = False) -> Iterator[bool]:
        """A phase that may fail on a rank and then fails on all. Yields whether this rank has work in it."""
        failure: Exception | None = None
        try:
            yield not first_only or self.group.rank == 0
        except OSError as error:
            failure = CheckpointError(_explain(error, self.root, self.setting))
        except Exception as error:
            failure = error
        raise_together(self.group, failure)

    @contextlib.contextmanager
    def _claim(self, saving: Path) -> Iterator[None]:
        """Rank 0: makes the root this save's alone, clears what cut-off saves have left, opens the directory."""
        files.make_directory(self.root)
        shared = f"{self.root}: another run is saving here as well. Give each run its own {self.setting}"
        with contextlib.ExitStack() as stack:
            try:
                locked = stack.enter_context(files.exclusive(self.root / ".lock"))
            except BlockingIOError:
                raise CheckpointError(shared) from None
            if found := self._of_others():
                raise CheckpointError(f"{shared} ({found} has appeared since this run started)")
            if locked:
                # Whoever made them held the lock; it is ours, so they are dead.
                with self._one_at_a_time:
                    self._clear_leftovers()
            elif saving.exists():
                _discard(saving)
            os.mkdir(saving)
            yield

    def _of_others(self) -> str | None:
        """A checkpoint that another run has put here meanwhile."""
        foreign = {step for step, _ in locate.step_directories(self.root)} - self._known
        return f"step {max(foreign)}" if foreign else None

    def _clear_leftovers(self) -> None:
        for path in locate.leftovers(self.root):
            _discard(path)
        for path in locate.replaced(self.root):
            successor = path.with_name(path.name.removesuffix(locate.REPLACED))
            if successor.exists():
                self._remove(path)
            else:
                os.rename(path, successor)

    def _commit(self, saving: Path, target: Path, contents: manifest.Manifest) -> None:
        """See Note [commit]."""
        for file in contents.files:
            if not (saving / file.name).exists():
                raise CheckpointError(f"{saving / file.name}: not seen by rank 0: {self.setting} must be shared by all")
        files.write_file(saving / manifest.NAME, manifest.encode(contents))
        files.sync_directory(saving)
        replaced = target.with_name(target.name + locate.REPLACED)
        with self._one_at_a_time:
            if target.exists():
                os.rename(target, replaced)
            os.rename(saving, target)
            files.sync_directory(self.root)
            if replaced.exists():
                self._remove(replaced)

    def is_good(self, path: Path) -> None:
        """Rank 0: a checkpoint was verified. Marks it, and deletes what need not stay any longer. Raises OSError."""
        with self._one_at_a_time:
            if not (path / locate.VERIFIED).exists():
                files.write_file(path / locate.VERIFIED, b"")
            self._retain()

    def _retain(self) -> None:
        """Rank 0: deletes all but the newest ``keep`` whole checkpoints. Where they are verified those newer than the
        last good one are not counted, so that it stays as long as nothing newer is known to be good."""
        if not self.keep:
            return
        there = [path for _, path in locate.step_directories(self.root) if locate.is_whole(path)]
        if self._verifies:
            while there and not (there[-1] / locate.VERIFIED).exists():
                there.pop()
        for path in there[: -self.keep]:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        # Renamed first, so that one half deleted is never taken for a checkpoint.
        removing = self.root / f".{path.name.removesuffix(locate.REPLACED)}{locate.REMOVING}"
        _discard(removing)
        with _warned(path):
            os.rename(path, removing)
            files.remove_tree(removing)


@contextlib.contextmanager
def _warned(path: Path) -> Iterator[None]:
    """What could not be deleted costs disk space only (NFS, say, keeps files that a reader has open)."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"{path}: could not be removed: {error}; the next save tries again", stacklevel=2)


def _discard(path: Path) -> None:
    with _warned(path):
        files.remove_tree(path)


def _explain(error: OSError, root: Path, setting: str) -> str:
    absent = f"no such directory: {setting} must be on a disk that all ranks share"
    reason = absent if error.errno == errno.ENOENT else reason_of(error, setting)
    return f"{error.filename or root}: the checkpoint could not be saved: {reason}"


def _write_rank(
    saving: Path, rank: int, chunks: Iterable[Any], rank_state: Mapping[str, torch.Tensor]
) -> tuple[manifest.RankFile, dict[str, tuple[int, ...]]]:
    """Writes this rank's file; returns its entry in the manifest and the global shapes it knows of."""
    parts: list[ChunkData] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for chunk in chunks:
        part = ChunkData(*chunk)
        part = part._replace(global_shape=tuple(part.global_shape))
        assert shapes.setdefault(part.name, part.global_shape) == part.global_shape, part.name
        parts.extend(piece for piece in split(part) if piece.box.numel)
    state = sorted(rank_state.items(), key=lambda item: (-item[1].element_size(), item[0]))
    chunk_entries = [files.Entry(p.key, p.dtype, p.box.shape, p.tensor) for p in parts]
    state_entries = [files.Entry(f"state/{key}", t.dtype, tuple(t.shape), t) for key, t in state]
    # Every tensor aligned: by falling element size.
    entries = sorted([*chunk_entries, *state_entries], key=lambda entry: -entry.dtype.itemsize)
    name = f"rank_{rank:05d}.safetensors"
    written = files.write_safetensors(saving / name, entries)
    files.sync_directory(saving)
    places = {entry.key: place for entry, place in zip(entries, written.tensors, strict=True)}
    file = manifest.RankFile(
        name,
        written.size,
        written.header_checksum,
        tuple(
            manifest.Chunk(name, p.kind, p.name, p.box, place.start, place.checksum, files.DTYPE_NAMES[p.dtype])
            for p in parts
            for place in [places[p.key]]
        ),
        tuple(
            manifest.StateTensor(key, files.DTYPE_NAMES[t.dtype], tuple(t.shape), place.start, place.checksum)
            for key, t in state
            for place in [places[f"state/{key}"]]
        ),
    )
    return file, shapes


def row_runs(box: Rectangle) -> Iterator[Rectangle]:
    """The box in runs of rows of at most MAX_CHUNK_BYTES, at least one row each; nothing of an empty one."""
    if box.numel == 0:
        return
    if 4 * box.numel <= MAX_CHUNK_BYTES or not box.shape:
        yield box
        return
    rows = max(1, MAX_CHUNK_BYTES // (4 * (box.numel // box.shape[0])))
    for first in range(0, box.shape[0], rows):
        count = min(rows, box.shape[0] - first)
        yield Rectangle((box.offsets[0] + first, *box.offsets[1:]), (count, *box.shape[1:]))


def split(chunk: ChunkData) -> Iterator[ChunkData]:
    """The chunk in runs of rows; one without elements, which only tells a shape, as it is."""
    if chunk.box.numel == 0:
        yield chunk
    for box in row_runs(chunk.box):
        tensor = chunk.tensor
        if box != chunk.box:
            assert isinstance(tensor, torch.Tensor), f"{chunk.name}: a chunk made late must be one of row_runs"
            first = box.offsets[0] - chunk.box.offsets[0]
            tensor = tensor[first : first + box.shape[0]]
        yield chunk._replace(box=box, tensor=tensor)


def _assemble(
    step: int, meta: dict[str, Any], gathered: Sequence[tuple[manifest.RankFile, dict[str, tuple[int, ...]]]]
) -> manifest.Manifest:
    """All ranks' entries together, checked: every tensor is covered, every parameter has its weight."""
    parameters: dict[str, tuple[int, ...]] = {}
    boxes: dict[tuple[str, str], list[Rectangle]] = {}
    for rank_file, shapes in gathered:
        for name, shape in shapes.items():
            assert parameters.setdefault(name, shape) == shape, f"{name}: {shape} and {parameters[name]}"
        for chunk in rank_file.chunks:
            boxes.setdefault((chunk.kind, chunk.name), []).append(chunk.box)
    for name in parameters:
        boxes.setdefault(("weight", name), [])
    for (kind, name), held in boxes.items():
        shape = parameters[name]
        missing = manifest.uncovered(Rectangle((0,) * len(shape), shape), held)
        assert not missing, f"{kind} of {name}: nobody saves {missing[0]}"
    return manifest.Manifest(step, meta, parameters, tuple(file for file, _ in gathered))


def save(
    root: str | os.PathLike[str],
    step: int,
    chunks: Iterable[AnyChunk],
    rank_state: Mapping[str, torch.Tensor] | None = None,
    meta: Mapping[str, Any] | None = None,
    group: Group | None = None,
) -> Path:
    """One checkpoint by itself, outside a run: see ``CheckpointWriter.save``."""
    return _SingleWriter(root, group, start_step=step).save(step, chunks, rank_state, meta)


class _SingleWriter(CheckpointWriter):
    setting = "directory"
