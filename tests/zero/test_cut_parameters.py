"""Stage 3 on a small foreign model: what is gathered when, what is kept, what stops a rank that goes its own way."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch import distributed as dist

from megazero.errors import LaunchError
from megazero.models.config import ModelConfig
from megazero.zero.block import State
from megazero.zero.order import Agreement, UseOrder
from tests.distributed.runs import (
    TokenSource,
    assert_close,
    make_engine,
    plain_loop,
    random_weights,
    settings,
    train,
)
from tests.zero.test_sharded import NUMEL, data, forward_backward, sharded_chain

GPT2 = {
    "num_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "vocab_size": 37,
    "max_position_embeddings": 24,
}


def whole_blocks_seen(prefetch: int) -> list[list[bool]]:
    """At each forward of a second pass, which of the three blocks have their parameters or are getting them."""
    model, sharded = sharded_chain(3, 1, prefetch)
    forward_backward(model, sharded, data(0, 0), None)
    seen: list[list[bool]] = []
    for part in model.parts:
        part.register_forward_hook(lambda *_: seen.append([b.state is not State.SHARDED for b in sharded.blocks]))
    forward_backward(model, sharded, data(0, 1), None)
    seen.append([b.state is not State.SHARDED or b.flat.untyped_storage().nbytes() > 0 for b in sharded.blocks])
    return seen


@pytest.mark.parametrize(
    ("prefetch", "ahead"),
    [(0, 0), (1, 1), (NUMEL, 1), (2 * NUMEL, 2)],
)
def test_prefetch_goes_as_far_ahead_as_it_may(ranks: Callable, prefetch: int, ahead: int) -> None:
    """The hooks added here run after ours, which have let go of the block."""
    for seen in ranks(2, whole_blocks_seen, prefetch):
        assert seen == [[i < j <= i + ahead for j in range(3)] for i in range(3)] + [[False] * 3]


def agreement(members: list[int], rank: int) -> Agreement:
    return Agreement(members, rank, timedelta(seconds=1))


def agree(names: list[str]) -> str:
    rank = dist.get_rank()
    check = agreement([0, 1], rank)
    try:
        for name in (names[0], names[rank]):
            check.on(name)
    except LaunchError as error:
        return str(error)
    return "agreed"


def test_ranks_that_use_the_same_agree_and_others_are_told_apart(ranks: Callable) -> None:
    assert ranks(2, agree, ["a", "a"]) == ["agreed", "agreed"]
    first, second = ranks(2, agree, ["a", "b"])
    assert "rank 0 uses the parameters of a, rank 1 uses b" in first
    assert "rank 1 uses the parameters of b, rank 0 uses a" in second and "use stage 2" in second


def test_an_order_is_followed_until_it_is_left() -> None:
    order = UseOrder()

    def take(units: list[int]) -> list[tuple[bool, list[int]]]:
        order.begin()
        found = [(order.use(unit), list(order.ahead())) for unit in units]
        order.end()
        return found

    assert take([0, 1, 2]) == [(False, [])] * 3
    assert take([0, 1, 2]) == [(True, [1, 2]), (True, [2]), (True, [])]
    assert take([0, 2, 1]) == [(True, [1, 2]), (False, []), (False, [])]
    assert take([0, 2]) == [(True, [2, 1]), (True, [1])]
    assert take([0, 2, 1]) == [(True, [2]), (True, []), (False, [])]
    order.begin()  # a pass that an error cut off
    order.use(0)
    assert take([0, 2, 1])[0] == (True, [2, 1])


@pytest.mark.parametrize(
    ("dp", "fields"),
    [
        (4, {"stage": 1, "mics_shard_size": 2}),
        (4, {"stage": 3, "mics_shard_size": 2}),
        (2, {"stage": 2, "mics_shard_size": 1}),
        (4, {"stage": 3, "zero_hpz_partition_size": 2}),
        (2, {"stage": 3, "zero_hpz_partition_size": 2}),
        (2, {"stage": 3, "reshard_after_forward": False, "stage3_max_live_parameters": 0}),
    ],
    ids=str,
)
def test_other_groups_and_other_moments_change_nothing(dp: int, fields: dict) -> None:
    source, weights = TokenSource(37, 12), random_weights(ModelConfig(**GPT2))
    tree = settings(GPT2, (1, 1, dp), zero={"reduce_bucket_size": 2000, "allgather_bucket_size": 3000, **fields})
    assert_close(train(tree, source, weights, dp=dp), plain_loop(tree, source, weights))


def gathers_of_a_backward(fields: dict) -> tuple[int, int]:
    """Elements gathered over all ranks, and over near ones, in a step of one micro-batch."""
    with make_engine(settings(GPT2, (1, 1, 4), zero=fields)) as engine:
        groups = engine.stage.sharded.groups
        engine.train_batch(TokenSource(37, 12))
        near = groups.local.elements["all_gather"] if groups.local else 0
        return groups.shard.elements["all_gather"], near


def test_backward_gathers_from_near_ranks(ranks: Callable) -> None:
    fields = {"stage": 3, "stage3_param_persistence_threshold": 0}
    psi = ranks(4, gathers_of_a_backward, fields)[0][0] // 2
    for far, near in ranks(4, gathers_of_a_backward, {**fields, "zero_hpz_partition_size": 2}):
        assert (far, near) == (psi, psi)
    for shard, _ in ranks(4, gathers_of_a_backward, {**fields, "mics_shard_size": 2}):
        assert 0 < shard <= 2 * psi, "padding apart, the same elements, over two ranks instead of four"


@torch.no_grad()
def evaluate() -> list[int]:
    model, sharded = sharded_chain(3, 1)
    storages = []
    for batch in range(3):
        sharded.begin_forward()
        with torch.inference_mode():
            model(data(0, batch), None)
        sharded.end_forward()
        storages.append(sum(block.flat.untyped_storage().nbytes() for block in sharded.blocks))
    return storages


def test_evaluation_keeps_nothing(ranks: Callable) -> None:
    assert ranks(2, evaluate) == [[0, 0, 0]] * 2
