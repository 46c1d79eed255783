"""ShardSpec: which slices of which global tensors a local parameter holds, and who else holds them.

The one source of truth for a parameter's sharding. Initialisation, the sum of partial gradients, the
gradient norm, checkpoints, conversion and the memory planner are all derived from it. Pure Python: no
torch, no process group, so any rank can be described from anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Gradient = Literal["equal", "partial"]


@dataclass(frozen=True)
class Replication:
    """The ranks of one axis that hold the same slice.

    ``members``: their coordinates along ``axis``, ascending. ``gradient``: ``equal`` where each member's
    local gradient is already the whole one, ``partial`` where the whole one is the sum over members.
    """

    axis: Literal["tp", "pp"]
    members: tuple[int, ...]
    gradient: Gradient


@dataclass(frozen=True)
class Rectangle:
    """A box of a global tensor: ``offsets`` and ``shape`` have one entry per dim."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Rectangle) -> Rectangle | None:
        """The common box, or None where it is empty."""
        low = tuple(map(max, self.offsets, other.offsets))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.shape, other.offsets, other.shape))
        if any(h <= lo for lo, h in zip(low, high)):
            return None
        return Rectangle(low, tuple(h - lo for lo, h in zip(low, high)))

    def within(self, outer: Rectangle) -> tuple[slice, ...]:
        """Index of this box in a tensor that holds exactly ``outer``."""
        return tuple(slice(o - base, o - base + n) for o, base, n in zip(self.offsets, outer.offsets, self.shape))


@dataclass(frozen=True)
class Piece:
    """One global tensor's box inside a local parameter: rows [row, row + box.shape[0]) of it.

    ``name`` and ``global_shape`` are the global tensor's; vocabulary padding belongs to no piece.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Rectangle
    row: int = 0
    replication: tuple[Replication, ...] = ()


@dataclass(frozen=True)
class ShardSpec:
    """What one local parameter of ``local_shape`` is made of: pieces stacked along dim 0, rows beyond them padding."""

    local_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def row_numel(self) -> int:
        """Elements per row of dim 0."""
        return math.prod(self.local_shape[1:])

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    def spans(self) -> Iterator[tuple[int, int, Piece]]:
        """(start, end, piece): each piece's contiguous range of the flattened local parameter."""
        for piece in self.pieces:
            start = piece.row * self.row_numel
            yield start, start + piece.box.numel, piece

    def replicated_over(self, replication: Replication) -> ShardSpec:
        """The same parameter, every piece of it also replicated as given."""
        pieces = tuple(Piece(p.name, p.global_shape, p.box, p.row, (*p.replication, replication)) for p in self.pieces)
        return ShardSpec(self.local_shape, pieces)


def whole(name: str, shape: tuple[int, ...]) -> ShardSpec:
    """The spec of a parameter that is one global tensor, unsliced."""
    return ShardSpec(shape, (Piece(name, shape, Rectangle((0,) * len(shape), shape)),))


def is_counted(piece: Piece, coordinates: Mapping[str, int]) -> bool:
    """Whether this rank's copy is the one that counts in norms: the first member along every replicating axis."""
    return all(coordinates[r.axis] == r.members[0] for r in piece.replication)


def flat_range_boxes(piece: Piece, start: int, end: int) -> list[tuple[int, Rectangle]]:
    """Boxes of the global tensor that cover elements [start, end) of the piece's flattened local box.

    Returns (first element in the flattened piece, box) pairs, ascending; each box is contiguous in the
    piece. A range of a matrix is at most three: the rest of a row, whole rows, the start of a row.
    """
    box = piece.box
    boxes: list[tuple[int, Rectangle]] = []
    while start < end:
        # The largest power of the trailing dims that starts here, whole, and fits.
        inner, dim = 1, len(box.shape)
        while dim > 0 and start % (inner * box.shape[dim - 1]) == 0 and start + inner * box.shape[dim - 1] <= end:
            inner *= box.shape[dim - 1]
            dim -= 1
        if dim == 0:
            boxes.append((start, box))
            break
        position, index = start // inner, []
        for size in reversed(box.shape[:dim]):
            index.append(position % size)
            position //= size
        index.reverse()
        count = min((end - start) // inner, box.shape[dim - 1] - index[-1])
        offsets = [o + i for o, i in zip(box.offsets, index)] + list(box.offsets[dim:])
        shape = [1] * (dim - 1) + [count] + list(box.shape[dim:])
        boxes.append((start, Rectangle(tuple(offsets), tuple(shape))))
        start += count * inner
    return boxes
