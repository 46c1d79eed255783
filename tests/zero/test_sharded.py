"""ZeRO's collectives on a small foreign model: what is reduced, when, in how many calls, and what is never hung on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import distributed as dist
from torch import nn

from megazero.build import leave_meta
from megazero.comm import Communicator
from megazero.sharding import whole
from megazero.zero.blocks import Unit
from megazero.zero.groups import DataParallel
from megazero.zero.hooks import install_hooks
from megazero.zero.settings import ZeroSettings
from megazero.zero.sharded import ShardedModel

WIDTH = 6


class Chain(nn.Module):
    """Three linear blocks; ``skip`` leaves one out of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, device="meta") for _ in range(3))

    def forward(self, x: torch.Tensor, skip: int | None) -> torch.Tensor:
        for index, part in enumerate(self.parts):
            if index != skip:
                x = part(x)
        return x.square().sum()


def values(name: str) -> torch.Tensor:
    """A parameter's value, by name."""
    index, attribute = int(name.split(".")[1]), name.split(".")[2]
    generator = torch.Generator().manual_seed(2 * index + (attribute == "bias"))
    return torch.randn((WIDTH, WIDTH) if attribute == "weight" else (WIDTH,), generator=generator) * 0.4


def sharded_chain(stage: int, bucket: int, prefetch: int = 10**9) -> tuple[Chain, ShardedModel]:
    model = Chain()
    units = []
    for index, part in enumerate(model.parts):
        specs = {
            f"parts.{index}.{name}": whole(f"parts.{index}.{name}", tuple(p.shape))
            for name, p in part.named_parameters()
        }
        units.append(Unit(str(index), specs, (part,)))
    group = dist.group.WORLD if dist.get_world_size() > 1 else None
    device, dp = torch.device("cpu"), Communicator(group, dist.get_world_size(), dist.get_rank())
    leave_meta(model, torch.float32, device)
    sharded = ShardedModel(
        model,
        units,
        DataParallel(dp, dp, Communicator(None, 1, 0)),
        ZeroSettings(stage, bucket, bucket, prefetch, 0, 10**9),
        dtypes={name: torch.float32 for name, _ in model.named_parameters()},
        grad_dtype=torch.float32,
        device=device,
    )
    install_hooks(sharded)
    for block in sharded.blocks:
        block.load(
            "weight",
            lambda name, shape, box: values(name)[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.shape))],
        )
    sharded.gather()
    return model, sharded


def forward_backward(model: Chain, sharded: ShardedModel, x: torch.Tensor, skip: int | None) -> None:
    sharded.begin_forward()
    loss = model(x, skip)
    sharded.end_forward()
    sharded.begin_backward()
    loss.backward()
    sharded.finish_backward()


def data(rank: int, micro_batch: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 + 10 * rank + micro_batch))


def reduce_once(stage: int, bucket: int, skips: list[list[int | None]]):
    """skips[rank][micro-batch]. This rank's reduced gradients by (block, first, last), and the counts."""
    rank = dist.get_rank()
    model, sharded = sharded_chain(stage, bucket)
    for micro_batch, skip in enumerate(skips[rank]):
        if micro_batch == len(skips[rank]) - 1:
            sharded.reduce_in_next_backward()
        forward_backward(model, sharded, data(rank, micro_batch), skip)
    sharded.wait_for_gradients()
    grads = [(index, *block.owned, block.gradient.owned().clone()) for index, block in enumerate(sharded.blocks)]
    return grads, dict(sharded.groups.whole.calls), dict(sharded.groups.whole.elements)


def truth(skips: list[list[int | None]]) -> dict[str, torch.Tensor]:
    """Summed over all ranks' micro-batches by one process."""
    model = Chain().to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values(name))
            parameter.grad = torch.zeros_like(parameter)
    for rank, of_rank in enumerate(skips):
        for micro_batch, skip in enumerate(of_rank):
            model(data(rank, micro_batch), skip).backward()
    return {name: p.grad for name, p in model.named_parameters()}


NUMEL = 128
"""A block: a 36-element matrix and a 6-element bias, each on 64."""


def check(results: list, skips: list[list[int | None]]) -> None:
    expected = truth(skips)
    for index in range(3):
        buffer = torch.full((NUMEL,), torch.nan)
        for grads, *_ in results:
            _, first, last, grad = grads[index]
            buffer[first:last] = grad
        for name, start in (("weight", 0), ("bias", 64)):
            wanted = expected[f"parts.{index}.{name}"]
            found = buffer[start : start + wanted.numel()].view(wanted.shape)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        # Padding is zero, so that it counts nothing in any norm.
        assert not buffer[36:64].any() and not buffer[70:].any()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("bucket", "calls"), [(1, 3), (200, 3), (256, 2), (10**9, 1)])
def test_gradients_are_summed_once_in_as_many_calls_as_buckets(
    ranks: Callable, stage: int, bucket: int, calls: int
) -> None:
    skips: list[list[int | None]] = [[None, None], [None, None]]
    results = ranks(2, reduce_once, stage, bucket, skips)
    check(results, skips)
    kind = "reduce_scatter" if stage else "all_reduce"
    gathers = {"all_gather": calls} if stage else {}
    for _, counted, elements in results:
        assert counted == {kind: calls, **gathers}
        assert elements == {name: 3 * NUMEL for name in counted}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("bucket", [1, 10**9])
@pytest.mark.parametrize(
    "skips",
    [
        [[None], [1]],  # unused on one rank
        [[0], [2]],  # the first on one, the last on the other
        [[1], [1]],  # unused everywhere
        [[None, 1], [1, None]],  # used every other micro-batch
        [[None, None], [1, 1]],
    ],
    ids=str,
)
def test_a_block_unused_on_a_rank_hangs_nobody(ranks: Callable, stage: int, bucket: int, skips: list) -> None:
    results = ranks(2, reduce_once, stage, bucket, skips, timeout=30)
    check(results, skips)


def test_one_rank_needs_no_collective(ranks: Callable) -> None:
    for stage in (0, 1, 2, 3):
        results = ranks(1, reduce_once, stage, 1, [[None, 1, None]])
        check(results, [[None, 1, None]])
        assert results[0][1] == {}


def use_without_gather() -> str:
    model, sharded = sharded_chain(1, 1)
    forward_backward(model, sharded, data(0, 0), None)
    sharded.wait_for_gradients()
    for block in sharded.blocks:
        block.updated()
    try:
        model(data(0, 0), None)
    except AssertionError as error:
        return str(error)
    return "stale parameters were used"


def test_a_stale_parameter_cannot_be_used(ranks: Callable) -> None:
    assert all("SHARDED" in message for message in ranks(2, use_without_gather))
