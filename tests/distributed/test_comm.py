"""comm.Communicator over gloo: many collectives under way at once."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import torch
from torch import distributed as dist

from megazero.comm import Communicator


def many_at_once(rounds: int) -> bool:
    """Whether four gathers under way at a time were right, in each of ``rounds`` rounds, none of them coalesced."""
    rank = dist.get_rank()
    group = Communicator(dist.group.WORLD, 2, rank)
    own = [torch.full((32,), 10.0 * k + rank) for k in range(4)]
    wanted = [torch.cat((torch.full((32,), 10.0 * k), torch.full((32,), 10.0 * k + 1))) for k in range(4)]
    with mock.patch.object(dist, "_coalescing_manager", side_effect=AssertionError("coalesced on gloo")):
        for _ in range(rounds):
            gathered = [torch.empty(64) for _ in range(4)]
            works = [group.all_gather(gathered[k : k + 2], own[k : k + 2]) for k in (0, 2)]
            for work in works:
                work.wait()
            if not all(map(torch.equal, gathered, wanted)):
                return False
    return True


def test_gathers_under_way_at_once_do_no_harm(ranks: Callable) -> None:
    """See [Note: gloo and coalesced calls]: coalesced, 3,000 rounds of these mostly ended in a corrupted heap."""
    assert ranks(2, many_at_once, 100) == [True, True]
