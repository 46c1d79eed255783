"""The groups of ranks that ZeRO cuts model state over."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from megazero.comm import Communicator
from megazero.topology import Topology
from megazero.zero.order import Agreement


@dataclass(frozen=True)
class DataParallel:
    """The groups that model state is cut over.

    ``shard``: the ranks that hold one copy of the state between them; ``replicate``: those with the same slice of other
    copies (MiCS, Zhang et al. 2022, arXiv 2205.00119); ``whole``: both. ``local``: where backward gathers from a second
    copy kept by fewer, nearer ranks, these (hpZ, Wang et al. 2023, arXiv 2306.10209, section 4.2); else None.
    """

    whole: Communicator
    shard: Communicator
    replicate: Communicator
    local: Communicator | None = None
    agreement: Agreement | None = None


def data_parallel(topology: Topology, mics_shard_size: int, hpz_partition_size: int, timeout: float) -> DataParallel:
    """A rank's groups. ``timeout``: seconds to wait for a rank that goes another way."""
    size, rank = topology.layout.dp, topology.coordinates["dp"]
    ranks = topology.layout.along(topology.rank, "dp")
    whole = topology.communicator("dp")
    shard, local = mics_shard_size or size, hpz_partition_size
    near, nearer = rank // shard * shard, rank // max(local, 1) * local
    return DataParallel(
        whole=whole,
        shard=whole if shard == size else topology.communicator("dp", tuple(range(near, near + shard))),
        replicate=topology.communicator("dp", tuple(range(rank % shard, size, shard))),
        local=topology.communicator("dp", tuple(range(nearer, nearer + local))) if 1 < local < size else None,
        agreement=Agreement(ranks, topology.rank, timedelta(seconds=timeout)) if size > 1 else None,
    )
