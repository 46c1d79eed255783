"""Where each parameter of a block lies in its flat buffer, and who owns which part. Pure arithmetic, no torch.

A block is what is gathered and reduced as one: the word embedding alone, a transformer layer, the final norm
with the head. Its parameters lie in one buffer, those of one optimizer group together, so that a rank's shard
is at most one contiguous range per group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megazero.sharding import Piece, Rectangle, ShardSpec, flat_range_boxes

ALIGNMENT = 64  # elements: 128 bytes in bf16, what matrix kernels and NCCL read fastest


def optimizer_group(name: str, spec: ShardSpec) -> str:
    """Biases and norms (1-D) are not decayed."""
    return "decay" if len(spec.local_shape) > 1 else "no_decay"


def _aligned(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Entry:
    """One local parameter: elements [start, start + spec.numel) of the buffer."""

    name: str
    spec: ShardSpec
    start: int

    @property
    def end(self) -> int:
        return self.start + self.spec.numel


@dataclass(frozen=True)
class FlatLayout:
    """The layout of one block's buffer.

    ``groups``: optimizer group → its [start, end) range. ``numel``: buffer size, a multiple of
    ``shards`` · ALIGNMENT.
    """

    name: str
    entries: tuple[Entry, ...]
    groups: Mapping[str, tuple[int, int]]
    numel: int
    shards: int

    @staticmethod
    def build(
        name: str,
        specs: Mapping[str, ShardSpec],
        shards: int,
        group_of: Callable[[str, ShardSpec], str] = optimizer_group,
    ) -> FlatLayout:
        """Lay out parameters (name → spec) for ``shards`` equal slices, those of one optimizer group together."""
        entries: list[Entry] = []
        groups: dict[str, tuple[int, int]] = {}
        position = 0
        group_by_name = {parameter: group_of(parameter, spec) for parameter, spec in specs.items()}
        for group in sorted(set(group_by_name.values())):
            start = position
            for parameter, spec in specs.items():
                if group_by_name[parameter] == group:
                    entries.append(Entry(parameter, spec, position))
                    position = _aligned(position + spec.numel, ALIGNMENT)
            if position > start:
                groups[group] = (start, position)
        return FlatLayout(name, tuple(entries), groups, _aligned(position, shards * ALIGNMENT), shards)

    def shard(self, rank: int) -> tuple[int, int]:
        """[start, end) of the slice that ``rank`` of the data-parallel group owns."""
        share = self.numel // self.shards
        return rank * share, (rank + 1) * share

    def group_ranges(self, start: int, end: int) -> dict[str, tuple[int, int]]:
        """Optimizer group → the part of it inside [start, end), for those with any."""
        ranges = {}
        for group, (low, high) in self.groups.items():
            low, high = max(low, start), min(high, end)
            if low < high:
                ranges[group] = (low, high)
        return ranges

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int, Piece, int]]:
        """Global tensors inside [start, end): (first, last + 1 in the buffer, piece, first within the piece)."""
        for entry in self.entries:
            for low, high, piece in entry.spec.spans():
                low, high = low + entry.start, high + entry.start
                first, last = max(low, start), min(high, end)
                if first < last:
                    yield first, last, piece, first - low

    def boxes(self, start: int, end: int) -> Iterator[tuple[int, Piece, Rectangle]]:
        """What [start, end) holds, as boxes of global tensors: (first element in the buffer, piece, box)."""
        for first, last, piece, offset in self.pieces(start, end):
            for at, box in flat_range_boxes(piece, offset, offset + last - first):
                yield first - offset + at, piece, box

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Ranges that no parameter covers."""
        position = 0
        for entry in self.entries:
            if entry.start > position:
                yield position, entry.start
            position = entry.end
        if self.numel > position:
            yield position, self.numel


def buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Whole consecutive items per collective: closed before it would exceed ``limit`` elements, never empty.

    ``sizes``: of each item. Returns indices, in their order.
    """
    result: list[list[int]] = []
    size = 0
    for index, numel in enumerate(sizes):
        if not result or size + numel > limit:
            result.append([])
            size = 0
        result[-1].append(index)
        size += numel
    return result
