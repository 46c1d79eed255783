"""Whether ranks that should hold the same weights do: what a flipped bit in one GPU's memory would quietly change.

Compared are the float32 weights and moments that several ranks hold: of all data-parallel ranks at stage 0, of the
copies that `zero.mics_shard_size` keeps; and what tensor parallelism does not cut, such as norms. What stages 1 to 3
cut is there once only, and what they gather is overwritten by each gather.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from megazero.topology import Topology
from megazero.zero.block import Block
from megazero.zero.sharded import ShardedModel

_KINDS = ("weight", "exp_avg", "exp_avg_sq")


class Part(NamedTuple):
    """A tensor's elements in a block's owned range: [first, last) of it. ``is_shared``: all tp ranks hold the same."""

    kind: str
    name: str
    block: Block
    first: int
    last: int
    is_shared: bool


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a float32 tensor's bit patterns, int64: any one flipped bit changes it."""
    return tensor.view(torch.int32).sum(dtype=torch.int64)


class Replicas:
    """Compares them; every rank makes the same calls. Waits for the device."""

    def __init__(self, sharded: ShardedModel, topology: Topology) -> None:
        self._topology = topology
        data = sharded.groups.whole if not sharded.sharding.state else sharded.groups.replicate
        self._data = data if data.size > 1 else None
        # What is kept off the device is left out: it would be read there for this alone.
        here = [block for block in sharded.trained if block.host_grad is None]
        self._parts = [part for block in here for part in _parts(block, topology.layout.tp)]
        self._tensor = [part for part in self._parts if part.is_shared]

    def difference(self) -> str | None:
        """What differs between which ranks, the same text on every rank; None where nothing does."""
        groups = []
        if self._data is not None and self._parts:
            groups.append((self._data.group, self._parts))
        if self._tensor:
            groups.append((self._topology.group("tp"), self._tensor))
        differing: dict[str, int] = {}
        for group, parts in groups:
            own = torch.stack([checksum(_values(part)) for part in parts])
            bounds = torch.cat((own, -own))
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
            high, negative_low = bounds.chunk(2)
            for index in (high != -negative_low).nonzero().flatten().tolist():
                differing[f"{parts[index].kind} of {parts[index].name}"] = int(own[index])
        count = torch.tensor([len(differing)], dtype=torch.float64, device=self._topology.device)
        dist.all_reduce(count)
        if not count.item():
            return None
        everyone: list[Mapping[str, int]] = [{}] * self._topology.layout.world_size
        dist.all_gather_object(everyone, differing)
        return "; ".join(_described(everyone))


def _parts(block: Block, tp: int) -> Iterator[Part]:
    for kind in _KINDS:
        for first, last, piece, _ in block.layout.pieces(*block.owned):
            shared = any(r.axis == "tp" and len(r.members) == tp for r in piece.replication)
            yield Part(kind, piece.name, block, first - block.owned[0], last - block.owned[0], shared)


def _values(part: Part) -> torch.Tensor:
    return part.block.owned_state(part.kind)[part.first : part.last]


def _described(everyone: list[Mapping[str, int]]) -> Iterator[str]:
    """A phrase for each of the first tensors that differ. Ranks in the minority are suspected, where there is one."""
    names = list(dict.fromkeys(name for sums in everyone for name in sums))
    for name in names[:4]:
        holders = {rank: sums[name] for rank, sums in enumerate(everyone) if name in sums}
        (common, most), *others = Counter(holders.values()).most_common()
        odd = [rank for rank, value in holders.items() if value != common]
        if others and most == others[0][1]:
            yield f"{name} differs between ranks {', '.join(map(str, holders))}"
        else:
            yield f"{name} on rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} is not that of the others"
    if len(names) > 4:
        yield f"and {len(names) - 4} more tensors"
